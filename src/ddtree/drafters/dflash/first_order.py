"""The drafter for first-order heads, Markov's and TreeFlash's: one pass of the backbone, one of the head, one tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ddtree.drafters import DraftRow, keep_chains
from ddtree.drafters.dflash import HeadDrafter
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.heads import Head, Markov
from ddtree.errors import ConfigError
from ddtree.sampling.noise import PLAIN
from ddtree.stats import Clock
from ddtree.tree import DraftTree, grow, prune

_AT_ONCE = 1 << 25  # scores held at a time: 128 MB of float32
_MOST_CHILDREN = 64  # children kept of a prefix; a tree hardly ever takes as many
# Predecessors to guess for each depth at least: a chain has few nodes, and each of its depths needs the right one.
_LEAST_GUESSES = 4


class FirstOrder(HeadDrafter):
    """Drafts with a backbone's block and a head that knows each token's predecessor.

    The tree is the best-first tree of the head's path scores: a budget of B nodes needs no more than the B best
    prefixes of each level and their B best children. The head scores the children of guessed predecessors (depth,
    token), of which there are B, four for each depth at least; prefixes that end in another token go on as the
    backbone alone would have it.

    Args:
        backbone: the network over the rows' contexts.
        head: one whose logits depend on the slot's state and the token before it; moved to the backbone's device
            and dtype.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.
        predecessors: how many to guess for each row, as 64, in place of that.
        confident: multiply the probabilities of a prefix's children by the head's confidence that a draft there is
            accepted at all. That spends less of the budget where the head is unsure.

    Raises:
        ConfigError: beta or kappa is out of range, or there is no confidence head to ask.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        *,
        coupling: tuple[float, float] = PLAIN,
        predecessors: int | None = None,
        confident: bool = False,
    ) -> None:
        super().__init__(backbone, head, coupling=coupling)
        self._confidence = None
        if confident:
            if not isinstance(head, Markov) or head.confidence_proj is None:
                raise ConfigError(f"this {head.kind} head has no confidence head: drop confident=True")
            self._confidence = head.confidence
        self._predecessors = predecessors

    def _draft(self, rows: list[DraftRow], bonus: list[int], width: int, clock: Clock) -> DraftTree:
        depths = [row.depth for row in rows]
        states = self.backbone.states(bonus, max(depths))
        self.tell(rows, states)
        table = self._scored(rows, states, min(width, _MOST_CHILDREN))
        with clock("build"):
            keep_chains(table.logprobs, rows)
            tree = grow(bonus, table, width, max(depths), device=self.backbone.device)
            return prune(tree, [row.budget for row in rows], depths=depths)

    def _scored(self, rows: list[DraftRow], states: Tensor, children: int) -> _ChildTable:
        """Return the `children` best children of guessed predecessors, and of the others at each depth.

        Args:
            states: [R, L, H], the backbone's, before its final norm, of the slots of depths 1..L.
        """
        backbone, depth = self.backbone, states.shape[1]
        base = backbone.logits(backbone.norm(states))
        own, size = base.log_softmax(dim=-1), base.shape[2]
        noises = [self.noise(row, row.depth) if self.couples(row) else None for row in rows]
        places = torch.arange(depth, device=own.device)
        for row, noise, logprobs in zip(rows, noises, own, strict=True):
            self._couple_places(row, noise, places, logprobs)
        guesses = self._predecessors
        if guesses is None:
            guesses = max(max(row.budget for row in rows), _LEAST_GUESSES * (depth - 1))
        guesses, children = min(guesses, (depth - 1) * size), min(children, size)
        best = own.topk(min(max(children, guesses), size), dim=-1)
        chains = torch.tensor([row.chain for row in rows], device=own.device)
        guessed, depths = _guess(best.values, best.indices, guesses, chains)
        bonus = torch.tensor([row.tokens[-1] for row in rows], device=own.device)
        before = torch.cat([bonus[:, None], backbone.tokens(guessed)], dim=1)
        depths = torch.cat([torch.zeros_like(bonus)[:, None], depths], dim=1)
        index, scores = self._children(rows, noises, states, base, before, depths, children)
        return _ChildTable(
            before,
            depths,
            backbone.tokens(torch.cat([index, best.indices[:, :, :children]], dim=1)),
            torch.cat([scores, best.values[:, :, :children]], dim=1),
        )

    def _children(
        self,
        rows: list[DraftRow],
        noises: list[Tensor | None],
        states: Tensor,
        base: Tensor,
        before: Tensor,
        depths: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Return draft tokens and log-probabilities [R, P, count] of the best after `before` [R, P] at `depths`.

        All rows' predecessors go through the head together, as many at once as the memory allows.
        """
        (_, depth, _), lines = states.shape, before.shape[1]
        slots = (depths + torch.arange(len(rows), device=depths.device)[:, None] * depth).flatten()
        states, base, previous = states.flatten(0, 1), base.flatten(0, 1), before.flatten()
        index, scores = [], []
        step = max(1, _AT_ONCE // base.shape[1])
        for start in range(0, len(slots), step):
            part = slots[start : start + step]
            given = (self.backbone, states[part][None], previous[start : start + step][None])
            own = self.head(*given, base[part][None])[0].log_softmax(dim=-1)
            for row in range(start // lines, (start + len(part) - 1) // lines + 1):
                of_row = slice(max(row * lines - start, 0), (row + 1) * lines - start)
                self._couple_places(rows[row], noises[row], part[of_row] % depth, own[of_row])
            best = own.topk(count, dim=-1)
            index.append(best.indices)
            scores.append(best.values)
            if self._confidence is not None:
                scores[-1] = best.values + functional.logsigmoid(self._confidence(*given))[0, :, None]
        shape = (len(rows), lines, count)
        return torch.cat(index).view(shape), torch.cat(scores).view(shape)

    def _couple_places(self, row: DraftRow, noise: Tensor | None, places: Tensor, logprobs: Tensor) -> None:
        """Replace a row's log-probabilities [n, Vd] of depths 1 + `places` [n] by its chances under its noise."""
        if noise is not None:
            # Places deeper than the row's depth are cut off later.
            within = noise[places.clamp(max=len(noise) - 1)]
            logprobs.copy_(self.under_noise(logprobs, within, row.temperature))


def _guess(values: Tensor, index: Tensor, count: int, chains: Tensor) -> tuple[Tensor, Tensor]:
    """Return draft tokens and depths int64 [R, count] of the likeliest predecessors.

    Args:
        values, index: log-probabilities and draft tokens [R, L, M] of the best of each depth.
        chains: bool [R], rows that want a single path: as many guesses for each of their depths.
    """
    rows, depth, most = values.shape
    if count == 0:
        return index.new_zeros((rows, 0)), index.new_zeros((rows, 0))
    best = values[:, :, 0].cumsum(dim=1)
    bounds = values[:, :-1] + torch.cat([torch.zeros_like(best[:, :1]), best[:, :-2]], dim=1)[:, :, None]
    ranks = -torch.arange(most, device=values.device, dtype=values.dtype)
    bounds = torch.where(chains[:, None, None], ranks, bounds)
    picked = bounds.flatten(1).topk(min(count, (depth - 1) * most), dim=1).indices
    return index[:, :-1].flatten(1).gather(1, picked), picked.div(most, rounding_mode="floor") + 1


@dataclass
class _ChildTable:
    """Children by depth and token before; a `ddtree.tree.Scorer`.

    Lines 0..P are the bonus token's and those of P guessed predecessors; lines P + 1.. are, for each depth, the
    backbone's own, for tokens that were not guessed.

    Attributes:
        before: int64 [R, P + 1], token ids of the predecessors.
        depths: int64 [R, P + 1], their depths; 0 for the bonus token.
        tokens: int64 [R, P + 1 + L, K], token ids of the children, best first.
        logprobs: float32 [R, P + 1 + L, K].
    """

    before: Tensor
    depths: Tensor
    tokens: Tensor
    logprobs: Tensor

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the children of a level's prefixes; see `ddtree.tree.Scorer`."""
        if depth == 1:
            return self.tokens[:, :1], self.logprobs[:, :1]
        found = (self.before[:, None] == tokens[:, :, None]) & (self.depths == depth - 1)[:, None]
        guessed, line = found.max(dim=2)
        line = torch.where(guessed, line, self.before.shape[1] + depth - 1)
        at = line[:, :, None].expand(-1, -1, self.tokens.shape[2])
        return self.tokens.gather(1, at), self.logprobs.gather(1, at)
