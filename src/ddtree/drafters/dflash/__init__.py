"""The DFlash drafter: one pass gives the marginals of every depth; a chain or a best-first tree is made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.dflash.backbone import Backbone, BlockDrafter, width_of
from ddtree.sampling.noise import PLAIN
from ddtree.stats import Clock
from ddtree.tree import DraftTree, best_first


class DFlash(BlockDrafter):
    """Drafts with a DFlash network (arXiv 2602.06036), as a chain or as DDTree's tree (arXiv 2604.12989).

    Args:
        backbone: the network over the rows' contexts.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Attributes:
        trace: called with each row and its marginals' log-probabilities [L, Vd] before coupling; they are overwritten
            afterwards, so keep a copy.

    Raises:
        ConfigError: beta or kappa is out of range.
    """

    def __init__(
        self, backbone: Backbone, *, coupling: tuple[float, float] = PLAIN, name: str = "dflash"
    ) -> None:
        super().__init__(backbone, name, coupling)
        self.trace: Callable[[DraftRow, Tensor], None] | None = None

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row."""
        bonus = [row.tokens[-1] for row in rows]
        widest = max(map(width_of, rows))
        if widest == 0:
            return DraftTree.root(bonus, self.backbone.device)
        tokens, scores = self.candidates(rows, widest)
        with clock("build"):
            for index, row in enumerate(rows):
                if row.chain:
                    scores[index, :, 1:] = float("-inf")
            budgets, depths = [row.budget for row in rows], [row.depth for row in rows]
            return best_first(bonus, tokens, scores, budgets, depths)

    @torch.inference_mode()
    def candidates(self, rows: list[DraftRow], width: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens int64 [R, L, C <= width] of each depth, best first, and their log-probabilities.

        Those of sampling rows are their chances under the row's noise, as coupled.
        """
        backbone = self.backbone
        states = backbone.states([row.tokens[-1] for row in rows], max(row.depth for row in rows))
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
