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

from ddtree.admission import Admission
from ddtree.autoregressive import AutoregressiveTarget
from ddtree.cache import out_of_memory
from ddtree.checks import check_drafting, check_members, check_prompt
from ddtree.drafters import Drafter, DraftRow, parts_of
from ddtree.drafters.claims import claim, release
from ddtree.errors import CacheMemoryError, ConfigError
from ddtree.joining import Joining
from ddtree.policy import OFF, AutoBudget, AutoMethod, Choice, Policy, Proposals, Request
from ddtree.prefixes import PrefixStore
from ddtree.rows import drop_row
from ddtree.sampling import Sampler, SamplingParams
from ddtree.sequence import FinishReason, Sequence
from ddtree.stats import Clock
from ddtree.target import Target
from ddtree.text import Detokenizer
from ddtree.tree import MAX_DEPTH, DraftTree, walk

__all__ = ["Engine", "FinishReason", "Round", "Sequence"]

# What the walk is told when a sequence has ended: no child carries it.
_END = -1


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
        cache_bytes: memory that keys and values of what runs may take; a sequence waits until all that it can come to
            fits. None: as much as there is.
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
        self.policy: Policy | None = None
        self.members = tuple(part.name for part in parts_of(drafter))
        self.clock = Clock()
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
        self._admission = None if cache_bytes is None else Admission(target, cache_bytes)
        self.prefixes: PrefixStore | None = None
        if prefix_bytes and not isinstance(target, AutoregressiveTarget):
            self.prefixes = PrefixStore(prefix_bytes, features=bool(target.feature_layers))

    @property
    def idle(self) -> bool:
        return not self.sequences

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
        """Bytes of keys and values in use, and how many there may be: `cache_bytes`, or those of the buffers."""
        caches = [self._cache] if self._joining is None else [self._cache, self._joining.cache]
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
        check_drafting(method, budget, depth)
        check_members(members, self.members)
        if self.policy is None and self.drafter is not None and "auto" in (method, budget):
            raise ConfigError("method or budget is auto and the engine has no policy: set Engine.policy")
        drafting = self.members if members is None else tuple(m for m in self.members if m in members)
        if method == "off" or budget == 0 or not drafting:
            method, budget, drafting = "off", 0, ()
        return Request(
            method, budget, drafting, min(depth, self.drafter.max_depth if self.drafter else 0), sampled
        )

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
                    self._admission.confine(self._cache, sequence)
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
        self._emit(sequence, logits)

    def _round(self) -> None:
        before = dict(self.clock.seconds)
        rows = list(self.running)
        with self.clock("draft"):
            choices = self._plan()
            tree = self._draft(choices)
        with self.clock("verify"):
            forward = self.target.verify(self._cache, tree)
            if self._planned and self.target.device.type != "cpu":
                # The walk needs the logits at once; waiting here gives each part its own time.
                torch.accelerator.synchronize(self.target.device)
        assert forward.logits is not None
        lengths = [len(sequence.tokens) for sequence in rows]
        with self.clock("walk"):
            paths = walk(tree, self._chooser(forward.logits))
        with self.clock("commit"):
            self._cache.commit(paths)
            self._observe(paths, lengths, forward.features)
        for sequence, choice, path, size, length in zip(
            rows, choices, paths, tree.sizes, lengths, strict=True
        ):
            sequence.accepted(length, len(path) - 1)
            sequence.stats.rounds += 1
            sequence.stats.arms[str(choice.arm)] += 1
            sequence.stats.nodes += size - 1
            sequence.stats.accepted[len(path) - 1] += 1
        seconds = {part: seconds - before[part] for part, seconds in self.clock.seconds.items()}
        if self._planned:
            assert self.policy is not None
            answers = [sequence.tokens[length:] for sequence, length in zip(rows, lengths, strict=True)]
            self.policy.learn(tree, paths, answers, seconds)
        self._account(before, rows)
        if self.listener is not None:
            self.listener(Round(rows, choices, tree, paths, seconds))

    @property
    def _planned(self) -> bool:
        return any(sequence.request.automatic for sequence in self.running)

    def _plan(self) -> list[Choice]:
        """How each row is drafted this round."""
        requests = [sequence.request for sequence in self.running]
        if self._planned:
            assert self.policy is not None
            contexts = [len(sequence.tokens) - 1 for sequence in self.running]
            return self.policy.plan(requests, contexts, [not s.stats.rounds for s in self.running])
        return [request.fixed() for request in requests]

    def _draft(self, choices: list[Choice]) -> DraftTree:
        rows = [self._draft_row(*pair) for pair in zip(self.running, choices, strict=True)]
        if self.drafter is None or not any(row.depth for row in rows):
            tree = DraftTree.root([row.tokens[-1] for row in rows], self.target.device)
        else:
            tree = self.drafter.draft(rows, self.clock)
        if self._planned:
            assert self.policy is not None
            with self.clock("build"):
                # A draft cut short by the end of an answer tells little of the drafter.
                whole = [
                    choice.arm == OFF or row.depth == sequence.request.depth
                    for row, choice, sequence in zip(rows, choices, self.running, strict=True)
                ]
                tree = self.policy.cut(tree, self._proposals, whole)
        return tree

    def _proposals(self) -> Proposals | None:
        """The own trees of several drafters, of the round being made."""
        return getattr(self.drafter, "proposals", None)

    def _draft_row(self, sequence: Sequence, choice: Choice) -> DraftRow:
        room = self.target.max_context - len(sequence.tokens) - 1
        left = sequence.params.max_tokens - sequence.output_length - 1
        depth = min(sequence.request.depth, room, left)
        budget = choice.budget
        if self._admission is not None:
            # Rows are as wide as the longest with its nodes, and recorded passes may add half as many.
            budget = min(budget, (self._admission.columns - max(self._cache.lengths)) * 2 // 3 - 1)
        if choice.arm == OFF:
            depth = 0
        return DraftRow(
            sequence.tokens,
            budget,
            max(0, depth),
            choice.arm.method == "chain",
            None if sequence.params.greedy else sequence.sampler.noise,
            sequence.params.temperature,
            choice.floor,
            choice.arm.members,
        )

    def _chooser(self, logits: Tensor) -> Callable[[list[int], list[int]], list[int]]:
        """The target's choice at a node, in the walk's order, which is the text's: so each choice is emitted."""

        def choose(rows: list[int], nodes: list[int]) -> list[int]:
            return [
                self._emit(self.running[row], logits[row, node])
                for row, node in zip(rows, nodes, strict=True)
            ]

        return choose

    def _emit(self, sequence: Sequence, logits: Tensor) -> int:
        """Choose the next token from the logits [V] after `sequence.tokens`, append it, and see whether it ends."""
        # A processor of a row before this one may have cancelled it.
        if sequence.finish_reason is not None:
            return _END
        try:
            token = sequence.sampler.choose(logits, sequence.tokens, committed=len(sequence.tokens))
            if sequence.logprobs is not None:
                sequence.logprobs.append(sequence.sampler.logprobs(logits, token))
        except Exception as error:
            # A user's own processor may fail; that ends its sequence and spares the rows beside it.
            sequence.error = error
            sequence.finish("error")
            return _END
        # A processor may have cancelled the sequence it was called for.
        if sequence.finish_reason is not None:
            return _END
        sequence.append(token)
        reason = self._ending(sequence, token)
        if reason is None:
            return token
        sequence.finish(reason)
        return _END

    def _ending(self, sequence: Sequence, token: int) -> FinishReason | None:
        params, length = sequence.params, sequence.output_length
        stops = token in sequence.sampler.stop_ids and length >= params.min_tokens
        stopped = sequence.text is not None and sequence.text.push(token, visible=not stops)
        if stops or stopped:
            return "stop"
        if length >= params.max_tokens or len(sequence.tokens) >= self.target.max_context:
            return "length"
        return None

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

    def _account(self, before: dict[str, float], sequences: list[Sequence]) -> None:
        for sequence in sequences:
            for part, seconds in self.clock.seconds.items():
                sequence.stats.seconds[part] += seconds - before[part]
