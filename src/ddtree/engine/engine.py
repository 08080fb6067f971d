"""The one loop: prefill, then rounds of draft, verify, walk, commit, for one sequence or a ragged batch.

The engine knows protocols (a target, a drafter), not methods. Its promise: the tokens of a sequence depend on the
target, the prompt, the parameters and the seed only, whatever the drafter, the budget and the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters import Drafter, claim, kv_footprints_of, release
from ddtree.engine.detokenizer import Detokenizer
from ddtree.engine.planner import Planner, check_prompt
from ddtree.engine.prefix_cache import PrefixCache
from ddtree.engine.scheduler import ChunkedPrefill, KVBudget, Scheduler
from ddtree.engine.sequence import Sequence
from ddtree.errors import CacheMemoryError, ConfigError, check_whole
from ddtree.model import TargetModel
from ddtree.model.kv_cache import drop_row, out_of_memory
from ddtree.policy import AutoBudget, AutoMethod, Choice, Request
from ddtree.policy.controller import Policy
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler, choose_ahead
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, on_host, walk


@dataclass(frozen=True)
class Round:
    """One finished round, for `Engine.listener`.

    Attributes:
        rows: the sequences that took part.
        choices: how each was drafted for.
        tree: as verified.
        paths: the accepted path of each row, the root (node 0) first.
        seconds: time by part of the round, as in `ddtree.stats.PARTS`.
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
        drafter: proposes draft trees; None decodes autoregressively.
        max_rows: sequences decoded at once; more wait their turn.
        prefill_chunk: prompt tokens of a forward pass.
        cache_bytes: memory for keys and values of running sequences, the target's and the drafters', and for features
            that wait for them, as in 2 * 2**30. A sequence waits until its worst case fits. None: no bound.
        prefix_bytes: memory for the prefix cache; 0 for none. Targets with caches of their own have none.

    Attributes:
        request: makes a `Sequence.request` of such arguments of `add`; it may be assigned between steps.
        members: names of the drafters that requests may choose from.
        waiting: sequences whose prompt has not been touched, in order.
        running: sequences with a row, in the rows' order.
        listener: called after each round, within `step`; it must be cheap.
        prefixes: the prefix cache, or None.

    Raises:
        ConfigError: an argument is out of range, or the drafter is in use by another engine.
        UnsupportedModelError: a drafter that needs features was given with a target that has none.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        *,
        max_rows: int = 8,
        prefill_chunk: int = 512,
        cache_bytes: int | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.cache_bytes = cache_bytes
        self.prefix_bytes = prefix_bytes
        for name, least in (("max_rows", 1), ("prefill_chunk", 1), ("prefix_bytes", 0)):
            check_whole(name, getattr(self, name), least)
        if cache_bytes is not None:
            check_whole("cache_bytes", cache_bytes)
        claim(drafter, self)
        self.target = target
        self.drafter = drafter
        self.clock = Clock()
        self.listener: Callable[[Round], None] | None = None
        self._planner = Planner(target, drafter, self.clock)
        self.request = self._planner.request
        self.members = self._planner.members
        self._stepping = False
        self._closed = ""
        self._cache: Any = target.new_cache()
        target.use_features(drafter.feature_layers if drafter else ())
        self._kv_footprints = kv_footprints_of(drafter)
        self.prefixes: PrefixCache | None = None
        if prefix_bytes and target.verifies_trees:
            self.prefixes = PrefixCache(prefix_bytes, features=bool(target.feature_layers))
        self._budget: KVBudget | None = None
        if cache_bytes is not None:
            stay = self.prefixes is not None
            self._budget = KVBudget(target, self._cache, cache_bytes, self._kv_footprints, features_stay=stay)
        self._scheduler = Scheduler(target, max_rows, prefill_chunk, self._budget, self.prefixes)
        self.waiting, self.running = self._scheduler.waiting, self._scheduler.running

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.sequences

    @property
    def policy(self) -> Policy | None:
        """The policy that decides for requests with "auto"; without one they are drafted for in a fixed way."""
        return self._planner.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._planner.policy = policy

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left: running, in prefill, waiting."""
        return self._scheduler.sequences

    @property
    def closed(self) -> bool:
        """Whether it can decode no more: `close` was called, or a row could not be freed."""
        return bool(self._closed)

    def kv_bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and values in use, the drafters' included, and the most there may be.

        The most is `cache_bytes`, which bounds waiting features as well, or else the size of the buffers.
        """
        caches = [self._cache, *(footprint.cache for footprint in self._kv_footprints)]
        if self._scheduler.prefill is not None:
            caches.append(self._scheduler.prefill.cache)
        used = sum(cache.used_bytes for cache in caches)
        if self._budget is not None:
            return used, self._budget.limit
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
        """Queue a prompt. It joins when its turn comes and there is a free row.

        Args:
            prompt: token ids.
            params: how to sample.
            method: "tree", "chain" (a tree of one path), "off" (no drafting), or "auto": as the policy decides.
            budget: most drafted nodes of a round, as in 16, or "auto": as many as pay.
            depth: most tokens to draft ahead, 1 to 16.
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

    def sequence(
        self, prompt: list[int], params: SamplingParams, request: Request, text: Detokenizer | None = None
    ) -> Sequence:
        """Make a sequence for `queue`, with the checks and errors of `add`. Any thread may call it."""
        self._check_open()
        check_prompt(prompt, self.target.vocab_size, self.target.max_context)
        if self._budget is not None:
            self._budget.check(len(prompt), params.max_tokens)
        sampler = Sampler(
            params,
            prompt_length=len(prompt),
            vocab_size=self.target.vocab_size,
            eos_ids=self.target.eos_ids,
            device=self.target.device,
        )
        return Sequence(prompt, sampler, text, request, self.target.max_context)

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence join when its turn comes and there is a free row."""
        self._check_open()
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence and free its row, at once or at the end of the step that runs; an ended one stays as it is."""
        if sequence.finish_reason is None:
            # Within a step, from a processor or a finalizer, tokens and rows must stay in place until its end.
            sequence.cancelled = True
            if not self._stepping:
                self._leave()

    def close(self) -> None:
        """Cancel what runs and let others use the drafter; nothing can be added any more."""
        for sequence in self.sequences:
            self.cancel(sequence)
        self._closed = self._closed or "the engine is closed: load the model again"
        release(self.drafter, self)

    def renewed(self, drafter: Drafter | None) -> Engine:
        """Make a new engine on the same target within the same bounds, for when this one is closed."""
        names = ("max_rows", "prefill_chunk", "cache_bytes", "prefix_bytes")
        return Engine(self.target, drafter, **{name: getattr(self, name) for name in names})

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Process a chunk of a prompt, or run one round; return the sequences that moved on.

        Where there is both to do, the two take turns, so that running rows wait for one chunk between two rounds.
        While nothing runs, all prompts of one chunk join in one step. Those that joined have their first token. Those
        with a `finish_reason` have left.
        """
        if self._stepping:
            raise ConfigError("a step is running: a processor cannot decode with the engine that runs it")
        self._check_open()
        self._stepping = True
        try:
            if self._scheduler.round_is_next():
                moved = list(self.running)
                self._round()
                self._scheduler.rows_waited = False
            else:
                moved = self._prefill()
                self._scheduler.rows_waited = bool(self.running)
        finally:
            self._stepping = False
        self._leave()
        return moved

    def _round(self) -> None:
        """Draft, verify, walk, emit, commit, learn: one round of all running rows."""
        rows, before = list(self.running), dict(self.clock.seconds)
        bonus = [row.tokens[-1] for row in rows]
        with self.clock("draft"):
            most = MAX_BUDGET if self._budget is None else self._budget.max_draft_nodes(self._cache.lengths)
            plan = self._planner.plan(rows, most)
        with self.clock("verify"):
            logits, features = self._verify(plan.tree, wait=plan.decided)
        with self.clock("walk"):
            paths, tokens = walk(
                plan.tree,
                [row.tokens for row in rows],
                lambda row, node, prefix: rows[row].choose(logits[row, node], prefix),
                None if on_host(logits.device) else self._chosen(plan.tree, logits),
            )
            for row, sequence in enumerate(rows):
                count = sequence.extend(tokens[row], (logits[row, node] for node in paths[row]))
                if count < len(tokens[row]):  # what follows the end of the answer is left out
                    paths[row], tokens[row] = paths[row][:count], tokens[row][:count]
        with self.clock("commit"):
            self._cache.commit(paths)
            self._observe(paths, bonus, tokens, features)
        seconds = self._account(before, rows)
        for row, sequence in enumerate(rows):
            nodes, accepted = plan.tree.sizes[row] - 1, len(paths[row]) - 1
            sequence.count_round(plan.choices[row].arm, nodes, accepted, len(tokens[row]))
        self._planner.learn(plan, paths, tokens, seconds)
        if self.listener is not None:
            self.listener(Round(rows, plan.choices, plan.tree, paths, seconds))

    def _verify(self, tree: DraftTree, wait: bool) -> tuple[Tensor, Tensor | None]:
        """Run the target over a tree; return logits [R, N, V] and features [R, N, F * H]."""
        forward = self.target.verify(self._cache, tree)
        assert forward.logits is not None
        if wait and not on_host(self.target.device):
            # The walk needs the logits at once; waiting here gives verification and walk their own times.
            torch.accelerator.synchronize(self.target.device)
        return forward.logits, forward.features

    def _chosen(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the choices after all nodes, int64 [R, N], which one read of the device then shows."""
        samplers, lengths = [row.sampler for row in self.running], [len(row.tokens) for row in self.running]
        return choose_ahead(samplers, logits, tree.depths, lengths, min(MAX_DEPTH, tree.tokens.shape[1] - 1))

    def _observe(
        self, paths: list[list[int]], bonus: list[int], tokens: list[list[int]], features: Tensor | None
    ) -> None:
        """Show drafter and prefix cache the committed tokens: the bonus token and the accepted ones."""
        for row, path in enumerate(paths):
            committed = [bonus[row], *tokens[row]][: len(path)]
            own = None if features is None else features[row, path]
            if self.drafter:
                self.drafter.observe(row, committed, own)
            if self.prefixes is not None:
                self.prefixes.observe(row, own)

    def _prefill(self) -> list[Sequence]:
        """Process one chunk; while nothing runs, also all waiting prompts of one chunk each."""
        alone = not self.running
        moved: list[Sequence] = []
        while (prefill := self._scheduler.next_prefill()) and (
            not moved or prefill.left <= self.prefill_chunk
        ):
            if self._advance(prefill):
                moved.append(prefill.sequence)
            if prefill is self._scheduler.prefill or not alone:
                break
        return moved

    def _advance(self, prefill: ChunkedPrefill) -> bool:
        """Process a chunk of a prompt; return whether it was the last one, or has failed."""
        sequence, before, logits = prefill.sequence, dict(self.clock.seconds), None
        try:
            with self.clock("prefill"):
                if self._budget is not None:
                    self._budget.reserve()
                logits = prefill.advance()
                if logits is not None:
                    self._join(prefill, logits)
        except (CacheMemoryError, torch.OutOfMemoryError) as error:
            known = isinstance(error, CacheMemoryError)
            sequence.error = error if known else out_of_memory(self.target.device)
            sequence.finish("error")
        self._account(before, [sequence])
        if logits is None and sequence.error is None:
            return False
        self._scheduler.prefill = None
        sequence.began()
        return True

    def _join(self, prefill: ChunkedPrefill, logits: Tensor) -> None:
        """Make a row of a prompt and emit the first token at once: no draft comes before it."""
        sequence = prefill.sequence
        row = self._cache.take(prefill.cache)
        self.running.append(sequence)
        if self.prefixes is not None:
            features = [part for _, part in prefill.observed if part is not None]
            prompt = sequence.tokens[: sequence.prompt_length]
            self.prefixes.add_row(prompt, partial(self._cache.read, row), features)
        if self.drafter:
            self.drafter.add_row()
            for tokens, own in prefill.observed:
                self.drafter.observe(row, tokens, own)
        token = sequence.choose(logits, sequence.tokens)
        sequence.extend([] if token is None else [token], [logits])

    def _leave(self) -> None:
        """Free the rows of ended sequences; the last row takes a freed one's place."""
        self._scheduler.finish_cancelled()
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
            kept = None if sequence.error else sequence.tokens[: self._cache.lengths[row]]
            self.prefixes.drop_row(row, kept, partial(self._cache.read, row))
        self._cache.drop_row(row)
        if self.drafter:
            self.drafter.drop_row(row)

    def _break(self, error: BaseException) -> None:
        """Give up: after a row that is freed on one side only, rows would go on with another row's state."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        self._closed = f"the engine is closed, a row could not be freed ({cause}): load the model again"
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.error = error if isinstance(error, Exception) else None
                sequence.finish("error" if sequence.error else "cancelled")
        self.running.clear()
        self._scheduler.finish_cancelled()
        self._cache = self.target.new_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(self._closed)

    def _account(self, before: dict[str, float], sequences: list[Sequence]) -> dict[str, float]:
        """Add the time since `before` to each of the sequences; return it, by part."""
        seconds = {part: seconds - before[part] for part, seconds in self.clock.seconds.items()}
        for sequence in sequences:
            for part, spent in seconds.items():
                sequence.stats.seconds[part] += spent
        return seconds
