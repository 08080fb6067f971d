"""Plain decoding for models whose trees cannot be verified: recurrent, linear-attention and hybrid ones.

`AutoregressiveTarget` verifies roots only, and decodes each row by the steps of transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig

from ddtree.errors import UnsupportedModelError, first_line
from ddtree.model import Forward, TargetModel
from ddtree.model.architectures import cache_of, extrapolates, why_no_tree
from ddtree.model.kv_cache import drop_row
from ddtree.model.target import HuggingFaceTarget, Target
from ddtree.tree import DraftTree

_STEPS = 4
"""Tokens that a model must continue a text by just as its own `generate` does."""
_checked: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""Models that were compared with their own `generate`, so that they are not again for every call, with the positions
that each has before a text (soft prompts)."""


@contextmanager
def _bare_config(model: Any) -> Iterator[None]:
    """Take away what a model's generation_config.json says of search and sampling, which is our part."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class Continuation:
    """One text as `generate` continues it: its ids, and the inputs that are handed from step to step.

    `generate` prepares the inputs as for any `custom_generate`, so that whatever it, the model's class or a wrapper
    adds (positions, a cache, soft prompts) reaches the model. The steps are those of its loop.

    Args:
        model: a `PreTrainedModel`, or a wrapper of one.
        ids: int64 [1, n], the prompt.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._ids = ids
        self._first = True
        with _bare_config(model):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_length=ids.shape[1] + 1,
                custom_generate=self._receive,
            )

    def _receive(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Tensor:
        self._model, self._inputs = model, inputs
        # A wrapper puts its own in the place of the model's, and takes it away when `generate` ends.
        self._prepare = model.prepare_inputs_for_generation
        return input_ids

    @property
    def cached(self) -> int:
        """Return how many tokens the model's cache holds, soft prompts included; 0 where it does not tell."""
        try:
            return int(cache_of(self._inputs).get_seq_length())
        except (AttributeError, ValueError):  # a recurrent state
            return 0

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self._ids = torch.cat([self._ids, self._ids.new_full((1, 1), token)], dim=1)

    def run(self, every: bool = False) -> Tensor:
        """Process what was not yet processed: the prompt, or the token appended; logits [1, 1 or n, V].

        Args:
            every: give the logits of all tokens processed, not of the last alone.

        Raises:
            UnsupportedModelError: the model gives no cache.
        """
        inputs = dict(self._inputs)
        if self._first:
            inputs["is_first_iteration"] = True
        if every and "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        prepared = self._prepare(self._ids, next_sequence_length=None if self._first else 1, **inputs)
        with nullcontext() if self._first else self._model._optimize_model_for_decode():
            output = self._model(**prepared, return_dict=True)
        if cache_of(output) is None:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} gives no cache to continue a text from: ddtree cannot decode it"
            )
        self._inputs = self._model._update_model_kwargs_for_generation(output, self._inputs)
        self._first = False
        return output.logits if every else output.logits[:, -1:]


class NativeCache:
    """One continuation by the model's own means per row, packed like `KVCache`.

    Attributes:
        states: each row's; None before its first token.
    """

    # The model does not tell.
    used_bytes = 0
    reserved_bytes = 0

    def __init__(self) -> None:
        self.states: list[Continuation | None] = []

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
        """Append a row with the text of the only row of another; return its index."""
        self.states.append(other.states[0])
        return self.rows - 1

    def commit(self, paths: list[list[int]]) -> None:
        """Do nothing: only roots are ever processed, and they are always accepted."""


class AutoregressiveTarget(HuggingFaceTarget, TargetModel):
    """A causal LM decoded one token at a time as its own `generate` does; takes no drafter.

    Args:
        model: a loaded `PreTrainedModel` with a language-model head.
        tokenizer: its tokenizer, or None when only token ids are used.
        max_context: most tokens of a sequence; the model's own limit by default.

    Attributes:
        reason: why no tree is verified, for messages.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder, or does not give the logits of its `generate`.
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
        if model not in _checked:
            _checked[model] = self._check()
        if not extrapolates(self.config):
            self.max_context -= _checked[model]

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
        with torch.inference_mode():
            text = Continuation(self.model, torch.tensor([tokens], device=self.device))
            logits = text.run(every)
        cache.states[row] = text
        yield tokens, Forward(logits, None)

    @torch.inference_mode()
    def verify(self, cache: NativeCache, tree: DraftTree) -> Forward:
        """Run the root of each row; logits [R, 1, V].

        Raises:
            UnsupportedModelError: the tree has more nodes.
        """
        if tree.tokens.shape[1] > 1:
            raise UnsupportedModelError(f"{self.reason}: only roots can be verified")
        rows = []
        for text, token in zip(cache.states, tree.tokens[:, 0].tolist(), strict=True):
            assert text is not None
            text.append(token)
            rows.append(text.run())
        return Forward(torch.cat(rows), None)

    @torch.inference_mode()
    def _check(self) -> int:
        """Compare some steps, and another text begun between them, with the model's own `generate`.

        Returns:
            How many positions the model has before a text.

        Raises:
            UnsupportedModelError: it fails, or the logits differ.
        """
        name = type(self.model).__name__
        prompt = torch.tensor([[t % self.vocab_size for t in (11, 7, 5, 3, 2, 13)]], device=self.device)
        prompt = prompt[:, : max(1, self.max_context - _STEPS)]
        try:
            with _bare_config(self.model):
                own = self.model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_length=prompt.shape[1] + _STEPS,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            text = Continuation(self.model, prompt)
            ours = [text.run()[:, -1]]
            before = text.cached - prompt.shape[1]
            Continuation(self.model, prompt.flip(1)).run()
            for token in own.sequences[0, prompt.shape[1] : -1].tolist():
                text.append(token)
                ours.append(text.run()[:, -1])
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} cannot be decoded a token at a time ({type(error).__name__}: {first_line(error)}): "
                "use its own generate"
            ) from error
        wanted = torch.cat(own.logits).float()
        gap = (torch.cat(ours).float() - wanted).abs().max()
        if not gap <= wanted.std() * (1e-3 if self.dtype == torch.float32 else 0.05):
            raise UnsupportedModelError(
                f"{name} gives other logits than in its own generate (difference {gap:.3g}): use that"
            )
        return max(0, before)


def choose_target(
    model: Any,
    drafts: bool,
    tokenizer: Any = None,
    max_context: int | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
    remember: bool = False,
) -> Target | AutoregressiveTarget:
    """Return a target that verifies trees, or where there can be none the one that decodes plainly.

    Args:
        model, tokenizer, max_context: as for either.
        drafts: a drafter was named, so that plain decoding would not do.
        pack, compile, remember: as for `Target`.

    Raises:
        UnsupportedModelError: no tree can be verified on the model although one shall, or it cannot be decoded at all.
        ConfigError: `max_context` is out of range.
    """
    adapters = getattr(model, "peft_config", None) or {}
    # PEFT finds their place in the prompt in its own `generate`; a call of the model alone uses none of them.
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an adapter that starts within the text (aLoRA), which only its own generate "
            "finds: use that"
        )
    try:
        return Target(
            model, tokenizer, max_context=max_context, pack=pack, compile=compile, remember=remember
        )
    except UnsupportedModelError:
        # The error advises plain decoding, which is thereby known to work.
        plain = AutoregressiveTarget(model, tokenizer, max_context)
        if drafts:
            raise
        return plain
