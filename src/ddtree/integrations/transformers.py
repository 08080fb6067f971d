"""`custom_generate`: draft trees inside transformers' own `model.generate`.

    model.generate(**inputs, custom_generate=ddtree.custom_generate, drafter="lookup", max_new_tokens=200)

`generate` prepares everything as ever (config, processors, stopping criteria) and hands the decoding loop over to us.
Its logits processors run on the prefix of each choice, its criteria after each token, so the ids are those of its own
loop: the same ones for `do_sample=False`, the same distribution otherwise.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import CodeType, FrameType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode

from ddtree.drafters import Drafter
from ddtree.drafters.loading import DrafterSpec, load_drafter
from ddtree.engine.engine import Engine, Sequence
from ddtree.errors import ConfigError, PromptError, UnsupportedModelError, check_whole
from ddtree.model.architectures import CACHE_NAMES, extrapolates
from ddtree.model.autoregressive import AutoregressiveTarget, choose_target
from ddtree.model.target import Target
from ddtree.policy import Method
from ddtree.sampling.params import SamplingParams

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What `generate` prepares for its own loop, and what says how much to return, which the config says too.
_KNOWN = {
    *CACHE_NAMES, "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
}  # fmt: skip
# These keep state of their own from call to call, which goes with one text only.
_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)

_drafters: WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], Drafter | None]] = WeakKeyDictionary()
"""Drafters that were loaded by name and are not in use, so that they are not read again for every call."""


_TAKE_ARGUMENTS = getattr(getattr(GenerationMixin, "_extract_generation_mode_kwargs", None), "__code__", None)
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def _dropped_argument(name: str) -> Any:
    """Return an argument of the `generate` call that runs our `custom_generate`, from its frame; None without one.

    transformers does not forward `streamer` to a callable `custom_generate`, in any release of the range: it goes
    through the documented signature, is fed the prompt, and is then lost.
    """
    frame = _caller(_GENERATE)
    return None if frame is None else frame.f_locals.get(name)


class _TokenizerSignature(inspect.Signature):
    """A signature that gives the tokenizer back to `generate` when it asks for the callable's parameters.

    transformers removes `tokenizer` from its arguments before it looks which of them the callable names, in any
    release of the range, so that its own stop strings would lack it. It reads nothing else of the callable before.
    """

    __slots__ = ()

    @property
    def parameters(self) -> MappingProxyType[str, inspect.Parameter]:
        """Return the callable's parameters; put the tokenizer back first where `generate` asks for them."""
        frame = _caller(_TAKE_ARGUMENTS)
        if frame is not None:
            taken = frame.f_locals.get("generation_mode_kwargs", {}).get("tokenizer")
            if taken is not None:
                frame.f_locals["kwargs"].setdefault("tokenizer", taken)
        return super().parameters


def _caller(code: CodeType | None) -> FrameType | None:
    """Return the nearest frame around this one that runs `code`; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: DrafterSpec = "auto",
    method: Method = "tree",
    budget: int = 16,
    depth: int = 16,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode for `model.generate(..., custom_generate=ddtree.custom_generate)`.

    Args:
        drafter: as in `ddtree.load`; "auto" is lookup. What was loaded by name is kept for the model's next call.
        method, budget, depth: as in `Model.generate`.
        streamer: of transformers; gets each token as soon as it is chosen.
        tokenizer: of transformers, for `stop_strings`.

    Sampling draws one seed for each row from torch's global generator, so `set_seed` reproduces. Rows move on at their
    own pace: criteria see one as a batch of its own, processors as a batch in which every row is that one. A custom
    processor must be a pure function of its arguments.

    Past the context that the model was made for, transformers goes on to `max_length`, and so do we where positions
    are rotary with fixed angles. With others ("dynamic", "longrope", learned), texts end where that context does.

    Returns:
        Ids int64 [rows, prompt + new], rows that ended early padded on the right, or the usual output class.

    Raises:
        ConfigError: an argument is out of range; beam search, contrastive search, assistants, stateful processors,
            attentions or hidden states are asked for.
        UnsupportedModelError: inputs other than ids and a left-padding mask, or a named drafter for a model on which no
            tree can be verified.
        PromptError: a prompt is empty or fills the context.
    """
    for name, value in (("budget", budget), ("depth", depth)):
        check_whole(name, value)
    streamer = _dropped_argument("streamer") if streamer is None else streamer
    _refuse(generation_config, logits_processor)
    starts = _starts(input_ids, model_kwargs)
    with _pair(model, drafter) as (target, own):
        if extrapolates(target.config):
            target.max_context = max(target.max_context, generation_config.max_length)
        run = _Run(input_ids, starts, logits_processor, stopping_criteria, generation_config, streamer)
        with closing(Engine(target, own, max_rows=len(starts))) as engine:
            run.decode(engine, method, budget, depth)
    return run.output()


