"""The drafter for first-order heads, Markov's and TreeFlash's: one pass of the backbone, one of the head, one tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ddtree.drafters import DraftRow
from ddtree.drafters.dflash.backbone import Backbone, HeadDrafter, width_of
from ddtree.drafters.dflash.heads import Head, Markov, Trunk
from ddtree.errors import ConfigError
from ddtree.sampling.noise import PLAIN, couple
from ddtree.stats import Clock
from ddtree.tree import DraftTree, grow, prune

Adjust = Callable[[int, Tensor, Tensor], Tensor]
"""(row, int64 [n], float32 [n, Vd]) -> float32 [n, Vd]: a row's log-probabilities, of tokens at depth 1 + those given,
as they are to be ranked."""

Confidence = Callable[[Trunk, Tensor, Tensor], Tensor]

# Scores held at a time: 128 MB of float32.
_AT_ONCE = 1 << 25


@dataclass
class Tables:
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
        if depth == 1:
            return self.tokens[:, :1], self.logprobs[:, :1]
        found = (self.before[:, None] == tokens[:, :, None]) & (self.depths == depth - 1)[:, None]
        guessed, line = found.max(dim=2)
        line = torch.where(guessed, line, self.before.shape[1] + depth - 1)
        at = line[:, :, None].expand(-1, -1, self.tokens.shape[2])
        return self.tokens.gather(1, at), self.logprobs.gather(1, at)


def first_order(
    trunk: Trunk,
    head: Head,
    states: Tensor,
    bonus: Tensor,
    *,
    predecessors: int,
    children: int,
    chains: Tensor | None = None,
    adjust: Adjust | None = None,
    confidence: Confidence | None = None,
) -> Tables:
    """The tables of a batch of blocks.

    Args:
        head: one whose logits depend on the slot's state and the token before it alone.
        states: [R, L, H], the backbone's, before its final norm, of the slots of depths 1..L.
        bonus: int64 [R].
        predecessors: P, how many (depth, token) pairs to guess for each row.
        children: K, how many children of each to keep.
        chains: bool [R], rows that want a single path: as many guesses for each of their depths.
        adjust: applied to all log-probabilities before they are ranked.
        confidence: logits of the chances by which lines are scaled; takes trunk, states and previous tokens as a head.
    """
    rows, depth, _ = states.shape
    base = trunk.logits(trunk.norm(states))
    own, size = base.log_softmax(dim=-1), base.shape[2]
    if adjust is not None:
        places = torch.arange(depth, device=own.device)
        for row in range(rows):
            own[row] = adjust(row, places, own[row])
    children, predecessors = min(children, size), min(predecessors, (depth - 1) * size)
    best = own.topk(min(max(children, predecessors), size), dim=-1)
    guesses, depths = _guess(best.values, best.indices, predecessors, chains)
    before = torch.cat([bonus[:, None], trunk.tokens(guesses)], dim=1)
    depths = torch.cat([torch.zeros_like(bonus)[:, None], depths], dim=1)
    index, scores = _children(trunk, head, states, base, before, depths, children, adjust, confidence)
    return Tables(
        before,
        depths,
        trunk.tokens(torch.cat([index, best.indices[:, :, :children]], dim=1)),
        torch.cat([scores, best.values[:, :, :children]], dim=1),
    )


def _guess(values: Tensor, index: Tensor, count: int, chains: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft tokens and depths int64 [R, count] of the likeliest predecessors, of the best [R, L, M] of each depth."""
    rows, depth, most = values.shape
    if count == 0:
        return index.new_zeros((rows, 0)), index.new_zeros((rows, 0))
    best = values[:, :, 0].cumsum(dim=1)
    bounds = values[:, :-1] + torch.cat([torch.zeros_like(best[:, :1]), best[:, :-2]], dim=1)[:, :, None]
    if chains is not None:
        ranks = -torch.arange(most, device=values.device, dtype=values.dtype)
        bounds = torch.where(chains[:, None, None], ranks, bounds)
    picked = bounds.flatten(1).topk(min(count, (depth - 1) * most), dim=1).indices
    return index[:, :-1].flatten(1).gather(1, picked), picked.div(most, rounding_mode="floor") + 1


