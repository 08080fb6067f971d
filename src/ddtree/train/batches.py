"""Batches of conversations with anchors and their draft blocks. A batch is a pure function of (seed, its number).

Conversations are drawn in the order of a permutation per epoch. Those of a few batches together are sorted by length
and cut into batches, in random order, so that a batch's conversations are about equally long and padding is small.
A thread makes batches ahead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.drafters.dflash.network import DFlashNet
from ddtree.train.arguments import TrainConfig
from ddtree.train.data import Corpus

GROUP = 8
"""Blocks of a conversation that attention runs over together, where their number is a multiple of it."""
_POOL = 32  # batches whose conversations are sorted by length together
_AHEAD = 3


@dataclass(frozen=True, eq=False)
class Batch:
    """C conversations, with up to A anchors each, padded.

    Attributes:
        tokens: int64 [C, n], the template's prefix included; cut behind the last block of each conversation.
        lengths: int64 [C], tokens of each.
        anchors: int64 [C, A], ascending; 0 where there are no more.
        prefix_lengths: int64 [C, A], tokens given after each anchor, mostly 0; -1 where there is no block.
        context: positions that any block sees: no anchor lies beyond.
        indices: number of each conversation in the corpus.
        features: bfloat16 [C, n, F + 1, H], where they come from the disk: see `Example`.
    """

    tokens: Tensor
    lengths: Tensor
    anchors: Tensor
    prefix_lengths: Tensor
    context: int
    indices: list[int]
    features: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to a device."""
        if device.type == "cpu":
            return self
        moved = {
            name: (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
            for name in ("tokens", "lengths", "anchors", "prefix_lengths", "features")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


class Batches:
    """The training batches of a corpus, numbered from 0 without end.

    Args:
        corpus: holds the conversations.
        config: how many conversations and anchors to draw, with which prefixes and seed.
        block: block size, anchor included, as in 8.
        cached: True if a batch holds the features stored on disk.
        multiple: lengths are padded to a multiple of it, as in 32, which spares GPU kernels odd shapes.
    """

    def __init__(
        self, corpus: Corpus, config: TrainConfig, block: int, cached: bool, multiple: int = 1
    ) -> None:
        self._corpus = corpus
        self._config = config
        self._block = block
        self._cached = cached
        self._multiple = multiple
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._pool: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, number: int) -> Batch:
        config = self._config
        random = _generator(config.seed, 1, number)
        indices = self._members(number)
        anchors, prefix_lengths = [], []
        for index in indices:
            start, length = self._corpus.span(index)
            places = random_anchors(start, length, config.anchors, random)
            anchors.append(places)
            prefix_lengths.append(random_prefix_lengths(places, length, self._block, config, random))
        return self.collate(indices, anchors, prefix_lengths)

    def ahead(self, numbers: Iterator[int]) -> Generator[Batch, None, None]:
        """Give the batches of some numbers, in order, made while earlier ones are in use."""
        with ThreadPoolExecutor(1) as pool:
            waiting: list[Future[Batch]] = []
            for number in numbers:
                waiting.append(pool.submit(self.__getitem__, number))
                if len(waiting) > _AHEAD:
                    yield waiting.pop(0).result()
            for made in waiting:
                yield made.result()

    def held_out(self, every: int, limit: int) -> Iterator[Batch]:
        """Give batches of held-out conversations, up to `limit` of them, with an anchor at every `every`-th token."""
        corpus, count = self._corpus, self._config.conversations
        indices = sorted(corpus.held_out[:limit], key=lambda index: corpus.span(index)[1])
        for at in range(0, len(indices), count):
            chosen = indices[at : at + count]
            anchors = [np.arange(start, length - 1, every) for start, length in map(corpus.span, chosen)]
            if any(map(len, anchors)):
                yield self.collate(chosen, anchors, [np.zeros_like(places) for places in anchors])

    def collate(
        self, indices: list[int], anchors: list[NDArray[np.int64]], prefix_lengths: list[NDArray[np.int64]]
    ) -> Batch:
        """Make a batch on the CPU of conversations with given anchors and prefix lengths."""
        corpus, multiple = self._corpus, self._multiple
        most = max(1, *map(len, anchors))
        most = _rounded(most, GROUP) if most > GROUP else most
        lengths = [
            min(corpus.span(index)[1], int(places[-1]) + self._block) if len(places) else 1
            for index, places in zip(indices, anchors, strict=True)
        ]
        width = _rounded(max(lengths), multiple)
        tokens = np.zeros((len(indices), width), np.int64)
        places = np.zeros((len(indices), most), np.int64)
        given = np.full((len(indices), most), -1, np.int64)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            tokens[row, :length] = corpus.text(index)[:length]
            places[row, : len(anchors[row])] = anchors[row]
            given[row, : len(prefix_lengths[row])] = prefix_lengths[row]
        features = None
        if self._cached:
            parts = [corpus.features(index, length) for index, length in zip(indices, lengths, strict=True)]
            features = parts[0].new_zeros((len(parts), width, *parts[0].shape[1:]))
            for row, part in enumerate(parts):
                features[row, : len(part)] = part
        return Batch(
            tokens=torch.from_numpy(tokens),
            lengths=torch.tensor(lengths),
            anchors=torch.from_numpy(places),
            prefix_lengths=torch.from_numpy(given),
            context=min(width, _rounded(int(places.max()), multiple)),
            indices=indices,
            features=features,
        )

    def _members(self, number: int) -> list[int]:
        """Return the indices of a batch's conversations."""
        count, seed = self._config.conversations, self._config.seed
        pool, place = divmod(number, _POOL)
        if pool != self._pool[0]:
            first = pool * _POOL * count
            members = [self._at(first + offset) for offset in range(_POOL * count)]
            members.sort(key=lambda index: self._corpus.span(index)[1])
            self._pool = (pool, members)
        at = int(_generator(seed, 2, pool).permutation(_POOL)[place]) * count
        return self._pool[1][at : at + count]

    def _at(self, place: int) -> int:
        """Return the conversation at a place of the endless sequence of epochs."""
        train = self._corpus.train
        epoch, within = divmod(place, len(train))
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = _generator(self._config.seed, 0, epoch).permutation(len(train))
        return train[int(self._orders[epoch][within])]


def random_anchors(start: int, length: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw up to `count` distinct positions, ascending, of an answer from `start` on in a text of `length` tokens.

    The last token has nothing after it to predict, so it is no anchor.
    """
    available = max(0, length - 1 - start)
    return np.sort(random.permutation(available)[:count]) + start


def random_prefix_lengths(
    anchors: NDArray[np.int64], length: int, block: int, config: TrainConfig, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the tokens given after each anchor: 0, or l >= 1 with probability proportional to decay^l (D2SD).

    A slot that predicts a token of the text always stays: l is at most b - 2, and ends two before the text's end.
    """
    prefix_lengths = np.zeros_like(anchors)
    longest = block - 2
    if config.prefix_share and longest > 0:
        chances = config.prefix_decay ** np.arange(1, longest + 1)
        drawn = random.choice(longest, size=len(anchors), p=chances / chances.sum()) + 1
        chosen = random.random(len(anchors)) < config.prefix_share
        prefix_lengths[chosen] = np.minimum(drawn, length - 2 - anchors)[chosen]
    return prefix_lengths


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed * 4 + purpose, number]))


