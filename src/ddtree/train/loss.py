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

from ddtree.errors import ConfigError
from ddtree.train.batches import IGNORED, Batch, Blocks

LOSSES = ("ce", "kl", "dpace")
_CHUNK_ENTRIES = 2**26  # scores of a chunk on a GPU: 256 MiB


class Vocabulary:
    """The tokens a drafter can propose, and the rows of the target's head that score them.

    Attributes:
        ids: int64 [D], target token of each draft token, or None when the drafter proposes any token.
        size: D.
        weight: [D, H], the head's rows.
        bias: [D], or None.
    """

    def __init__(self, ids: Tensor | None, weight: Tensor, bias: Tensor | None = None) -> None:
        ids = None if ids is None else ids.to(weight.device)
        self.ids = ids
        self.size = len(weight) if ids is None else len(ids)
        self.weight = weight if ids is None else weight[ids].contiguous()
        self.bias = bias if ids is None or bias is None else bias[ids]
        self._index: Tensor | None = None
        if ids is not None:
            self._index = torch.full((len(weight),), IGNORED, device=weight.device)
            self._index[ids] = torch.arange(len(ids), device=weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scores, float32 [n, D], of hidden states [n, H]."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias).float()

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft token of each target token; IGNORED for tokens outside, and for IGNORED itself."""
        if self._index is None:
            return tokens
        return torch.where(tokens == IGNORED, IGNORED, self._index[tokens.clamp(min=0)])


@dataclass(frozen=True)
class Objective:
    """The loss to minimize.

    Attributes:
        loss: "ce", the cross-entropy with the label; "kl", the divergence from the target's distribution over the
            draft vocabulary, whatever token came (up to a constant, its cross-entropy); "dpace", the cross-entropy
            with weights that are the derivative of the expected accepted length (D-PACE, arXiv 2605.18810).
        gamma: decay of the slots' weights; not read by "dpace", which has its own.
        soft: share of the target's distribution in the label of "ce" and "dpace", 0..1.
        alpha: of "dpace": slot k is taken for right with probability (1 - alpha) * p_k + alpha.
    """

    loss: str = "ce"
    gamma: float = 4.0
    soft: float = 0.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} is unknown; use {', '.join(LOSSES)}")
        if not (self.gamma > 0 and 0 <= self.soft <= 1 and 0 <= self.alpha <= 1):
            raise ConfigError("gamma must be positive, and soft and alpha within 0..1")

    @property
    def share(self) -> float:
        """Share of the target's distribution in the label."""
        return 1.0 if self.loss == "kl" else self.soft


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


def labels_of(batch: Batch, blocks: Blocks, vocabulary: Vocabulary) -> Labels:
    """Return the labels of a batch's blocks, N = C * A."""
    index = vocabulary.index(blocks.labels).flatten(0, 1)
    in_text = blocks.in_text.flatten(0, 1)
    slots = torch.arange(index.shape[1], device=index.device)
    prefix_lengths = blocks.prefix_lengths.flatten()[:, None]
    is_prefix = slots < prefix_lengths
    return Labels(
        index=index.clamp(min=0),
        in_vocab=index != IGNORED,
        in_text=in_text & ~is_prefix,
        is_prefix=is_prefix,
        distance=(slots - prefix_lengths).clamp(min=0),
        exists=batch.prefix_lengths.flatten() >= 0,
    )


def teacher_places(batch: Batch, slots: int) -> Tensor:
    """Return the position before each slot's token, int64 [C, A, L], whose output the target predicts it from."""
    offsets = torch.arange(slots, device=batch.anchors.device)
    return (batch.anchors[..., None] + offsets).clamp(max=batch.tokens.shape[1] - 1)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the slots of some blocks, on the device; they add up over chunks, passes and processes.

    Attributes:
        values: float32 [5]: weighted objective, weighted cross-entropy with the tokens that came, weight, drafted
            tokens that a chain would have had accepted, blocks.
    """

    values: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.values + other.values)

    @property
    def weight(self) -> Tensor:
        """The sum of the weights."""
        return self.values[2]


def head_loss(
    normed: Tensor,
    batch: Batch,
    blocks: Blocks,
    hidden: Tensor | None,
    vocabulary: Vocabulary,
    objective: Objective,
    gradient: bool = True,
    chunk: int | None = None,
) -> tuple[Sums, Tensor | None]:
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
        The sums, and the derivative [C, A, L, H] of the weighted objective's sum, in the dtype of `normed`.
    """
    slots, size = normed.shape[2:]
    states = normed.reshape(-1, slots, size)
    made = torch.empty_like(states) if gradient else None
    sums = Sums(torch.zeros(5, device=states.device))
    if not objective.share:
        hidden = None
    for part in chunks(batch, blocks, hidden, vocabulary, slots, chunk):
        # Flat and contiguous: PyTorch's CPU kernels turn a strided slice into a batched product, several times slower.
        flat = states[part.at].reshape(-1, size)
        own, derived = score_loss(vocabulary.logits(flat), part, objective, gradient)
        sums += own
        if made is not None:
            assert derived is not None
            made[part.at] = (derived.to(flat.dtype) @ vocabulary.weight.to(flat.dtype)).view(-1, slots, size)
    return sums, None if made is None else made.view_as(normed)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some of a batch's blocks, whose scores exist at a time.

    Attributes:
        at: which of the C * A blocks.
        labels: of their slots.
        teacher: the target's distributions there; None if not asked for.
    """

    at: slice
    labels: Labels
    teacher: _TeacherScores | None


def chunks(
    batch: Batch,
    blocks: Blocks,
    hidden: Tensor | None,
    vocabulary: Vocabulary,
    slots: int,
    chunk: int | None = None,
) -> Iterator[Chunk]:
    """Iterate over a batch's blocks in chunks, with the target's distributions if `hidden` [C, n, H] is given.

    `chunk` is the number of blocks of a portion: by default those of a conversation on the CPU, and as many as make
    256 MiB of scores elsewhere.
    """
    conversations, anchors = batch.anchors.shape
    device = batch.anchors.device
    labels = labels_of(batch, blocks, vocabulary)
    places = teacher_places(batch, slots)
    if device.type == "cpu" and chunk is None:
        for row in range(conversations):
            at = slice(row * anchors, (row + 1) * anchors)
            shared = None if hidden is None else _shared(hidden[row], places[row], vocabulary)
            yield Chunk(at, labels.part(at), shared)
        return
    step = chunk or max(1, _CHUNK_ENTRIES // (slots * vocabulary.size))
    row_of = torch.arange(conversations, device=device)[:, None, None] * batch.tokens.shape[1]
    flat = (places + row_of).flatten(0, 1)
    for start in range(0, len(flat), step):
        at = slice(start, start + step)
        teacher = None
        if hidden is not None:
            rows = hidden.flatten(0, 1)[flat[at].flatten()]
            teacher = _TeacherScores(vocabulary.logits(rows).softmax(dim=-1), None)
        yield Chunk(at, labels.part(at), teacher)


@dataclass(frozen=True, eq=False)
class _TeacherScores:
    """The target's distributions of some slots: one row for each slot, or rows that slots of several blocks share.

    Attributes:
        rows: float32 [m, D].
        starts: of each block, the row of its first slot, the others following; None when slot i of all has row i.
    """

    rows: Tensor
    starts: list[int] | None

    def of_slots(self, slots: int) -> Tensor:
        """Return one row for each slot, float32 [N * L, D]."""
        if self.starts is None:
            return self.rows
        return torch.cat([self.rows[start : start + slots] for start in self.starts])


def _shared(hidden: Tensor, places: Tensor, vocabulary: Vocabulary) -> _TeacherScores:
    """Compute the distributions of a conversation, each once: blocks overlap, and on a CPU that pays."""
    slots = places.shape[1]
    starts = places[:, 0].tolist()
    first, last = min(starts), max(starts) + slots
    rows = vocabulary.logits(hidden[first:last]).softmax(dim=-1)
    return _TeacherScores(
        functional.pad(rows, (0, 0, 0, last - first - len(rows))), [start - first for start in starts]
    )


def score_loss(
    scores: Tensor, part: Chunk, objective: Objective, gradient: bool = True
) -> tuple[Sums, Tensor | None]:
    """Compute the objective of some blocks, and its derivative [N * L, D] by their slots' scores, float32 [N * L, D].

    The derivative, weight * (softmax - label), is made in one buffer. On CPU the passes over [slots, vocabulary] that
    autograd would make cost as much as the drafter itself.
    """
    labels, teacher = part.labels, part.teacher
    count, slots = labels.index.shape
    index = labels.index.view(-1, 1)
    derived = scores.softmax(dim=-1)
    best = scores.argmax(dim=-1)
    # The largest probability is at least 1 / D, so its logarithm is safe where that of a label's might not be.
    normalizer = (scores.gather(1, best[:, None]) - derived.gather(1, best[:, None]).log())[:, 0]
    hard = normalizer - scores.gather(1, index)[:, 0]
    share, loss = objective.share, hard
    if share:
        assert teacher is not None
        loss = (1 - share) * hard + share * (normalizer - _subtract(derived, scores, teacher, share, slots))
    hard, loss, best = hard.view(count, slots), loss.view(count, slots), best.view(count, slots)
    weights = _weights(objective, labels, hard)
    right = ((best == labels.index) & labels.in_vocab) | labels.is_prefix
    accepted = (right.int().cumprod(dim=1) * labels.in_vocab).sum()
    blocks = labels.exists.sum()
    weight = blocks if objective.loss == "dpace" else weights.sum()
    parts = [(loss * weights).sum(), (hard * weights * labels.in_vocab).sum(), weight, accepted, blocks]
    sums = Sums(torch.stack([part.float() for part in parts]))
    if not gradient:
        return sums, None
    if share < 1:
        derived.scatter_add_(1, index, torch.full_like(index, share - 1, dtype=derived.dtype))
    return sums, derived.mul_(weights.view(-1, 1))


def _subtract(derived: Tensor, scores: Tensor, teacher: _TeacherScores, share: float, slots: int) -> Tensor:
    """Subtract `share` of the target's distributions from `derived`; return the scores' means [n] under them."""
    if teacher.starts is None:
        derived.sub_(teacher.rows, alpha=share)
        return torch.linalg.vecdot(teacher.rows, scores)
    mean = scores.new_empty(len(scores))
    for block, start in enumerate(teacher.starts):
        at = slice(block * slots, (block + 1) * slots)
        rows = teacher.rows[start : start + slots]
        mean[at] = torch.linalg.vecdot(rows, scores[at])
        derived[at].sub_(rows, alpha=share)
    return mean


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
