"""Plain decoding for models whose trees cannot be verified: recurrent, linear-attention and hybrid ones.

`AutoregressiveTarget` has the operations of `Target` that a tree of the root alone needs, and lets the model keep
whatever cache it builds for itself, one per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModelError
from ddtree.model.compat import cache_argument, cache_of
from ddtree.model.kv_cache import drop_row
from ddtree.model.target import Forward, context_limit, eos_ids, why_no_tree
from ddtree.tree import DraftTree


class NativeCache:
    """One cache of the model's own making per row, packed like `KVCache`."""

    # What the model keeps in it is the model's affair.
    used_bytes = reserved_bytes = 0

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.states: list[Any] = []

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def add_row(self) -> int:
        self.lengths.append(0)
        self.states.append(None)
        return self.rows - 1

    def drop_row(self, row: int) -> None:
        drop_row(self.lengths, row)
        drop_row(self.states, row)

    def take(self, other: NativeCache) -> int:
        """Append a row with what the only row of another cache holds; returns its index."""
        self.lengths.append(other.lengths[0])
        self.states.append(other.states[0])
        return self.rows - 1

    def commit(self, paths: list[list[int]]) -> None:
        """Nothing to cut: only roots are ever processed, and they are always accepted."""


class AutoregressiveTarget:
    """A causal LM decoded one token at a time with its own cache; takes no drafter."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: Any, tokenizer: Any = None, max_context: int | None = None) -> None:
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(model).__name__} is an encoder-decoder; ddtree runs causal LMs"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.max_context = context_limit(self.config, max_context)
        self.eos_ids = eos_ids(model, tokenizer)
        self.reason = why_no_tree(model) or "asked for"
        self._cache_name = cache_argument(model)

    def use_features(self, layers: tuple[int, ...]) -> None:
        """Refuse: features are for drafters, and this target verifies no drafts."""
        if layers:
            raise UnsupportedModelError(f'{self.reason}: no drafter can be used; use drafter="none"')

    def close(self) -> None:
        """Nothing was put on the model."""

    def new_cache(self, tokens: int | None = None) -> NativeCache:
        """An empty cache; it grows as the model lets it, whatever `tokens` says."""
        return NativeCache()

    def prefill(
        self, cache: NativeCache, row: int, tokens: list[int], chunk: int = 512, every: bool = False
    ) -> Iterator[tuple[list[int], Forward]]:
        """Process a prompt at once: recurrent states are not continued over chunks by every model."""
        logits = self._run(cache, row, tokens)
        yield tokens, Forward(logits if every else logits[:, -1:], None)

    def verify(self, cache: NativeCache, tree: DraftTree) -> Forward:
        """One token of each row; logits [R, 1, V]."""
        if tree.tokens.shape[1] > 1:
            raise UnsupportedModelError(f"{self.reason}: only roots can be verified")
        rows = [self._run(cache, row, [token]) for row, token in enumerate(tree.tokens[:, 0].tolist())]
        return Forward(torch.cat(rows), None)

    @torch.inference_mode()
    def _run(self, cache: NativeCache, row: int, tokens: list[int]) -> Tensor:
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([tokens], device=self.device),
            "use_cache": True,
        }
        if cache.states[row] is not None:
            arguments[self._cache_name] = cache.states[row]
        output = self.model(**arguments)
        cache.states[row] = cache_of(output)
        if cache.states[row] is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives no cache to continue a text from: ddtree cannot decode it"
            )
        cache.lengths[row] += len(tokens)
        return output.logits
