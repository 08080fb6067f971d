"""Plain decoding for models whose trees cannot be verified: recurrent, linear-attention and hybrid ones.

`AutoregressiveTarget` verifies roots only, and lets the model keep whatever cache it builds for itself, one per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModelError
from ddtree.model import Forward, TargetModel
from ddtree.model.architectures import cache_of, why_no_tree
from ddtree.model.kv_cache import drop_row
from ddtree.model.target import HuggingFaceTarget
from ddtree.tree import DraftTree


class NativeCache:
    """One opaque cache of the model's own making per row, packed like `KVCache`.

    Attributes:
        states: each row's cache; None before its first token.
    """

    # The model does not tell.
    used_bytes = 0
    reserved_bytes = 0

    def __init__(self) -> None:
        self.states: list[Any] = []

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return len(self.states)

    def add_row(self) -> int:
        """Append an empty row and return its index."""
        self.states.append(None)
        return self.rows - 1

    def drop_row(self, row: int) -> None:
        """Free a row; the last row takes its index."""
        drop_row(self.states, row)

    def take(self, other: NativeCache) -> int:
        """Append a row with the cache of the only row of another; return its index."""
        self.states.append(other.states[0])
        return self.rows - 1

    def commit(self, paths: list[list[int]]) -> None:
        """Do nothing: only roots are ever processed, and they are always accepted."""


class AutoregressiveTarget(HuggingFaceTarget, TargetModel):
    """A causal LM decoded one token at a time with its own cache; takes no drafter.

    Args:
        model: a loaded `PreTrainedModel` with a language-model head.
        tokenizer: its tokenizer, or None when only token ids are used.
        max_context: most tokens of a sequence; the model's own limit by default.

    Attributes:
        reason: why no tree is verified, for messages.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
        ConfigError: `max_context` is out of range.
    """

    verifies_trees = False

    def __init__(self, model: Any, tokenizer: Any = None, max_context: int | None = None) -> None:
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(model).__name__} is an encoder-decoder; ddtree runs causal LMs"
            )
        super().__init__(model, tokenizer, max_context)
        self.feature_layers: tuple[int, ...] = ()
        self.reason = why_no_tree(model) or "asked for"

    def use_features(self, layers: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError for any layer: features are for drafters, and no drafts can be verified."""
        if layers:
            raise UnsupportedModelError(f'{self.reason}: no drafter can be used; use drafter="none"')

    def close(self) -> None:
        """Do nothing: nothing was put on the model."""

    def new_cache(self, tokens: int | None = None) -> NativeCache:
        """Return an empty cache; it grows as the model lets it, whatever `tokens` says."""
        return NativeCache()

    def prefill(
        self, cache: NativeCache, row: int, tokens: list[int], chunk: int = 512, every: bool = False
    ) -> Iterator[tuple[list[int], Forward]]:
        """Process a prompt at once, whatever `chunk` says: not every model continues a recurrent state over chunks."""
        logits = self._run(cache, row, tokens)
        yield tokens, Forward(logits if every else logits[:, -1:], None)

    def verify(self, cache: NativeCache, tree: DraftTree) -> Forward:
        """Run the root of each row; logits [R, 1, V].

        Raises:
            UnsupportedModelError: the tree has more nodes.
        """
        if tree.tokens.shape[1] > 1:
            raise UnsupportedModelError(f"{self.reason}: only roots can be verified")
        rows = [self._run(cache, row, [token]) for row, token in enumerate(tree.tokens[:, 0].tolist())]
        return Forward(torch.cat(rows), None)

    @torch.inference_mode()
    def _run(self, cache: NativeCache, row: int, tokens: list[int]) -> Tensor:
        """Process tokens of one row; logits [1, n, V]."""
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
        return output.logits
