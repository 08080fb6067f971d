"""A small language model as drafter, grown level by level as in EAGLE-2 (arXiv 2406.16858) and SpecInfer (2305.09781).

Each level is one pass of the draft model over the best prefixes of the level before, which see their own ancestors
only. All children scored on the way are candidates; the best of them under the budget are the tree.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddtree.drafters import DraftRow, keep_chains
from ddtree.errors import CheckpointError, check_whole
from ddtree.model.kv_cache import KVFootprint, drop_row, token_bytes
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN, check_coupling, couple
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree, grow, prune

MAX_WIDTH = 32
# Longer backlogs (prompts) are processed a row at a time, without padding; a round commits no more than this.
_AT_ONCE = MAX_DEPTH + 1


def check_vocabulary(draft: Target, target: Target) -> None:
    """Raise CheckpointError unless token ids mean the same to both models.

    Embeddings may be padded differently, and one of the tokenizers may know more tokens than the other.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"the draft model has {draft.vocab_size} tokens and the target {target.vocab_size}: "
                "use a draft model with the target's vocabulary"
            )
        return
    small, large = sorted((draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()), key=len)
    clash = next((token for token, number in small.items() if large.get(token) != number), None)
    if clash is not None:
        raise CheckpointError(
            f"token {clash!r} is {small[clash]} in one vocabulary and {large.get(clash, 'absent')} in the other: "
            "use a draft model with the target's vocabulary"
        )


class DraftModel:
    """Drafts with a causal LM that has the target's vocabulary.

    Its cache holds committed tokens only; they are processed when the next draft is asked for, so that the first
    token of an answer does not wait for them. Rows that only wait for those of another row, a long prompt's, wait for
    one chunk a round; the row is drafted once its text is processed. A text longer than the draft model's context is
    not drafted.

    Args:
        draft: the draft model.
        target: the model to draft for.
        width: prefixes expanded a level and children looked at of each, 1..32.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.
        chunk: most tokens of long texts that are processed while other rows wait, as 512.

    Attributes:
        lagging_rows: rows that the last draft left out, because their texts are not processed yet.

    Raises:
        CheckpointError: the vocabularies differ.
        ConfigError: an argument is out of range.
    """

    name = "draft-model"
    feature_layers: tuple[int, ...] = ()
    max_depth = MAX_DEPTH

    def __init__(
        self,
        draft: Target,
        target: Target,
        *,
        width: int = 10,
        coupling: tuple[float, float] = PLAIN,
        chunk: int = 512,
    ) -> None:
        check_whole("width", width, 1, MAX_WIDTH)
        check_whole("chunk", chunk, 1)
        check_coupling(*coupling)
        check_vocabulary(draft, target)
        self.model = draft
        self.width = width
        self.coupling = coupling
        self.chunk = chunk
        self.lagging_rows: list[int] = []
        self.vocab_size = min(draft.vocab_size, target.vocab_size)
        self._device = target.device
        self.cache = draft.new_cache()
        self._backlog: list[list[int]] = []

    def add_row(self) -> None:
        """Open an empty row at the end."""
        self.cache.add_row()
        self._backlog.append([])

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its index."""
        self.cache.drop_row(row)
        drop_row(self._backlog, row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Keep newly committed tokens for the next draft."""
        # A text can hold ids that only the target has; any other token will do in their place.
        self._backlog[row] += [min(token, self.vocab_size - 1) for token in tokens]

    def kv_footprints(self) -> list[KVFootprint]:
        """Return the draft model's cache with the most memory that it can take."""
        # The backlog of a round, the root, and all levels that are expanded.
        spare = _AT_ONCE + 1 + (MAX_DEPTH - 1) * self.width
        return [KVFootprint(self.cache, partial(token_bytes, self.model), spare, self.model.max_context)]

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row; the root alone for those in `lagging_rows`."""
        bonus = [row.tokens[-1] for row in rows]
        budgets = [row.budget for row in rows]
        depths = [self._depth(row) for row in rows]
        with clock("prefill"):
            self.lagging_rows = self._catch_up(depths)
        for index in self.lagging_rows:
            depths[index] = 0
        if not any(depths):
            return DraftTree.root(bonus, self._device)
        backlog = [part if depth else [] for part, depth in zip(self._backlog, depths, strict=True)]
        growth = _Growth(self, rows, backlog, depths)
        width = min(self.width, 1 if all(row.chain for row in rows) else max(budgets))
        keep = max(width, min(max(budgets), self.width * width))
        tree = grow(bonus, growth, width, max(depths), keep=keep, device=self.model.device)
        self.cache.commit([list(range(len(part))) for part in backlog])
        self._backlog = [[] if depth else part for part, depth in zip(self._backlog, depths, strict=True)]
        with clock("build"):
            tree = prune(tree, budgets, depths=depths)
        columns = (tree.tokens, tree.parents, tree.depths, tree.logprobs)
        tokens, parents, levels, logprobs = (column.to(self._device) for column in columns)
        return DraftTree(tokens, parents, levels, logprobs, tree.sizes)

    def _depth(self, row: DraftRow) -> int:
        """Return how deep a row can be drafted: the draft model's context must hold every prefix that is expanded."""
        room = self.model.max_context + 1 - len(row.tokens)
        return max(0, min(row.depth, room)) if row.budget else 0

    def _catch_up(self, depths: list[int]) -> list[int]:
        """Process the long backlogs of the drafted rows; return the rows whose backlogs are still long."""
        late = [row for row, depth in enumerate(depths) if depth and len(self._backlog[row]) > _AT_ONCE]
        # Where all rows are late, none would gain by going on without the others.
        left = self.chunk if len(late) < len(depths) else sum(map(len, self._backlog))
        for row in late:
            part, self._backlog[row] = self._backlog[row][:left], self._backlog[row][left:]
            left -= len(part)
            for _ in self.model.prefill(self.cache, row, part, self.chunk):
                pass
        return [row for row in late if len(self._backlog[row]) > _AT_ONCE]


