"""Drafters over a DFlash network: the base of them all, DFlash itself, and the base of those with a head.

One pass of the network gives the marginals of every depth; DFlash makes a chain or a best-first tree of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.heads import Head
from ddtree.model.kv_cache import KVFootprint
from ddtree.model.packed_weights import pack_own
from ddtree.sampling.noise import PLAIN, check_coupling, couple
from ddtree.stats import Clock
from ddtree.tree import DraftTree, best_first

View = Callable[[Tensor], Tensor]
"""int64 [n] -> float32 [n, Vd]: log-probabilities of depths 1..n after the tokens given, the bonus token first."""


class BlockDrafter:
    """The base of the drafters over a backbone: rows, features, memory and coupling with the noise.

    Args:
        backbone: the network over the rows' contexts.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Attributes:
        backbones: all networks over the rows' contexts, of which a drafter may have more than one.
        trace: called with each row and its marginals' log-probabilities [L, Vd] before coupling; they are overwritten
            afterwards, so keep a copy.

    Raises:
        ConfigError: beta or kappa is out of range.
    """

    name: str

    def __init__(self, backbone: Backbone, *, coupling: tuple[float, float] = PLAIN) -> None:
        check_coupling(*coupling)
        self.backbone = backbone
        self.backbones = [backbone]
        self.coupling = coupling
        self.feature_layers = backbone.feature_layers
        self.max_depth = backbone.depth
        self.trace: Callable[[DraftRow, Any], None] | None = None

    def add_row(self) -> None:
        """Open an empty row at the end."""
        for backbone in self.backbones:
            backbone.add_row()

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its index."""
        for backbone in self.backbones:
            backbone.drop_row(row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Take the features [n, F * H] of tokens newly committed to a row."""
        for backbone in self.backbones:
            backbone.observe(row, features)

    def kv_footprints(self) -> list[KVFootprint]:
        """Return the contexts' caches with the most memory that they can take."""
        return [backbone.kv_footprint() for backbone in self.backbones]

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row."""
        bonus = [row.tokens[-1] for row in rows]
        width = max(0 if row.depth == 0 else min(row.budget, 1) if row.chain else row.budget for row in rows)
        if width == 0:
            return DraftTree.root(bonus, self.backbone.device)
        return self._draft(rows, bonus, width, clock)

    def _draft(self, rows: list[DraftRow], bonus: list[int], width: int, clock: Clock) -> DraftTree:
        """Draft rows of which one at least wants nodes; none can use more than `width` candidates of a depth."""
        raise NotImplementedError

    def likeliest(
        self, backbone: Backbone, rows: list[DraftRow], states: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of a backbone's states [R, ..., L, H], and their log-probabilities.

        Those of sampling rows are their chances under the row's noise, as coupled.

        Returns:
            Token ids int64 [R, ..., L, C], C up to `width`, best first, and float32 of that shape.
        """
        logits, count = backbone.logits(backbone.norm(states)), min(width, backbone.size)
        if self.trace is None and not any(map(self.couples, rows)):
            # One pass less over the scores of the whole vocabulary than below.
            best = logits.topk(count, dim=-1)
            return backbone.tokens(best.indices), best.values - logits.logsumexp(dim=-1, keepdim=True)
        logprobs = logits.log_softmax(dim=-1)
        for row, own in zip(rows, logprobs, strict=True):
            if self.trace is not None:
                self.trace(row, own)
            self.couple(row, own)
        best = logprobs.topk(count, dim=-1)
        return backbone.tokens(best.indices), best.values

    def couples(self, row: DraftRow) -> bool:
        """Return whether a row is drafted for under its noise."""
        return self.coupling != PLAIN and row.noise is not None and row.depth > 0

    def couple(self, row: DraftRow, logprobs: Tensor) -> None:
        """Replace a row's log-probabilities [..., L, Vd] of depths 1..L by its chances under the noise."""
        if self.couples(row):
            own = logprobs[..., : row.depth, :]
            own.copy_(self.under_noise(own, self.noise(row, own.shape[-2]), row.temperature))

    def under_noise(self, logprobs: Tensor, noise: Tensor, temperature: float) -> Tensor:
        """Return log-probabilities [..., Vd] as they are ranked under the noise of their positions.

        The target picks argmax(log p / T + g), which is argmax(log p + T * g): in that form the drafter's error, and
        so the fitted kappa, do not depend on the temperature.
        """
        beta, kappa = self.coupling
        return couple(logprobs, noise, beta * temperature, kappa)

    def noise(self, row: DraftRow, depth: int) -> Tensor:
        """Return a sampling row's noise float32 [depth, Vd] at depths 1..depth, of the draft vocabulary."""
        assert row.noise is not None
        # Whole rows are drawn, because verification reads the same ones.
        full = [row.noise.gumbel(len(row.tokens) + place) for place in range(depth)]
        ids = self.backbone.draft_ids
        return torch.stack(full if ids is None else [own[ids] for own in full])


class DFlash(BlockDrafter):
    """Drafts with a DFlash network (arXiv 2602.06036), as a chain or as DDTree's tree (arXiv 2604.12989).

    Args:
        backbone: the network over the rows' contexts.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Raises:
        ConfigError: beta or kappa is out of range.
    """

    name = "dflash"

    def _draft(self, rows: list[DraftRow], bonus: list[int], width: int, clock: Clock) -> DraftTree:
        tokens, scores = self.candidates(rows, width)
        with clock("build"):
            budgets, depths = [row.budget for row in rows], [row.depth for row in rows]
            widths = [1 if row.chain else tokens.shape[2] for row in rows]
            return best_first(bonus, tokens, scores, budgets, depths, widths)

    @torch.inference_mode()
    def candidates(self, rows: list[DraftRow], width: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens int64 [R, L, C <= width] of each depth, best first, and their log-probabilities.

        Those of sampling rows are their chances under the row's noise, as coupled.
        """
        states = self.backbone.states([row.tokens[-1] for row in rows], max(row.depth for row in rows))
        return self.likeliest(self.backbone, rows, states, width)


class HeadDrafter(BlockDrafter):
    """The base of the drafters with a head on their backbone; the head is moved to the backbone's device and dtype.

    The drafter's name is the head's kind.

    Attributes:
        trace: called with each row and the head's view of any path, before coupling: also of the one then accepted.
    """

    def __init__(self, backbone: Backbone, head: Head, *, coupling: tuple[float, float] = PLAIN) -> None:
        super().__init__(backbone, coupling=coupling)
        self.name = head.kind
        self.head = head.to(backbone.device, backbone.dtype).eval()
        if backbone.packs:
            pack_own(self.head)

    def tell(self, rows: list[DraftRow], states: Tensor) -> None:
        """Call `trace` with each row and the view of its states [R, L, H]."""
        if self.trace is not None:
            for row, own in zip(rows, states, strict=True):
                self.trace(row, partial(self._view, own))

    @torch.inference_mode()
    def _view(self, states: Tensor, previous: Tensor) -> Tensor:
        own = states[None, : len(previous)]
        return self.head(self.backbone, own, previous[None].to(own.device))[0].log_softmax(dim=-1)
