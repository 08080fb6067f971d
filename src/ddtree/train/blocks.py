"""Packing draft blocks: many blocks of many conversations in a single pass of the drafter.

DFlash's training layout (arXiv 2602.06036; SpecForge builds the same): a block anchored at position a is
[anchor token, mask, mask, ...]; all blocks of a conversation stand one behind the other as queries, and the keys
are the conversation's context features followed by all blocks. A block sees the context strictly before its anchor,
as it will when drafting, and itself. Blocks do not see each other, so attention runs over a few of them at a time:
the keys that all queries of a conversation would pass by are mostly other blocks' slots.

A block may begin with more tokens than its anchor (D2SD's variable prefixes, arXiv 2606.04446): these slots are
given, so they predict nothing, and the first masked slot counts as a block's first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.train.batches import GROUP, Batch

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Blocks:
    """A blocks of size b in each of C conversations, whose context is their first S positions.

    Attributes:
        tokens: int64 [C, A * b], each block its anchor token, given tokens if any, and mask tokens.
        positions: int64 [C, A * b].
        labels: int64 [C, A, b - 1], the tokens that follow each anchor; IGNORED where nothing is to be predicted:
            given slots, slots beyond the conversation's end, and blocks that are not there.
        inside: bool [C, A, b - 1], which of those slots lie within the conversation, of blocks that are there.
        known: int64 [C, A], given tokens beside the anchor.
        group: g, blocks that attention runs over together; a divisor of A.
        mask: bool [C * A / g, g * b, S + g * b], which keys each query of a group sees: context, then its slots.
        context: S.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    inside: Tensor
    known: Tensor
    group: int
    mask: Tensor
    context: int


def pack(batch: Batch, block: int, mask_id: int) -> Blocks:
    """The blocks of a batch, made on its device.

    Args:
        batch: conversations and anchors.
        block: block size b, anchor included.
        mask_id: token id of the masked slots.
    """
    tokens, anchors = batch.tokens, batch.anchors
    there = batch.known >= 0
    group = anchors.shape[1] if anchors.shape[1] % GROUP else GROUP
    offsets = torch.arange(block, device=tokens.device)
    positions = anchors[..., None] + offsets
    text = tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(positions)
    given = offsets <= batch.known.clamp(min=0)[..., None]
    inside = (positions < batch.lengths[:, None, None]) & there[..., None]
    return Blocks(
        tokens=torch.where(given, text, mask_id).flatten(1),
        positions=positions.flatten(1),
        labels=torch.where(inside & ~given, text, IGNORED)[..., 1:],
        inside=inside[..., 1:],
        known=batch.known.clamp(min=0),
        group=group,
        mask=packed_mask(anchors.view(-1, group), block, batch.context),
        context=batch.context,
    )


def packed_mask(anchors: Tensor, block: int, context: int) -> Tensor:
    """Bool [C, A * b, context + A * b] of anchors [C, A]: a query sees the context before its anchor and its block."""
    of_query = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    sees_context = torch.arange(context, device=anchors.device) < anchors[:, of_query, None]
    sees_block = (of_query[:, None] == of_query).expand(len(anchors), -1, -1)
    return torch.cat([sees_context, sees_block], dim=2)