class _Growth:
    """A scorer that runs the draft model over each level's prefixes, until no deeper one can be among the best.

    Nodes stay in the cache as pending columns, after the backlog and the root.
    """

    def __init__(
        self, drafter: DraftModel, rows: list[DraftRow], backlog: list[list[int]], depths: list[int]
    ) -> None:
        self._drafter = drafter
        self._rows = rows
        self._backlog = backlog
        device = drafter.model.device
        self._depths = torch.tensor(depths, device=device)
        self._offsets = torch.tensor([len(part) for part in backlog], device=device)
        self._budgets = torch.tensor([row.budget for row in rows], device=device)
        self._temperatures = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
        # Children of the last level, their scores, and the pending columns that their parents see.
        self._tokens = self._scores = self._seen = torch.empty(0, device=device)
        self._best = torch.zeros(len(rows), 0, device=device)
        self._over = False

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the children of a level's prefixes; see `ddtree.tree.Scorer`."""
        if depth == 1:
            scores = torch.zeros(tokens.shape, device=tokens.device)
            logits = self._first(tokens)
        else:
            nothing = torch.full(tokens.shape, float("-inf"), device=tokens.device)
            scores = nothing if self._over else self._scores_of(parents, tokens)
            # Once nothing deeper can be among the best, the levels that `grow` still asks for stay empty.
            self._over = self._over or self._finished(depth, scores)
            if self._over:
                return tokens[:, :, None], nothing[:, :, None]
            logits = self._next(depth, parents, tokens)
        children, logprobs = self._children(logits, depth)
        self._tokens, self._scores = children, scores[:, :, None] + logprobs
        return children, logprobs

    def _first(self, bonus: Tensor) -> Tensor:
        """Run backlog and bonus token of each row, padded on the right; logits [R, 1, V] after the bonus token."""
        sizes = [len(part) for part in self._backlog]
        most, least = max(sizes), min(sizes)
        tokens = torch.tensor(
            [part + [0] * (most + 1 - len(part)) for part in self._backlog], device=bonus.device
        )
        tokens.scatter_(1, self._offsets[:, None], bonus.clamp(max=self._drafter.vocab_size - 1))
        columns = torch.arange(most + 1, device=bonus.device)
        depths = columns.minimum(self._offsets[:, None])
        self._seen = (columns <= self._offsets[:, None])[:, None]
        logits = self._run(tokens, depths, None, keep=most + 1 - least)
        return logits[torch.arange(len(sizes), device=bonus.device), self._offsets - least][:, None]

    def _next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """Run a level's prefixes; logits [R, W, V] after them."""
        rows, width = tokens.shape
        seen = self._seen.gather(1, parents[:, :, None].expand(-1, -1, self._seen.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        self._seen = torch.cat([seen, own], dim=2)
        depths = (self._offsets + depth - 1)[:, None].expand(rows, width)
        return self._run(tokens, depths, self._seen, keep=0)

    def _run(self, tokens: Tensor, depths: Tensor, visible: Tensor | None, keep: int) -> Tensor:
        drafter = self._drafter
        logits = drafter.model.extend(drafter.cache, tokens, depths, visible, keep=keep).logits
        assert logits is not None
        return logits[..., : drafter.vocab_size]

    def _children(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the best children [R, W, K] after logits [R, W, V], and their log-probabilities."""
        logq = torch.log_softmax(logits.float() / self._temperatures[:, None, None], dim=-1)
        if self._drafter.coupling != PLAIN:
            for index, row in enumerate(self._rows):
                if row.noise is not None:
                    gumbel = row.noise.gumbel(len(row.tokens) - 1 + depth)[: logq.shape[-1]]
                    logq[index] = couple(logq[index], gumbel.to(logq.device), *self._drafter.coupling)
        logprobs, tokens = logq.topk(min(self._drafter.width, logq.shape[-1]), dim=-1)
        keep_chains(logprobs, self._rows)
        return tokens, logprobs

    def _scores_of(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [R, W] of the prefixes that were kept of the last call's children."""
        places = parents[:, :, None].expand(-1, -1, self._tokens.shape[2])
        same = self._tokens.gather(1, places) == tokens[:, :, None]
        return self._scores.gather(1, places).masked_fill(~same, float("-inf")).amax(dim=2)

    def _finished(self, depth: int, scores: Tensor) -> bool:
        """Return whether every row has its budget full of nodes that no child of these prefixes can beat."""
        most = max(row.budget for row in self._rows)
        found = torch.cat([self._best, self._scores.flatten(1)], dim=1)
        self._best = found.topk(min(most, found.shape[1]), dim=1).values
        padded = torch.nn.functional.pad(self._best, (0, most - self._best.shape[1]), value=float("-inf"))
        last = padded.gather(1, (self._budgets - 1).clamp(min=0)[:, None])
        reached = (self._depths < depth)[:, None]
        return bool((reached | (scores <= last)).all())