_own = inspect.signature(custom_generate)
# transformers' own stop strings get the tokenizer too.
custom_generate.__signature__ = _TokenizerSignature(  # type: ignore[attr-defined]
    list(_own.parameters.values()), return_annotation=_own.return_annotation
)


class _Run:
    """One call: the rows, and the ids, scores and ends that transformers expects, token by token."""

    def __init__(
        self, input_ids: Tensor, starts: list[int], processors: Any, criteria: Any, config: Any, streamer: Any
    ) -> None:
        self.input_ids = input_ids
        self.starts = starts
        self.processors = processors
        self.criteria = criteria
        self.config = config
        self.streamer = streamer
        self.width = input_ids.shape[1]
        self.room = config.max_length - self.width
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.pad_id = _pad_id(config)
        self.sequences: list[Sequence] = []
        # Rows as transformers sees them: padding and prompt, then the tokens as they come.
        self.ids = torch.nn.functional.pad(input_ids, (0, self.room), value=self.pad_id)
        self.received = [0] * len(starts)
        self.ends: list[int | None] = [None] * len(starts)
        self.streamed = 0
        self.logits: list[dict[int, Tensor]] = [{} for _ in starts]
        self.scores: list[dict[int, Tensor]] = [{} for _ in starts]

    def decode(self, engine: Engine, method: Method, budget: int, depth: int) -> None:
        """Decode all rows to their ends."""
        rows = self.input_ids.tolist()
        sampling = self.config.do_sample
        seeds = torch.randint(2**62, (len(rows),)).tolist() if sampling else [0] * len(rows)
        for row, (ids, start) in enumerate(zip(rows, self.starts, strict=True)):
            params = SamplingParams(
                temperature=1.0 if sampling else 0.0,
                max_tokens=self.room,
                seed=seeds[row],
                ignore_eos=True,
                processors=(self._processor(row, ids[:start]),),
            )
            self.sequences.append(engine.add(ids[start:], params, method=method, budget=budget, depth=depth))
        length: int | None = None
        while length is None or self._ready() < length:
            engine.step()
            for row, sequence in enumerate(self.sequences):
                if sequence.error is not None:
                    raise sequence.error
                self._follow(row, sequence)
                if self.pads and self.ends[row] is not None:
                    engine.cancel(sequence)
            length = self._length()
            if self.streamer is not None:
                ready = self._ready() if length is None else min(self._ready(), length)
                for index in range(self.streamed, ready):
                    self.streamer.put(self.ids[:, self.width + index].cpu())
                self.streamed = max(self.streamed, ready)
        if self.streamer is not None:
            self.streamer.end()

    def _processor(self, row: int, padding: list[int]) -> Callable[[list[int], Tensor], Tensor]:
        count = len(self.starts)
        raw_wanted, scores_wanted = self.config.output_logits, self.config.output_scores
        device = self.input_ids.device

        def process(prefix: list[int], logits: Tensor) -> Tensor:
            index = len(padding) + len(prefix) - self.width
            if raw_wanted:
                self.logits[row][index] = logits.clone()
            ids = torch.tensor([padding + prefix], device=device).expand(count, -1)
            scores = self.processors(ids, logits.to(device).expand(count, -1).clone())[row]
            if scores_wanted:
                self.scores[row][index] = scores.clone()
            return scores

        return process

    def _follow(self, row: int, sequence: Sequence) -> None:
        """Write a row's new tokens down, one by one as transformers does, and see whether it ends."""
        for token in sequence.take_new().tokens:
            if self.pads and self.ends[row] is not None:
                return
            at = self.received[row] = self.received[row] + 1
            self.ids[row, self.width + at - 1] = token
            if self.ends[row] is None and bool(self._done(row, at)):
                self.ends[row] = at
        if sequence.finish_reason is not None and self.ends[row] is None:
            self.ends[row] = self.received[row]

    def _done(self, row: int, at: int) -> Any:
        scores = None
        if self.config.return_dict_in_generate and self.config.output_scores:
            scores = tuple(self.scores[row][index][None] for index in range(at))
        return torch.as_tensor(self.criteria(self.ids[row : row + 1, : self.width + at], scores)).any()

    def _length(self) -> int | None:
        """New tokens of the longest row; None while one is running."""
        known = [end for end in self.ends if end is not None]
        return max(known) if len(known) == len(self.ends) else None

    def _ready(self) -> int:
        """Return how many new tokens every row has, all where none is running.

        A row that has ended is padded; without an end token to pad with, it runs on to the last row's end.
        """
        return min(
            self.room if sequence.finish_reason is not None or (self.pads and end is not None) else received
            for sequence, end, received in zip(self.sequences, self.ends, self.received, strict=True)
        )

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """Return ids, or the output class where the config asks for it, as transformers pads them."""
        length = self._length()
        assert length is not None
        sequences = self.ids[:, : self.width + length].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        output: dict[str, Any] = {"sequences": sequences}
        if self.config.output_scores:
            output["scores"] = self._by_step(self.scores, length)
        if self.config.output_logits:
            output["logits"] = self._by_step(self.logits, length)
        return GenerateDecoderOnlyOutput(**output)

    def _by_step(self, kept: list[dict[int, Tensor]], length: int) -> tuple[Tensor, ...]:
        """[rows, V] for each new token; zeros where a row has ended."""
        blank = torch.zeros_like(kept[0][0])
        return tuple(torch.stack([row.get(index, blank) for row in kept]) for index in range(length))