IGNORED = -1
"""Stands for a token where nothing is to be predicted."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A draft blocks of size b in each of C conversations, whose context is their first S positions.

    Attributes:
        tokens: int64 [C, A * b], each block its anchor token, given tokens if any, and mask tokens.
        positions: int64 [C, A * b].
        labels: int64 [C, A, b - 1], the tokens that follow each anchor; IGNORED where nothing is to be predicted:
            given slots, slots beyond the conversation's end, and blocks that are not there.
        in_text: bool [C, A, b - 1], which of those slots lie within the conversation, of blocks that are there.
        exists: bool [C, A], false for the padding of conversations with fewer anchors.
        prefix_lengths: int64 [C, A], given tokens beside the anchor.
        mask: bool [C * A / g, g * b, S + g * b], which keys each query sees, context, then the slots of the g blocks
            that attention runs over together.
        context: S.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    in_text: Tensor
    exists: Tensor
    prefix_lengths: Tensor
    mask: Tensor
    context: int


def pack(batch: Batch, block: int, mask_id: int) -> Blocks:
    """Make the blocks of a batch on its device.

    Args:
        batch: conversations and anchors.
        block: block size b, anchor included.
        mask_id: token id of the masked slots.
    """
    tokens, anchors = batch.tokens, batch.anchors
    exists = batch.prefix_lengths >= 0
    group = anchors.shape[1] if anchors.shape[1] % GROUP else GROUP
    offsets = torch.arange(block, device=tokens.device)
    positions = anchors[..., None] + offsets
    text = tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(positions)
    prefix_lengths = batch.prefix_lengths.clamp(min=0)
    given = offsets <= prefix_lengths[..., None]
    in_text = (positions < batch.lengths[:, None, None]) & exists[..., None]
    return Blocks(
        tokens=torch.where(given, text, mask_id).flatten(1),
        positions=positions.flatten(1),
        labels=torch.where(in_text & ~given, text, IGNORED)[..., 1:],
        in_text=in_text[..., 1:],
        exists=exists,
        prefix_lengths=prefix_lengths,
        mask=packed_mask(anchors.view(-1, group), block, batch.context),
        context=batch.context,
    )


def packed_mask(anchors: Tensor, block: int, context: int) -> Tensor:
    """Return a mask [C, A * b, context + A * b]: a query sees the context before its anchor, and its block."""
    of_query = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    sees_context = torch.arange(context, device=anchors.device) < anchors[:, of_query, None]
    sees_block = (of_query[:, None] == of_query).expand(len(anchors), -1, -1)
    return torch.cat([sees_context, sees_block], dim=2)


def block_states(net: DFlashNet, embedding: Tensor, batch: Batch, features: Tensor) -> tuple[Tensor, Blocks]:
    """Compute states [C, A, b - 1, H], before the final norm, of the slots that predict, and the blocks they belong to.

    The drafter's weights are float32, on the device of the target's embedding; where that is in half precision, the
    drafter computes in bfloat16.

    Args:
        net: the drafter.
        embedding: [V, H], the target's.
        batch: conversations and anchors, on the device.
        features: [C, n, F, H], outputs of the target's feature layers.
    """
    blocks = pack(batch, net.config.block_size, net.config.mask_token_id)
    low = embedding.dtype != torch.float32
    groups, size = blocks.mask.shape[:2]
    x = net.embed(embedding, blocks.tokens.view(groups, size)).to(torch.bfloat16 if low else torch.float32)
    with autocast(embedding):
        context = net.context(features[:, : blocks.context].flatten(2).to(x))
        places = torch.arange(blocks.context, device=x.device).expand(len(context), -1)
        states = net(x, blocks.positions.view(groups, size), context, places, blocks.mask)
    slots = states.view(len(context), -1, net.config.block_size, states.shape[-1])
    return slots[:, :, 1:].contiguous(), blocks


def autocast(embedding: Tensor) -> torch.autocast:
    """Return mixed precision if the target is in half precision, and none if it is in single."""
    low = embedding.dtype != torch.float32
    return torch.autocast(embedding.device.type, torch.bfloat16, enabled=low)
