"""The drafter for first-order heads, Markov's and TreeFlash's: one pass of the backbone, one of the head, one tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.backbone import Backbone
from ddtree.drafters.dflash import PLAIN, drawn, width_of
from ddtree.drafters.heads import Head
from ddtree.drafters.heads.markov import Markov
from ddtree.drafters.tables import first_order
from ddtree.errors import ConfigError
from ddtree.noise import couple
from ddtree.stats import Clock
from ddtree.tree import DraftTree, grow, prune

View = Callable[[Tensor], Tensor]
"""int64 [n] -> float32 [n, Vd]: log-probabilities of depths 1..n after the tokens given, the bonus token first."""

# Children of a prefix that can be told apart; a tree hardly ever takes as many.
_MOST_CHILDREN = 64
# Predecessors to guess for each depth at least: a chain has few nodes, and each of its depths needs the right one.
_LEAST_GUESSES = 4


class FirstOrder:
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
        couple(torch.zeros(1), torch.zeros(1), *coupling)  # refuses values out of range
        if confident and not (isinstance(head, Markov) and head.confidence_proj is not None):
            raise ConfigError(f"this {head.kind} head has no confidence head: drop confident=True")
        self.name = head.kind if name is None else name
        self.backbone = backbone
        self.head = head.to(backbone.device, backbone.dtype).eval()
        self.feature_layers = backbone.feature_layers
        self.max_depth = backbone.depth
        self.coupling = coupling
        self.trace: Callable[[DraftRow, View], None] | None = None
        """Called with each row and the head's view of any path, before coupling: also of the one then accepted."""
        self._predecessors = predecessors
        self._confidence = cast(Markov, self.head).confidence if confident else None

    def add_row(self) -> None:
        self.backbone.add_row()

    def drop_row(self, row: int) -> None:
        self.backbone.drop_row(row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        self.backbone.observe(row, features)

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        backbone = self.backbone
        bonus, depths = [row.tokens[-1] for row in rows], [row.depth for row in rows]
        width, depth = max(map(width_of, rows)), max(depths)
        if width == 0:
            return DraftTree.root(bonus, backbone.device)
        states = backbone.states(bonus, depth)
        if self.trace is not None:
            for row, own in zip(rows, states, strict=True):
                self.trace(row, self._view(own))
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
        sampling = {i: row for i, row in enumerate(rows) if row.noise is not None and row.depth > 0}
        if self.coupling == PLAIN or not sampling:
            return None
        noises = {i: drawn(row, row.depth, self.backbone.draft_ids) for i, row in sampling.items()}

        def adjust(index: int, places: Tensor, logprobs: Tensor) -> Tensor:
            if index not in noises:
                return logprobs
            noise = noises[index]
            within = noise[places.clamp(max=len(noise) - 1)]  # deeper places are cut off later
            return couple(logprobs, within, beta * rows[index].temperature, kappa)

        return adjust

    def _view(self, states: Tensor) -> View:

        def logprobs(previous: Tensor) -> Tensor:
            own = states[None, : len(previous)]
            with torch.inference_mode():
                return self.head(self.backbone, own, previous[None].to(own.device))[0].log_softmax(dim=-1)

        return logprobs
