"""DFlash's training objective: a weighted cross-entropy over the slots of a block, and its derivative.

Slot k (k >= 1) predicts the token k places after the anchor, and slots count with weight exp(-(k - 1) / gamma), since
a late slot only matters when all earlier ones were right (arXiv 2602.06036). Beside the token that came, the target's
own distribution at that place can be the label: the marginal that a slot should learn is the mean of both, and the
second has less noise, which is worth most where answers are few.

The head is frozen and a product with its matrix, so its part of the backward pass is written out: scores exist for a
chunk of the blocks at a time, and become the gradient of the head's input there and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ddtree.train.arguments import Objective
from ddtree.train.batches import IGNORED, Batch, Blocks

_CHUNK_ENTRIES = 2**26  # scores of a chunk on a GPU: 256 MiB

SUMS = 5
OBJECTIVE, CROSS_ENTROPY, WEIGHT, ACCEPTED, BLOCKS = range(SUMS)
"""Places in a tensor float32 [SUMS] of sums over the slots of some blocks, which add up over chunks and processes.

They are the weighted objective, the weighted cross-entropy with the tokens that came, the weight, the drafted tokens
that a chain would have had accepted, and the blocks."""


class Vocabulary:
    """The tokens a drafter can propose, and the rows of the target's head that score them.

    Attributes:
        ids: int64 [D], target token of each draft token, or None when the drafter proposes any token.
        size: D.
        weight: [D, H], the head's rows.
    """

    def __init__(self, ids: Tensor | None, weight: Tensor) -> None:
        ids = None if ids is None else ids.to(weight.device)
        self.ids = ids
        self.size = len(weight) if ids is None else len(ids)
        self.weight = weight if ids is None else weight[ids].contiguous()
        self._index: Tensor | None = None
        if ids is not None:
            self._index = torch.full((len(weight),), IGNORED, device=weight.device)
            self._index[ids] = torch.arange(len(ids), device=weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scores, float32 [..., D], of hidden states [..., H]."""
        # Flat: PyTorch's CPU kernels turn a strided slice into a batched product, several times slower.
        flat = hidden.reshape(-1, hidden.shape[-1])
        return functional.linear(flat, self.weight.to(flat.dtype)).float().view(*hidden.shape[:-1], self.size)

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft token of each target token; IGNORED for tokens outside, and for IGNORED itself."""
        if self._index is None:
            return tokens
        return torch.where(tokens == IGNORED, IGNORED, self._index[tokens.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of N blocks of L slots, on the device.

    Attributes:
        index: int64 [N, L], draft token that came, 0 where `in_vocab` is false.
        in_vocab: bool [N, L], the token that came is to be predicted and in the draft vocabulary.
        in_text: bool [N, L], a token came, and the slot is to predict it.
        is_prefix: bool [N, L], the slot is not to predict the token, since the block begins with it.
        distance: int64 [N, L], predicted slots of the block before it.
        exists: bool [N], the block exists.
    """

    index: Tensor
    in_vocab: Tensor
    in_text: Tensor
    is_prefix: Tensor
    distance: Tensor
    exists: Tensor

    def part(self, at: slice) -> Labels:
        """Return the labels of some blocks."""
        return Labels(*(getattr(self, name)[at] for name in self.__dataclass_fields__))


def labels_of(blocks: Blocks, vocabulary: Vocabulary) -> Labels:
    """Return the labels of a batch's blocks, N = C * A."""
    index = vocabulary.index(blocks.labels).flatten(0, 1)
    slots = torch.arange(index.shape[1], device=index.device)
    prefix_lengths = blocks.prefix_lengths.flatten()[:, None]
    is_prefix = slots < prefix_lengths
    return Labels(
        index=index.clamp(min=0),
        in_vocab=index != IGNORED,
        in_text=blocks.in_text.flatten(0, 1) & ~is_prefix,
        is_prefix=is_prefix,
        distance=(slots - prefix_lengths).clamp(min=0),
        exists=blocks.exists.flatten(),
    )


def teacher_places(batch: Batch, slots: int) -> Tensor:
    """Return the position before each slot's token, int64 [C, A, L], whose output the target predicts it from."""
    offsets = torch.arange(slots, device=batch.anchors.device)
    return (batch.anchors[..., None] + offsets).clamp(max=batch.tokens.shape[1] - 1)


