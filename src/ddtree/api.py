"""Load a target with its drafter, then generate or stream: the Python interface."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self, overload

import torch

from ddtree import prompts
from ddtree.drafters import Drafter, parts_of
from ddtree.drafters.loading import DrafterSpec, folder_of, load_drafter
from ddtree.engine.detokenizer import Detokenizer, bad_word_ids
from ddtree.engine.engine import Engine, Sequence
from ddtree.engine.planner import check_drafting
from ddtree.engine.sequence import Piece, Result
from ddtree.errors import CheckpointError, ConfigError, did_you_mean, first_line
from ddtree.model.autoregressive import choose_target
from ddtree.model.demo import NAME as DEMO
from ddtree.model.demo import demo_drafter
from ddtree.model.kv_cache import out_of_memory
from ddtree.model.pretrained import check_causal_lm, load_causal_lm
from ddtree.policy import AutoBudget, AutoMethod, cache, calibration, unmeasured
from ddtree.prompts import Message, Prompt
from ddtree.sampling.params import SamplingParams, read_generation_config

__all__ = ["MAX_TOKENS", "Message", "Model", "Piece", "Prompt", "Result", "Stream", "load"]

MAX_TOKENS = 512
"""Most tokens of an answer by default."""
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_log = logging.getLogger(__name__)


def load(
    target: str | PathLike[str] | torch.nn.Module = DEMO,
    drafter: DrafterSpec = "auto",
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    max_context: int | None = None,
    max_rows: int = 8,
    prefill_chunk: int = 512,
    cache_bytes: int | None = None,
    prefix_bytes: int = 0,
    pack_weights: bool = True,
    compile: bool = False,
) -> Model:
    """Load a target and its drafter.

    Args:
        target: "demo", a checkpoint's folder, a Hugging Face hub id, or a loaded transformers model.
        drafter: "auto" (the demo target's own drafter, `lookup` for others), "none", "lookup", "demo", "draft:MODEL",
            a folder or hub id of a drafter, a `Drafter`, or a list of these, merged into one tree.
        tokenizer: of a target that is already loaded; without one, prompts are token ids.
        device: by default CUDA, else Apple's GPU, else the CPU.
        dtype: "float32", "bfloat16" or "float16"; the checkpoint's own by default.
        max_context: most tokens of prompt and answer; the model's own limit by default, and more only where its
            positions are rotary with fixed angles.
        max_rows: sequences decoded at once; more wait their turn.
        prefill_chunk: prompt tokens per forward; answers that are running wait for no more of a new prompt at a time.
        cache_bytes: memory that keys and values of what runs may take, the target's and the drafters', with the
            features that wait for them; as much as there is by default.
        prefix_bytes: memory for what texts leave to later prompts that begin alike, such as a chat's next turn.
        pack_weights: on CPUs, in 16 bits, keep copies of the weights in the layout of the matrix kernels, which takes
            about as much memory again.
        compile: run the target's decoder layers through `torch.compile`, on any device; then its weights are not
            packed. The first answers wait for the compiler, and on CPUs later ones are no faster (docs/cpu.md).

    Raises:
        CheckpointError: target or drafter is missing or damaged, or they do not fit together.
        UnsupportedModelError: the target is no causal LM, or a drafter was named and no tree can be verified on it.
            With "auto" or "none" such a target is decoded autoregressively.
        ConfigError: an argument is out of range.
    """
    if isinstance(target, torch.nn.Module):
        if device is not None or dtype is not None:
            raise ConfigError(
                "device and dtype of a loaded model are its own: move it before, and leave them out"
            )
        check_causal_lm(target)
        model = target
    else:
        model, own = load_causal_lm(target, device, dtype)
        tokenizer = tokenizer or own
    verifier: Any = choose_target(
        model,
        drafter not in ("auto", "none", None),
        tokenizer,
        max_context,
        pack=pack_weights,
        compile=compile,
    )
    if not verifier.verifies_trees:
        drafter = None
    if drafter == "auto":
        drafter = _automatic(target)
    engine = Engine(
        verifier,
        load_drafter(drafter, verifier),
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        cache_bytes=cache_bytes,
        prefix_bytes=prefix_bytes,
    )
    return Model(engine, drafter_folder=folder_of(drafter))


class Model:
    """A target with its drafter, ready to answer. Made by `load`.

    Streams and threads may overlap: their sequences are decoded together.

    Attributes:
        engine: decodes; for finer control than the methods here.
        target: the model whose text it is.
        tokenizer: the target's, or None.
        drafter_folder: where the drafter was read from, or None.
        defaults: fields of `SamplingParams` that the target's generation_config.json sets. The server uses all of
            them; `generate` and `stream` without `params` use `bad_words` and `max_tokens`.
    """

    def __init__(self, engine: Engine, drafter_folder: Path | None = None) -> None:
        self.engine = engine
        self.drafter_folder = drafter_folder
        self.target = engine.target
        self.tokenizer = engine.target.tokenizer
        self._lock = threading.RLock()
        self._closed = False
        self._measurable = True
        self.defaults, ignored = read_generation_config(self.target.model, self.target.vocab_size)
        for reason in ignored:
            _log.warning(reason)

    def encode(
        self, prompt: Prompt, *, chat: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, as `generate` makes them. Raises PromptError."""
        return prompts.encode(self.tokenizer, prompt, chat=chat, template_kwargs=chat_template_kwargs)

    @overload
    def generate(
        self,
        prompt: str | list[int] | list[dict[str, Any]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[list[dict[str, Any]]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        method: AutoMethod = "auto",
        budget: AutoBudget = "auto",
        depth: int = 16,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Result | list[Result]:
        """Answer a prompt, or several at once.

        Args:
            prompt: text, token ids, or messages ([{"role": ..., "content": ...}], put through the chat template); or
                a list of such prompts, which are decoded together, each as if alone.
            params: how to sample; by default `SamplingParams(max_tokens=512)`, and what the target's
                generation_config.json bans (`bad_words_ids`, `suppress_tokens`) or limits (`max_new_tokens`).
            method: "auto" (whichever is fastest here), "tree", "chain" (a tree of one path), or "off" (no drafting).
                None of them changes the text.
            budget: most drafted nodes verified in one forward pass, 0 to 1024, or "auto": as many as pay on this
                machine, which is measured at the first use (see `ddtree calibrate`).
            depth: how far ahead to draft, 1 to 16.
            chat: text is one user message and goes through the chat template.
            chat_template_kwargs: for the template.
            sampling: fields of `SamplingParams`, in place of those of `params`; `bad_words` may hold strings. A seed
                is every prompt's; without one each draws its own.

        Raises:
            PromptError: a prompt is empty, malformed, or does not fit the context.
            ConfigError: an option is unknown or out of range.
            CacheMemoryError: the device cannot hold the keys and values.
            Exception: whatever a custom processor raised.
        """
        many = prompts.is_batch(prompt)
        chosen = self._params(params, sampling)
        every = prompt if many else [prompt]
        encoded = [self.encode(one, chat=chat, chat_template_kwargs=chat_template_kwargs) for one in every]
        with _interrupts_deferred() as check:
            sequences = self._queue(encoded, chosen, method, budget, depth)
            try:
                while any(sequence.finish_reason is None for sequence in sequences):
                    self.step()
                    check()
                    for sequence in sequences:
                        _raise_error(sequence)
            finally:
                for sequence in sequences:
                    self.cancel(sequence)
        results = [Result.of(sequence) for sequence in sequences]
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: AutoMethod = "auto",
        budget: AutoBudget = "auto",
        depth: int = 16,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Answer one prompt piece by piece; arguments and errors are those of `generate`."""
        chosen = self._params(params, sampling)
        ids = self.encode(prompt, chat=chat, chat_template_kwargs=chat_template_kwargs)
        with _interrupts_deferred():
            return Stream(self, *self._queue([ids], chosen, method, budget, depth))

    def step(self) -> None:
        """Take one step of the engine for all running answers. An exception ends them all.

        Ctrl-C is raised at the end of the step. Another interruption, such as a timer's, may leave a round half done,
        so a fresh engine takes the place of this one.

        Raises:
            CacheMemoryError: the device has run out of memory.
        """
        with _interrupts_deferred(), self._lock:
            try:
                self.engine.step()
            except torch.OutOfMemoryError as error:
                full = out_of_memory(self.target.device)
                self._abandon(full)
                raise full from error
            except BaseException as error:
                # A round that broke off leaves every row of it half done.
                self._abandon(error)
                if not isinstance(error, Exception):
                    self.renew()
                raise

    def cancel(self, sequence: Sequence) -> None:
        """End an answer of `engine` now, and free its row."""
        with _interrupts_deferred(), self._lock:
            self.engine.cancel(sequence)

    def renew(self) -> None:
        """Replace an engine that broke, because a row could not be freed, by a fresh one.

        The new one does not draft if the drafter's rows cannot be freed either.

        Raises:
            ConfigError: the model is closed.
        """
        with self._lock:
            self._check_open()
            old = self.engine
            old.close()
            drafter = old.drafter if _cleared(old.drafter, old.max_rows) else None
            self.engine = old.renewed(drafter)
            self.engine.policy = old.policy if drafter is old.drafter else None

    def close(self) -> None:
        """Cancel all answers and take our hooks off the target's model; this object can no longer be used.

        The acceptance that "auto" has learnt is kept in the user's cache for the next time.
        """
        with self._lock:
            if self.engine.policy is not None and not self._closed:
                with _only_speed("keep what was learnt"):
                    cache.remember(self.engine.policy, self.engine.target, self.engine.drafter)
            self._closed = True
            self._abandon(None)
            self.engine.close()
            self.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        for name in sampling:
            if name not in _SAMPLING_FIELDS:
                hint = did_you_mean(name, _SAMPLING_FIELDS, also=("method", "budget", "depth", "chat"))
                raise ConfigError(f"unknown option {name!r}: {hint}")
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(
                f"params must be SamplingParams, not {type(params).__name__}: give fields as keyword arguments"
            )
        if words := sampling.get("bad_words"):
            sampling = {**sampling, "bad_words": bad_word_ids(self.tokenizer, words)}
        most = self.defaults.get("max_tokens", MAX_TOKENS)
        chosen = replace(params or SamplingParams(max_tokens=most), **sampling)
        if params is None:
            chosen = replace(chosen, bad_words=chosen.bad_words + self.defaults.get("bad_words", ()))
        if chosen.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: use stop_token_ids, or load with tokenizer=...")
        return chosen

    def _queue(
        self,
        encoded: list[list[int]],
        params: SamplingParams,
        method: AutoMethod,
        budget: AutoBudget,
        depth: int,
    ) -> list[Sequence]:
        """Let the engine decode these prompts, all of them or, where one is refused, none."""
        check_drafting(method, budget, depth)
        with self._lock:
            self._check_open()
            if self.engine.closed:
                self.renew()
            method, budget = self.decided(method, budget)
            request = self.engine.request(method, budget, depth, sampled=not params.greedy)
            sequences = [
                self.engine.sequence(ids, params, request, self.detokenizer(params)) for ids in encoded
            ]
            for sequence in sequences:
                self.engine.queue(sequence)
        return sequences

    def detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        """Make the object that turns an answer's tokens into text and finds stop strings; None without a tokenizer."""
        return None if self.tokenizer is None else Detokenizer(self.tokenizer, params)

    def decided(self, method: AutoMethod, budget: AutoBudget) -> tuple[AutoMethod, AutoBudget]:
        """Return the method and budget to ask the engine for: fixed ones for "auto" where nothing can decide."""
        if method == "off" or budget == 0:
            return "off", 0
        if "auto" in (method, budget) and not self.prepare():
            return unmeasured(method, budget)
        return method, budget

    def prepare(self) -> bool:
        """Make "auto" able to decide, and return whether it is; this machine may have to be measured first.

        Nothing can be measured while sequences are running, nor where the context or memory is too small.
        """
        with self._lock:
            engine = self.engine
            if engine.policy is None and engine.drafter is not None and self._measurable:
                idle = engine.idle
                with _only_speed("measure this machine"):
                    engine.policy = calibration.policy_of(
                        engine.target, engine.drafter, self.drafter_folder, idle=idle
                    )
                # A short context, or little memory: requests that fit are served all the same.
                self._measurable = engine.policy is not None or not idle
            return engine.policy is not None

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the model is closed: load it again")

    def _abandon(self, error: BaseException | None) -> None:
        for sequence in self.engine.sequences:
            if isinstance(error, Exception):
                sequence.error = error
            with suppress(Exception):
                self.engine.cancel(sequence)


class Stream(Iterator[Piece]):
    """Yields the pieces of one answer. Closing it early, or dropping it, cancels the rest and frees its row."""

    def __init__(self, model: Model, sequence: Sequence) -> None:
        self._result: Result | None = None
        self._model = model
        self._sequence = sequence
        self._tokens: list[int] = []  # chosen, and not yet given out with a piece
        self._ready: Piece | None = None  # kept over an interruption

    @property
    def result(self) -> Result:
        """The whole answer, once it has ended or was closed. Raises ConfigError before."""
        if self._result is None:
            raise ConfigError("the stream has not ended: read it to its end, or close it, before its result")
        return self._result

    def __next__(self) -> Piece:
        with _interrupts_deferred() as check:
            while self._ready is None:
                if self._result is not None:
                    raise StopIteration
                self._ready = self._piece()
                if self._ready is None:
                    self._model.step()
                    check()
        piece, self._ready = self._ready, None
        return piece

    def close(self) -> None:
        """Cancel the rest of the answer; nothing happens when it has ended."""
        if self._result is None:
            self._model.cancel(self._sequence)
            self._result = Result.of(self._sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # While the interpreter shuts down, parts of the engine may be gone already.
        with suppress(Exception):
            self.close()

    def _piece(self) -> Piece | None:
        sequence = self._sequence
        # Another thread may be in the middle of a step, and of this sequence's end.
        with self._model._lock:
            ended = sequence.finish_reason is not None
            if ended:
                self._result = Result.of(sequence)
                _raise_error(sequence)
            new = sequence.take_new()
            self._tokens += new.tokens
            if not (new.text or ended or (sequence.text is None and self._tokens)):
                return None
            tokens, self._tokens = self._tokens, []
            return Piece(new.text, tokens, self._result)


def _automatic(target: Any) -> DrafterSpec:
    """Return the drafter to load where none was named."""
    if isinstance(target, str) and target == DEMO:
        with suppress(CheckpointError):
            demo_drafter()
            return DEMO
    return "lookup"


_deferring = False


@contextmanager
def _interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the end of a block, so that no row is left half done; give a function that lets it in.

    A second one is not held back: a custom processor may never return. Only the main thread gets signals. Of nested
    blocks the outer one counts.
    """
    global _deferring
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or _deferring or not callable(handler):
        yield lambda: None
        return
    arrived: list[tuple[int, Any]] = []

    def deliver() -> None:
        if arrived:
            handler(*arrived.pop())

    def hold(*signalled: Any) -> None:
        if arrived:
            deliver()
        arrived.append(signalled)

    _deferring = True
    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        _deferring = False
        signal.signal(signal.SIGINT, handler)
        deliver()


@contextmanager
def _only_speed(purpose: str) -> Iterator[None]:
    """Go on after any error of a block that decides about speed only, and warn."""
    try:
        yield
    except Exception as error:
        _log.warning("auto cannot %s, and drafts as it does unmeasured: %s", purpose, first_line(error))


def _cleared(drafter: Drafter | None, rows: int) -> bool:
    """Free all rows of a drafter; return whether that could be done."""
    for part in parts_of(drafter):
        try:
            for _ in range(rows + 1):
                part.drop_row(0)
        except IndexError:
            continue
        except Exception:
            return False
    return True


def _raise_error(sequence: Sequence) -> None:
    if sequence.error is not None:
        raise sequence.error
