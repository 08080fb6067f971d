"""The DFlash drafter: one pass gives the marginals of every depth; a chain or a best-first tree is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.drafters import DraftRow, keep_chains
from ddtree.drafters.dflash.backbone import BlockDrafter
from ddtree.stats import Clock
from ddtree.tree import DraftTree, best_first


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
            keep_chains(scores, rows)
            budgets, depths = [row.budget for row in rows], [row.depth for row in rows]
            return best_first(bonus, tokens, scores, budgets, depths)

    @torch.inference_mode()
    def candidates(self, rows: list[DraftRow], width: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens int64 [R, L, C <= width] of each depth, best first, and their log-probabilities.

        Those of sampling rows are their chances under the row's noise, as coupled.
        """
        states = self.backbone.states([row.tokens[-1] for row in rows], max(row.depth for row in rows))
        return self.likeliest(self.backbone, rows, states, width)
