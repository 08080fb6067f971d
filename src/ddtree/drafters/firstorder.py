"""The drafter for first-order heads, Markov's and TreeFlash's: one pass of the backbone, one of the head, one tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.backbone import Backbone
from ddtree.drafters.block import HeadDrafter, width_of
from ddtree.drafters.heads import Head
from ddtree.drafters.heads.markov import Markov
from ddtree.drafters.tables import first_order
from ddtree.errors import ConfigError
from ddtree.noise import PLAIN, couple
from ddtree.stats import Clock
from ddtree.tree import DraftTree, grow, prune

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
