"""The one loop: prefill, then rounds of draft, verify, walk, commit, for one sequence or a ragged batch.

The engine knows protocols (a target, a drafter), not methods. What it promises: a sequence's tokens depend on the
target, the prompt, the parameters and the seed only, whatever the drafter, the budget and the rows beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters import Drafter, claim, holdings_of, release
from ddtree.engine.detokenizer import Detokenizer
from ddtree.engine.planner import Planner, check_prompt
from ddtree.engine.prefix_cache import PrefixStore
from ddtree.engine.scheduler import Admission, Joining
from ddtree.engine.sequence import FinishReason, Sequence, chooser, emit
from ddtree.errors import CacheMemoryError, ConfigError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.kv_cache import drop_row, out_of_memory
from ddtree.model.target import Target
from ddtree.policy import AutoBudget, AutoMethod, Choice, Policy, Request
from ddtree.sampling.sampler import Sampler, SamplingParams
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, walk

__all__ = ["Engine", "FinishReason", "Round", "Sequence"]


@dataclass(frozen=True)
class Round:
    """What one round came to, for `Engine.listener`.

    Attributes:
        rows: the sequences that took part.
        choices: how each was drafted for.
        tree: as verified.
        paths: the accepted path of each row, the root (node 0) first.
        seconds: of the parts of this round, as in `ddtree.stats.PARTS`.
    """

    rows: list[Sequence]
    choices: list[Choice]
    tree: DraftTree
    paths: list[list[int]]
    seconds: dict[str, float]


class Engine:
    """Decodes sequences together, one round at a time.

    Args:
        target: the model whose output must not change.
        drafter: what proposes; None decodes autoregressively.
        max_rows: sequences decoded at once; more wait their turn.
        prefill_chunk: prompt tokens per forward.
        cache_bytes: memory that keys and values of what runs may take, the target's and the drafters', with the
            features that wait for them; a sequence waits until all that it can come to fits. None: as much as there is.
        prefix_bytes: memory for what texts leave to later prompts that begin alike; 0 for none. Targets with caches
            of their own leave nothing.

    Attributes:
        listener: called after each round, within `step`; it must be cheap.
        prefixes: what texts left, or None.

    Raises:
        ConfigError: an argument is out of range, or the drafter is in use by another engine.
        UnsupportedModelError: a drafter that needs features was given with a target that has none.
    """

    def __init__(
        self,
        target: Target | AutoregressiveTarget,
        drafter: Drafter | None = None,
        *,
        max_rows: int = 8,
        prefill_chunk: int = 512,
        cache_bytes: int | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        if max_rows < 1 or prefill_chunk < 1:
            raise ConfigError(f"max_rows={max_rows} and prefill_chunk={prefill_chunk} must be at least 1")
        if prefix_bytes < 0:
            raise ConfigError(f"prefix_bytes={prefix_bytes} must be at least 0")
        claim(drafter, self)
        self.target = target
        self.drafter = drafter
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self._bounds: dict[str, Any] = {
            "max_rows": max_rows,
            "prefill_chunk": prefill_chunk,
            "cache_bytes": cache_bytes,
            "prefix_bytes": prefix_bytes,
        }
        self.clock = Clock()
        self._planner = Planner(target, drafter, self.clock)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.listener: Callable[[Round], None] | None = None
        self._joining: Joining | None = None
        # Whether the running rows have waited for a prompt since their last round.
        self._waited = False
        self._stepping = False
        self._closed = ""
        # Each kind of target takes the kind of cache that it makes.
        self._cache: Any = target.new_cache()
        target.use_features(drafter.feature_layers if drafter else ())
        self._holdings = holdings_of(drafter)
        self.prefixes: PrefixStore | None = None
        if prefix_bytes and not isinstance(target, AutoregressiveTarget):
            self.prefixes = PrefixStore(prefix_bytes, features=bool(target.feature_layers))
        self._admission: Admission | None = None
        if cache_bytes is not None:
            stay = self.prefixes is not None
            self._admission = Admission(target, self._cache, cache_bytes, self._holdings, features_stay=stay)

    @property
    def idle(self) -> bool:
        return not self.sequences

    @property
    def policy(self) -> Policy | None:
        """What decides for requests that say auto; there may be none while none does."""
        return self._planner.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._planner.policy = policy

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the drafters that requests may choose from."""
        return self._planner.members

    @property
    def joining(self) -> Sequence | None:
        """The sequence whose prompt is being processed."""
        return None if self._joining is None else self._joining.sequence

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not left: running, joining, waiting."""
        joining = [] if self.joining is None else [self.joining]
        return [*self.running, *joining, *self.waiting]

    @property
    def closed(self) -> bool:
        """Whether it can decode no more: `close` was called, or a row could not be freed."""
        return bool(self._closed)

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values in use, the drafters' too, and how many there may be.

        That is `cache_bytes`, which bounds waiting features as well, or what the buffers have.
        """
        caches = [self._cache, *(holding.cache for holding in self._holdings)]
        if self._joining is not None:
            caches.append(self._joining.cache)
        used = sum(cache.used_bytes for cache in caches)
        if self._admission is not None:
            return used, self._admission.limit
        return used, sum(cache.reserved_bytes for cache in caches)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        method: AutoMethod = "tree",
        budget: AutoBudget = 16,
        depth: int = MAX_DEPTH,
        members: tuple[str, ...] | None = None,
        text: Detokenizer | None = None,
    ) -> Sequence:
        """Queue a prompt; it joins when its turn comes and there is a free row.

        Args:
            prompt: token ids.
            params: how to sample.
            method: "tree", "chain" (a tree of one path), "off" (no drafting), or "auto": as the policy decides.
            budget: most drafted nodes of a round, or "auto": as many as pay.
            depth: how far ahead to draft.
            members: names of those of several drafters that may draft for it; all by default.
            text: makes text of the tokens, and finds stop strings.

        Raises:
            PromptError: the prompt is empty, holds unknown ids, or leaves no room in the context or in `cache_bytes`.
            ConfigError: method, budget, depth or members is out of range, or the engine is closed.
        """
        request = self.request(method, budget, depth, members, sampled=not params.greedy)
        sequence = self.sequence(prompt, params, request, text)
        self.queue(sequence)
        return sequence

    def request(
        self, method: AutoMethod, budget: AutoBudget, depth: int, members: tuple[str, ...] | None = None,
        *, sampled: bool,
    ) -> Request:  # fmt: skip
        """What `Sequence.request` is for such arguments of `add`; it may be assigned between steps. Raises ConfigError.

        Args:
            sampled: the sequence's temperature is above 0.
        """
        return self._planner.request(method, budget, depth, members, sampled)

    def sequence(
        self, prompt: list[int], params: SamplingParams, request: Request, text: Detokenizer | None = None
    ) -> Sequence:
        """Make what `queue` takes, with the checks and errors of `add`. Any thread may, while another runs steps."""
        self._check_open()
        check_prompt(prompt, self.target.vocab_size, self.target.max_context)
        if self._admission is not None:
            self._admission.check(len(prompt), params.max_tokens)
        sampler = Sampler(
            params,
            prompt_length=len(prompt),
            vocab_size=self.target.vocab_size,
            eos_ids=self.target.eos_ids,
            device=self.target.device,
        )
        return Sequence(prompt, sampler.params, sampler, text, request)

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence join when its turn comes and there is a free row."""
        self._check_open()
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now and free its row; nothing happens to one that has ended."""
        if sequence.finish_reason is None:
            sequence.finish("cancelled")
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            # Within a step, from a processor or a finalizer, rows must keep their places until its end.
            if not self._stepping:
                self._leave()

    def close(self) -> None:
        """Cancel what runs and let others use the drafter; nothing can be added any more."""
        for sequence in self.sequences:
            self.cancel(sequence)
        self._closed = self._closed or "the engine is closed: load the model again"
        release(self.drafter, self)

    def renewed(self, drafter: Drafter | None) -> Engine:
        """A new engine on the same target within the same bounds, for when this one is closed."""
        return Engine(self.target, drafter, **self._bounds)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Process a chunk of a waiting prompt, or run one round; returns the sequences that moved on.

        Where there is both to do, the two take turns, so that running rows wait for one chunk between two rounds.
        While nothing runs, all prompts of one chunk join in one step. Those that joined have their first token. Those
        with a `finish_reason` have left.
        """
        if self._stepping:
            raise ConfigError("a step is running: a processor cannot decode with the engine that runs it")
        self._check_open()
        self._stepping = True
        try:
            if self.running and (self._waited or not self._next()):
                moved = list(self.running)
                self._round()
                self._waited = False
            else:
                moved = self._prefill()
                self._waited = bool(self.running)
        finally:
            self._stepping = False
        self._leave()
        return moved

    def _round(self) -> None:
        before = dict(self.clock.seconds)
        rows, lengths = list(self.running), [len(sequence.tokens) for sequence in self.running]
        with self.clock("draft"):
            plan = self._planner.plan(rows, self._room())
        with self.clock("verify"):
            forward = self.target.verify(self._cache, plan.tree)
            if plan.decided and self.target.device.type != "cpu":
                # The walk needs the logits at once; waiting here gives each part its own time.
                torch.accelerator.synchronize(self.target.device)
        assert forward.logits is not None
        with self.clock("walk"):
            paths = walk(plan.tree, chooser(rows, forward.logits, self.target.max_context))
        with self.clock("commit"):
            self._cache.commit(paths)
            self._observe(paths, lengths, forward.features)
        seconds = self._account(before, rows)
        for row, sequence in enumerate(rows):
            sequence.verified(
                lengths[row], plan.choices[row].arm, plan.tree.sizes[row] - 1, len(paths[row]) - 1
            )
        answers = [sequence.tokens[length:] for sequence, length in zip(rows, lengths, strict=True)]
        self._planner.learn(plan, paths, answers, seconds)
        if self.listener is not None:
            self.listener(Round(rows, plan.choices, plan.tree, paths, seconds))

    def _prefill(self) -> list[Sequence]:
        """One chunk; or, while nothing runs, all prompts that take no more than one, after the end of the first."""
        alone = not self.running
        moved: list[Sequence] = []
        while (joining := self._next()) and (not moved or joining.left <= self.prefill_chunk):
            if self._advance(joining):
                moved.append(joining.sequence)
            if joining is self._joining or not alone:
                break
        return moved

    def _next(self) -> Joining | None:
        """The prompt that is being processed; the first waiting one, if there is room for it, where there was none."""
        if self._joining is None and self.waiting and len(self.running) < self.max_rows:
            sequence = self.waiting[0]
            if self._admission is None or self._admission.admit(self.running, sequence):
                self.waiting.popleft()
                # The logits of the last token are wanted: it is processed in any case.
                known = []
                if self.prefixes is not None and sequence.prompt_logprobs is None:
                    known = self.prefixes.find(sequence.tokens[:-1])
                self._joining = Joining(sequence, self.target, self.prefill_chunk, known)
        return self._joining

    def _advance(self, joining: Joining) -> bool:
        """Process a chunk of a prompt; whether it was the last one, or has failed."""
        sequence, before, logits = joining.sequence, dict(self.clock.seconds), None
        try:
            with self.clock("prefill"):
                if self._admission is not None:
                    self._admission.confine()
                logits = joining.advance()
                if logits is not None:
                    self._join(joining, logits)
        except (CacheMemoryError, torch.OutOfMemoryError) as error:
            known = isinstance(error, CacheMemoryError)
            sequence.error = error if known else out_of_memory(self.target.device)
            sequence.finish("error")
        self._account(before, [sequence])
        if logits is None and sequence.error is None:
            return False
        self._joining = None
        sequence.began()
        return True

    def _join(self, joining: Joining, logits: Tensor) -> None:
        """Make a row of a prompt and emit the first token at once: no draft stands between."""
        sequence = joining.sequence
        row = self._cache.take(joining.cache)
        self.running.append(sequence)
        if self.drafter:
            self.drafter.add_row()
        if self.prefixes is not None:
            features = [part for _, part in joining.observed if part is not None]
            prompt = sequence.tokens[: sequence.prompt_length]
            self.prefixes.add_row(prompt, partial(self._cache.read, row), features)
        if self.drafter:
            for tokens, own in joining.observed:
                self.drafter.observe(row, tokens, own)
        emit(sequence, logits, self.target.max_context)

    def _room(self) -> int:
        """How many drafted nodes there is room for in a row."""
        return MAX_BUDGET if self._admission is None else self._admission.nodes(max(self._cache.lengths))

    def _observe(self, paths: list[list[int]], lengths: list[int], features: Tensor | None) -> None:
        for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
            tokens = self.running[row].tokens[length - 1 : length - 1 + len(path)]
            own = None if features is None else features[row, path]
            if self.drafter:
                self.drafter.observe(row, tokens, own)
            if self.prefixes is not None:
                self.prefixes.observe(row, own)

    def _leave(self) -> None:
        """Free the rows of ended sequences; the last row takes a freed one's place."""
        if self.joining is not None and self.joining.finish_reason is not None:
            self._joining = None
        for row in reversed(range(len(self.running))):
            if self.running[row].finish_reason is not None:
                try:
                    self._free(row)
                except BaseException as error:
                    self._break(error)
                    raise
                drop_row(self.running, row)

    def _free(self, row: int) -> None:
        if self.prefixes is not None:
            sequence = self.running[row]
            left = None if sequence.error else sequence.tokens[: self._cache.lengths[row]]
            self.prefixes.drop_row(row, left, partial(self._cache.read, row))
        self._cache.drop_row(row)
        if self.drafter:
            self.drafter.drop_row(row)

    def _break(self, error: BaseException) -> None:
        """Give up: a row that is freed on one side only would go on with another's state."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        self._closed = f"the engine is closed, a row could not be freed ({cause}): load the model again"
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.error = error if isinstance(error, Exception) else None
                sequence.finish("error" if sequence.error else "cancelled")
        self.running.clear()
        self.waiting.clear()
        self._joining = None
        self._cache = self.target.new_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(self._closed)

    def _account(self, before: dict[str, float], sequences: list[Sequence]) -> dict[str, float]:
        """Count the time since `before` to each of the sequences; returns it, by part."""
        seconds = {part: seconds - before[part] for part, seconds in self.clock.seconds.items()}
        for sequence in sequences:
            for part, spent in seconds.items():
                sequence.stats.seconds[part] += spent
        return seconds