def head_loss(
    normed: Tensor,
    batch: Batch,
    blocks: Blocks,
    hidden: Tensor | None,
    vocabulary: Vocabulary,
    objective: Objective,
    gradient: bool = True,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the objective of a batch's blocks, and its derivative by what enters the head.

    Args:
        normed: [C, A, L, H], the drafter's output that enters the head, without gradient.
        batch: the conversations.
        blocks: their blocks.
        hidden: [C, n, H], what enters the target's head at each position; read when `objective.share` > 0.
        vocabulary: the draft vocabulary; slots whose token is outside it count for "kl" only.
        objective: the loss to minimize.
        gradient: False leaves the derivative out.
        chunk: as in `chunks`.

    Returns:
        The sums (see `OBJECTIVE`), and the derivative [C, A, L, H] of the weighted objective's sum, in the dtype of
        `normed`.
    """
    states = normed.flatten(0, 1)
    made = torch.empty_like(states) if gradient else None
    sums = torch.zeros(SUMS, device=states.device)
    for part in chunks(batch, blocks, hidden if objective.share else None, vocabulary, chunk):
        own, derived = score_loss(vocabulary.logits(states[part.at]), part, objective, gradient)
        sums += own
        if made is not None and derived is not None:
            weight = vocabulary.weight.to(states.dtype)
            made[part.at] = (derived.to(states.dtype).flatten(0, 1) @ weight).view_as(made[part.at])
    return sums, None if made is None else made.view_as(normed)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some of a batch's blocks, whose scores exist at a time.

    Attributes:
        at: which of the C * A blocks, N of them.
        labels: of their slots.
        teacher: the target's distributions there, float32 [N, L, D]; None if not asked for.
    """

    at: slice
    labels: Labels
    teacher: Tensor | None


def chunks(
    batch: Batch, blocks: Blocks, hidden: Tensor | None, vocabulary: Vocabulary, chunk: int | None = None
) -> Iterator[Chunk]:
    """Iterate over a batch's blocks in chunks, with the target's distributions if `hidden` [C, n, H] is given.

    `chunk` is the number of blocks of a portion: by default those of a conversation on the CPU, and as many as make
    256 MiB of scores elsewhere.
    """
    labels = labels_of(blocks, vocabulary)
    places = teacher_places(batch, labels.index.shape[1])
    on_cpu = places.device.type == "cpu"
    if chunk is None:
        most = max(1, _CHUNK_ENTRIES // (places.shape[2] * vocabulary.size))
        chunk = places.shape[1] if on_cpu else most
    row_starts = torch.arange(len(places), device=places.device) * batch.tokens.shape[1]
    flat = (places + row_starts[:, None, None]).flatten(0, 1)
    for start in range(0, len(flat), chunk):
        at = slice(start, start + chunk)
        teacher = None
        if hidden is not None:
            rows = flat[at]
            inverse = None
            if on_cpu:
                # Blocks overlap, and their shared distributions are worth computing once; a GPU would wait for it.
                rows, inverse = rows.unique(return_inverse=True)
            teacher = vocabulary.logits(hidden.flatten(0, 1)[rows]).softmax(dim=-1)
            if inverse is not None:
                teacher = teacher[inverse]
        yield Chunk(at, labels.part(at), teacher)


def score_loss(
    scores: Tensor, part: Chunk, objective: Objective, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute the objective of some blocks, and its derivative by their slots' scores, both float32 [N, L, D].

    The derivative, weight * (softmax - label), is made in one buffer. On CPU the passes over [slots, vocabulary] that
    autograd would make cost as much as the drafter itself.

    Returns:
        The sums (see `OBJECTIVE`), and the derivative.
    """
    labels = part.labels
    index = labels.index[..., None]
    derived = scores.softmax(dim=-1)
    best = scores.argmax(dim=-1)
    # The largest probability is at least 1 / D, so its logarithm is safe where that of a label's might not be.
    at_best = best[..., None]
    normalizer = (scores.gather(-1, at_best) - derived.gather(-1, at_best).log())[..., 0]
    hard = normalizer - scores.gather(-1, index)[..., 0]
    share, loss = objective.share, hard
    if share:
        assert part.teacher is not None
        soft = normalizer - torch.linalg.vecdot(part.teacher, scores)
        loss = (1 - share) * hard + share * soft
    weights = _weights(objective, labels, hard)
    right = ((best == labels.index) & labels.in_vocab) | labels.is_prefix
    accepted = (right.int().cumprod(dim=1) * labels.in_vocab).sum()
    blocks = labels.exists.sum()
    weight = blocks if objective.loss == "dpace" else weights.sum()
    parts = [(loss * weights).sum(), (hard * weights * labels.in_vocab).sum(), weight, accepted, blocks]
    sums = torch.stack([part.float() for part in parts])
    if not gradient:
        return sums, None
    if share and part.teacher is not None:
        derived.sub_(part.teacher, alpha=share)
    if share < 1:
        derived.scatter_add_(-1, index, torch.full_like(index, share - 1, dtype=derived.dtype))
    return sums, derived.mul_(weights[..., None])


def _weights(objective: Objective, labels: Labels, hard: Tensor) -> Tensor:
    """Return the weights of the slots, float32 [N, L]."""
    if objective.loss == "dpace":
        return dpace_weights(hard, labels, objective.alpha)
    counted = labels.in_text if objective.loss == "kl" else labels.in_vocab
    return torch.exp(labels.distance / -objective.gamma) * counted


def dpace_weights(hard: Tensor, labels: Labels, alpha: float) -> Tensor:
    """Return D-PACE's weights [N, L] of slots with cross-entropies `hard`: sum over j >= k of the chance to get to j.

    A token outside the draft vocabulary has probability 0; given slots are right; beyond the text nothing counts.
    """
    probability = torch.exp(-hard) * labels.in_vocab
    right = (1 - alpha) * probability + alpha
    right = torch.where(labels.is_prefix, 1.0, torch.where(labels.in_text, right, 0.0))
    reached = right.cumprod(dim=1) * labels.in_text
    return reached.flip(1).cumsum(dim=1).flip(1) * labels.in_vocab