def _children(
    trunk: Trunk,
    head: Head,
    states: Tensor,
    base: Tensor,
    before: Tensor,
    depths: Tensor,
    count: int,
    adjust: Adjust | None,
    confidence: Confidence | None,
) -> tuple[Tensor, Tensor]:
    """Draft tokens and log-probabilities [R, P, count] of the best after the tokens `before` [R, P] at `depths`."""
    (rows, depth, _), lines = states.shape, before.shape[1]
    slots = (depths + torch.arange(rows, device=depths.device)[:, None] * depth).flatten()
    states, base, previous = states.flatten(0, 1), base.flatten(0, 1), before.flatten()
    index, scores = [], []
    step = max(1, _AT_ONCE // base.shape[1])
    for start in range(0, len(slots), step):
        part = slots[start : start + step]
        given = (trunk, states[part][None], previous[start : start + step][None])
        own = head(*given, base[part][None])[0].log_softmax(dim=-1)
        if adjust is not None:
            for row in range(start // lines, (start + len(part) - 1) // lines + 1):
                of_row = slice(max(row * lines - start, 0), (row + 1) * lines - start)
                own[of_row] = adjust(row, part[of_row] % depth, own[of_row])
        best = own.topk(count, dim=-1)
        index.append(best.indices)
        scores.append(best.values)
        if confidence is not None:
            scores[-1] = best.values + functional.logsigmoid(confidence(*given))[0, :, None]
    shape = (rows, lines, count)
    return torch.cat(index).view(shape), torch.cat(scores).view(shape)


# Children of a prefix that can be told apart; a tree hardly ever takes as many.
_MOST_CHILDREN = 64
# Predecessors to guess for each depth at least: a chain has few nodes, and each of its depths needs the right one.
_LEAST_GUESSES = 4


class FirstOrder(HeadDrafter):
    """Drafts with a backbone's block and a head that knows each token's predecessor.

    The tree is the best-first tree of the head's path scores: a budget of B nodes needs no more than the B best
    prefixes of each level and their B best children. Of guessed predecessors (see `ddtree.drafters.tables`) there
    are B, four for each depth at least; prefixes that end in another token go on as the backbone alone would have
    it.

    Args:
        backbone: the network over the rows' contexts.
        head: one whose logits depend on the slot's state and the token before it; moved to the backbone's device
            and dtype.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.
        name: of the drafter; the head's kind by default.
        predecessors: how many to guess for each row, in place of that.
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
        name: str | None = None,
        predecessors: int | None = None,
        confident: bool = False,
    ) -> None:
        super().__init__(backbone, head, name, coupling)
        if confident and not (isinstance(head, Markov) and head.confidence_proj is not None):
            raise ConfigError(f"this {head.kind} head has no confidence head: drop confident=True")
        self.head = head
        self._predecessors = predecessors
        self._confidence = cast(Markov, self.head).confidence if confident else None

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        backbone = self.backbone
        bonus, depths = [row.tokens[-1] for row in rows], [row.depth for row in rows]
        width, depth = max(map(width_of, rows)), max(depths)
        if width == 0:
            return DraftTree.root(bonus, backbone.device)
        states = backbone.states(bonus, depth)
        self.tell(self.head, rows, states)
        budget = max(row.budget for row in rows)
        guesses = max(budget, _LEAST_GUESSES * (depth - 1))
        chains = torch.tensor([row.chain for row in rows], device=backbone.device)
        tables = first_order(
            backbone,
            self.head,
            states,
            torch.tensor(bonus, device=backbone.device),
            predecessors=guesses if self._predecessors is None else self._predecessors,
            children=min(width, _MOST_CHILDREN),
            chains=chains,
            adjust=self._coupled(rows),
            confidence=self._confidence,
        )
        with clock("build"):
            for index, row in enumerate(rows):
                if row.chain:
                    tables.logprobs[index, :, 1:] = float("-inf")
            tree = grow(bonus, tables, width, depth, device=backbone.device)
            return prune(tree, [row.budget for row in rows], depths=depths)

    def _coupled(self, rows: list[DraftRow]) -> Callable[[int, Tensor, Tensor], Tensor] | None:
        """Log-probabilities of sampling rows become chances under the row's noise, as in `DFlash`."""
        beta, kappa = self.coupling
        noises = {i: self.noise(row, row.depth) for i, row in enumerate(rows) if self.couples(row)}
        if not noises:
            return None

        def adjust(index: int, places: Tensor, logprobs: Tensor) -> Tensor:
            if index not in noises:
                return logprobs
            noise = noises[index]
            within = noise[places.clamp(max=len(noise) - 1)]  # deeper places are cut off later
            return couple(logprobs, within, beta * rows[index].temperature, kappa)

        return adjust
