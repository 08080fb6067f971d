"""DFlash's training objective: what the drafter should have said in each slot of a block.

Slot k (k >= 1) predicts the token k places after the anchor, and slots count with weight exp(-(k - 1) / gamma), since
a late slot only matters when all earlier ones were right (arXiv 2602.06036). Beside the token that came, the target's
own distribution at that place can be the label: the marginal that a slot should learn is the mean of both, and the
second has less noise, which is worth most where answers are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddtree.train.blocks import IGNORED, Blocks


class Vocabulary:
    """The tokens a drafter can propose, and the rows of the target's head that score them.

    Attributes:
        ids: int64 [D], target token of each draft token, or None when the drafter proposes any token.
        head: [D, H] weights, [D] bias or None.
    """

    def __init__(self, ids: Tensor | None, weight: Tensor, bias: Tensor | None = None) -> None:
        self.ids = ids
        self.size = len(weight) if ids is None else len(ids)
        self._weight = weight if ids is None else weight[ids].contiguous()
        self._bias = bias if ids is None or bias is None else bias[ids]
        self._index: Tensor | None = None
        if ids is not None:
            self._index = torch.full((len(weight),), IGNORED, device=weight.device)
            self._index[ids] = torch.arange(len(ids), device=weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 scores [n, D] of hidden states [n, H]."""
        bias = None if self._bias is None else self._bias.to(hidden.dtype)
        return functional.linear(hidden, self._weight.to(hidden.dtype), bias).float()

    def index(self, tokens: Tensor) -> Tensor:
        """Draft token of each target token; IGNORED for tokens outside, and for IGNORED itself."""
        if self._index is None:
            return tokens
        return torch.where(tokens == IGNORED, IGNORED, self._index[tokens.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class Loss:
    """Sums over the slots of some blocks; they add up over conversations.

    Attributes:
        total: weighted sum of the objective, with gradient.
        hard: weighted sum of the cross-entropy with the tokens that came.
        weight: sum of the weights.
        accepted: drafted tokens that a chain would have had accepted, over all blocks.
        blocks: number of blocks.
    """

    total: Tensor
    hard: float
    weight: float
    accepted: int
    blocks: int


def slot_weights(slots: int, gamma: float) -> Tensor:
    return torch.exp(-torch.arange(slots) / gamma)


def block_loss(
    scores: Tensor, blocks: Blocks, hidden: Tensor, vocabulary: Vocabulary, gamma: float, soft: float
) -> Loss:
    """The objective of a conversation's blocks.

    Args:
        scores: float32 [A, b - 1, D], the drafter's logits.
        blocks: their labels.
        hidden: [n, H], what enters the target's head at each position; read when `soft` > 0.
        vocabulary: the draft vocabulary; slots whose label is outside it do not count.
        gamma: decay of the slots' weights.
        soft: share of the target's distribution in the label, 0..1.
    """
    labels = vocabulary.index(blocks.labels)
    counted = labels != IGNORED
    weights = slot_weights(labels.shape[1], gamma).to(labels.device) * counted
    anchors = blocks.positions.view(len(labels), -1)[:, 0].tolist()
    teacher, first = None, min(anchors)
    if soft:
        with torch.no_grad():
            seen = hidden[first : max(anchors) + labels.shape[1]].to(labels.device)
            teacher = vocabulary.logits(seen).softmax(dim=-1)
            beyond = max(anchors) + labels.shape[1] - first - len(teacher)
            teacher = functional.pad(teacher, (0, 0, 0, max(0, beyond)))
    places = [anchor - first for anchor in anchors]
    total, hard, best = _CrossEntropy.apply(scores, labels.clamp(min=0), weights, teacher, places, soft)
    right = (best == labels) & counted
    return Loss(
        total=total,
        hard=float((hard * weights).sum()),
        weight=float(weights.sum()),
        accepted=int(right.int().cumprod(dim=1).sum()),
        blocks=len(labels),
    )


class _CrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy with the label (1 - soft) * [token that came] + soft * teacher.

    The gradient, weight * (softmax - label), is made in the forward in one buffer. On CPU the passes over [slots,
    vocabulary] that autograd would make cost as much as the drafter itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        labels: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
        places: list[int],
        soft: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = scores.softmax(dim=-1)
        best = scores.argmax(dim=-1)
        top = best[..., None]
        # The largest probability is at least 1 / D, so its logarithm is safe where that of a label's might not be.
        normalizer = (scores.gather(-1, top) - gradient.gather(-1, top).log())[..., 0]
        hard = normalizer - scores.gather(-1, labels[..., None])[..., 0]
        loss = hard
        if teacher is not None:
            slots = scores.shape[1]
            mean = torch.empty_like(hard)
            for block, place in enumerate(places):
                expected = teacher[place : place + slots]
                mean[block] = torch.linalg.vecdot(expected, scores[block])
                gradient[block].sub_(expected, alpha=soft)
            loss = (1 - soft) * hard + soft * (normalizer - mean)
        gradient.scatter_add_(-1, labels[..., None], torch.full_like(hard, soft - 1)[..., None])
        gradient.mul_(weights[..., None])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hard, best)
        return (loss * weights).sum(), hard, best

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None, None
