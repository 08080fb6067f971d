"""The DFlash drafter: one pass gives the marginals of every depth; a chain or a best-first tree is made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.cache import KVCache
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash_net import DFlashConfig, DFlashNet
from ddtree.noise import couple
from ddtree.stats import Clock
from ddtree.target import Target
from ddtree.tree import MAX_DEPTH, DraftTree, best_first

__all__ = ["DFlash", "DFlashConfig", "DFlashNet"]


class DFlash:
    """Drafts with a DFlash network (arXiv 2602.06036), as a chain or as DDTree's tree (arXiv 2604.12989).

    The context cache holds committed tokens only: keys and values of the target's features, never of drafts.

    Args:
        network: the draft network, on the target's device and in its dtype.
        target: gives embedding and head.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary; None for the whole.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.
    """

    def __init__(
        self,
        network: DFlashNet,
        target: Target,
        *,
        draft_ids: Tensor | None = None,
        coupling: tuple[float, float] = (0.0, 1.0),
        name: str = "dflash",
    ) -> None:
        config = network.config
        self.name = name
        self.network = network.to(target.device, target.dtype).eval()
        self.feature_layers = tuple(config.target_layer_ids)
        self.max_depth = min(config.block_size - 1, MAX_DEPTH)
        self.coupling = coupling
        self.draft_ids = draft_ids
        self.trace: Callable[[DraftRow, Tensor], None] | None = None
        """Called with each row and its logits [L, Vd], to fit the coupling on."""
        self._embed = target.embed
        weight = target.head.weight
        self._head = weight if draft_ids is None else weight[draft_ids]
        self._device = target.device
        self._max_tokens = target.max_context + config.block_size
        self._cache = KVCache(self._max_tokens)

    def add_row(self) -> None:
        self._cache.add_row()

    def drop_row(self, row: int) -> None:
        self._cache.drop_row(row)

    @torch.inference_mode()
    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        assert features is not None, "DFlash drafts from target features"
        self.network.remember(self._cache, row, features)

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        logits = self._logits(rows)
        with clock("build"):
            if self.trace is not None:
                for row, own in zip(rows, logits, strict=True):
                    self.trace(row, own)
            logprobs = self._logprobs(rows, logits)
            chain = [row.chain for row in rows]
            widest = 1 if all(chain) else max((row.budget for row in rows if not row.chain), default=1)
            best = logprobs.topk(max(1, min(widest, logprobs.shape[-1])), dim=-1)
            scores, tokens = best.values, best.indices
            if self.draft_ids is not None:
                tokens = self.draft_ids[tokens]
            if any(chain) and not all(chain):
                scores[torch.tensor(chain, device=self._device), :, 1:] = float("-inf")
            budgets = [row.budget for row in rows]
            return best_first([row.tokens[-1] for row in rows], tokens, scores, budgets, [row.depth for row in rows])

    def _logits(self, rows: list[DraftRow]) -> Tensor:
        """Marginal logits float32 [R, L, Vd] of depths 1..L."""
        config = self.network.config
        block = torch.full((len(rows), config.block_size), config.mask_token_id, device=self._device)
        # The bonus token anchors the block: its slot is no mask, and its own output is not used.
        block[:, 0] = torch.tensor([row.tokens[-1] for row in rows], device=self._device)
        hidden = self.network.draft(self._cache, self._embed(block))
        return (hidden[:, 1 : self.max_depth + 1] @ self._head.T).float()

    def _logprobs(self, rows: list[DraftRow], logits: Tensor) -> Tensor:
        """Scores of the candidates: log-probabilities, coupled to the noise of rows that have it."""
        beta, kappa = self.coupling
        logprobs = logits.log_softmax(-1)
        if (beta, kappa) == (0.0, 1.0):
            return logprobs
        for index, row in enumerate(rows):
            if row.noise is not None:
                first = len(row.tokens)
                noise = [row.noise.gumbel(first + d, self.draft_ids) for d in range(logits.shape[1])]
                own = (logits[index] / row.temperature).log_softmax(-1)
                logprobs[index] = couple(own, torch.stack(noise), beta, kappa)
        return logprobs
