"""DFlash's training objective: what the drafter should have said in each slot of a block.

Slot k (k >= 1) predicts the token k places after the anchor, and slots count with weight exp(-(k - 1) / gamma), since
a late slot only matters when all earlier ones were right (arXiv 2602.06036). Beside the token that came, the target's
own distribution at that place can be the label: the marginal that a slot should learn is the mean of both, and the
second has less noise, which is worth most where answers are few.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            self._index = torch.full((len(weight),), IGNORED)
            self._index[ids] = torch.arange(len(ids))

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
    weights = slot_weights(labels.shape[1], gamma) * counted
    logprobs = scores.log_softmax(dim=-1)
    hard = -logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    objective = hard
    if soft:
        with torch.no_grad():
            teacher = vocabulary.logits(hidden).softmax(dim=-1)
            before = blocks.positions.view(len(labels), -1)[:, :-1].clamp(max=len(hidden) - 1)
        objective = (1 - soft) * hard - soft * (teacher[before] * logprobs).sum(dim=-1)
    right = (scores.argmax(dim=-1) == labels) & counted
    return Loss(
        total=(objective * weights).sum(),
        hard=float((hard.detach() * weights).sum()),
        weight=float(weights.sum()),
        accepted=int(right.int().cumprod(dim=1).sum()),
        blocks=len(labels),
    )