@contextmanager
def _pair(model: Any, spec: DrafterSpec) -> Iterator[tuple[Target | AutoregressiveTarget, Drafter | None]]:
    """Give the target and its drafter; afterwards keep a drafter loaded by name for the model's next call."""
    automatic = spec is None or (isinstance(spec, str) and spec in ("auto", "none"))
    target = choose_target(model, drafts=not automatic, remember=True)
    try:
        if isinstance(target, AutoregressiveTarget):
            yield target, None
        elif not isinstance(spec, str):
            yield target, load_drafter(spec, target)
        else:
            spec = "lookup" if spec == "auto" else spec
            key = (spec, target.device, target.dtype)
            # A drafter in use is not in the store: calls that overlap or fail never share or leave state.
            kept = _drafters.setdefault(model, {})
            drafter = kept.pop(key) if key in kept else load_drafter(spec, target)
            yield target, drafter
            kept[key] = drafter
    finally:
        target.close()


def _refuse(config: Any, processors: Any) -> None:
    mode = config.get_generation_mode()
    if mode not in _MODES:
        wanted = mode.value.replace("_", " ")
        raise ConfigError(
            f"ddtree.custom_generate does greedy search and sampling, not {wanted}: leave out the options that ask for "
            "it (num_beams, penalty_alpha, prompt_lookup_num_tokens, ...)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ConfigError(
                f"{name} cannot be given with draft trees: run the model once over the finished ids"
            )
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise ConfigError(
                f"{type(processor).__name__} keeps state from call to call, which draft trees cannot follow: "
                "leave out the option that asks for it (guidance_scale, watermarking_config)"
            )


def _starts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return the index of each row's first prompt token, after its padding on the left."""
    for name, value in model_kwargs.items():
        if name not in _KNOWN and not _says_nothing(name, value):
            raise UnsupportedModelError(
                f"{name} is an input that draft trees do not take: give input_ids alone"
            )
    for name in CACHE_NAMES:
        # `generate` marks the one that it was given; otherwise it made one, which stays empty.
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise UnsupportedModelError(
                f"{name} of one's own is neither continued nor filled: give the whole prompt"
            )
    if input_ids.shape[1] == 0:
        raise PromptError("the prompt is empty: give at least one token")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape or bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise UnsupportedModelError(
            "attention_mask must be 1 from each prompt's first token on: pad on the left"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = (mask.cumsum(dim=1) - 1) * mask
        # Models with positions of several kinds, [kinds, rows, tokens], count text alike in each.
        masked = positions.to(mask.device) * mask
        if not torch.equal(masked, usual.expand_as(masked)):
            raise UnsupportedModelError("position_ids of one's own cannot be used: leave them out")
    return (input_ids.shape[1] - mask.sum(dim=1)).tolist()


def _says_nothing(name: str, value: Any) -> bool:
    """Return whether an input is empty, as multimodal models have them beside text alone."""
    if name == "mm_token_type_ids" and isinstance(value, Tensor):
        return not bool(value.any())
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _pad_id(config: Any) -> int:
    for name in ("_pad_token_tensor", "_eos_token_tensor"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value.reshape(-1)[0])
    return 0
