"""What drafters on a backbone have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.backbone import Backbone
from ddtree.drafters.heads import Head
from ddtree.holding import Holding
from ddtree.noise import PLAIN, check_coupling, couple

View = Callable[[Tensor], Tensor]
"""int64 [n] -> float32 [n, Vd]: log-probabilities of depths 1..n after the tokens given, the bonus token first."""


class BlockDrafter:
    """A drafter whose rows are a backbone's.

    Args:
        backbone: the network over the rows' contexts.
        name: the drafter's.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Raises:
        ConfigError: beta or kappa is out of range.
    """

    def __init__(self, backbone: Backbone, name: str, coupling: tuple[float, float] = PLAIN) -> None:
        check_coupling(*coupling)
        self.backbone = backbone
        self.name = name
        self.coupling = coupling
        self.feature_layers = backbone.feature_layers
        self.max_depth = backbone.depth

    def add_row(self) -> None:
        self.backbone.add_row()

    def drop_row(self, row: int) -> None:
        self.backbone.drop_row(row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        self.backbone.observe(row, features)

    def holdings(self) -> list[Holding]:
        return [self.backbone.holding()]

    def couples(self, row: DraftRow) -> bool:
        """Whether a row is drafted for under its noise."""
        return self.coupling != PLAIN and row.noise is not None and row.depth > 0

    def couple(self, row: DraftRow, logprobs: Tensor) -> None:
        """Replace a row's log-probabilities [..., L, Vd] of depths 1..L by its chances under the noise.

        The target picks argmax(log p / T + g), which is argmax(log p + T * g): in that form the drafter's error, and
        so the fitted kappa, do not depend on the temperature.
        """
        if self.couples(row):
            beta, kappa = self.coupling
            own = logprobs[..., : row.depth, :]
            own.copy_(couple(own, self.noise(row, own.shape[-2]), beta * row.temperature, kappa))

    def noise(self, row: DraftRow, depth: int) -> Tensor:
        """A sampling row's noise float32 [depth, Vd] at the positions of depths 1..depth, of the draft vocabulary."""
        assert row.noise is not None
        # Whole rows are drawn, because verification reads the same ones.
        full = [row.noise.gumbel(len(row.tokens) + place) for place in range(depth)]
        ids = self.backbone.draft_ids
        return torch.stack(full if ids is None else [own[ids] for own in full])


class HeadDrafter(BlockDrafter):
    """A drafter with a head on its backbone, which is moved to the backbone's device and dtype.

    Attributes:
        trace: called with each row and the head's view of any path, before coupling: also of the one then accepted.
    """

    def __init__(
        self, backbone: Backbone, head: Head, name: str | None, coupling: tuple[float, float] = PLAIN
    ) -> None:
        super().__init__(backbone, head.kind if name is None else name, coupling)
        head.to(backbone.device, backbone.dtype).eval()
        self.trace: Callable[[DraftRow, View], None] | None = None

    def tell(self, head: Head, rows: list[DraftRow], states: Tensor) -> None:
        """Call `trace` with each row and the view of its states [R, L, H]."""
        if self.trace is not None:
            for row, own in zip(rows, states, strict=True):
                self.trace(row, self._view(head, own))

    def _view(self, head: Head, states: Tensor) -> View:

        def logprobs(previous: Tensor) -> Tensor:
            own = states[None, : len(previous)]
            with torch.inference_mode():
                return head(self.backbone, own, previous[None].to(own.device))[0].log_softmax(dim=-1)

        return logprobs


def width_of(row: DraftRow) -> int:
    """Candidates that a row's tree can use at a depth."""
    if row.depth == 0 or row.budget == 0:
        return 0
    return 1 if row.chain else row.budget
