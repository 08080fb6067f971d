"""Packing draft blocks: many blocks of one conversation in a single pass of the drafter.

DFlash's training layout (arXiv 2602.06036; SpecForge builds the same): a block anchored at position a is
[anchor token, mask, mask, ...]; all blocks of a conversation stand one behind the other as queries, and the keys
are the conversation's context features followed by all blocks. A block sees the context strictly before its anchor,
as it will when drafting, and itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Blocks:
    """A blocks of size b in one conversation, whose context is its first S positions.

    Attributes:
        tokens: int64 [A * b], each block an anchor token and b - 1 mask tokens.
        positions: int64 [A * b].
        labels: int64 [A, b - 1], the tokens that follow each anchor; IGNORED beyond the conversation's end.
        mask: bool [A * b, S + A * b], which keys each query sees.
        context: S.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    mask: Tensor
    context: int

    def to(self, device: torch.device) -> Blocks:
        tensors = ("tokens", "positions", "labels", "mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def pack(tokens: Tensor, anchors: Tensor, block: int, mask_id: int) -> Blocks:
    """Blocks of a conversation.

    Args:
        tokens: int64 [n], the conversation from position 0 on.
        anchors: int64 [A], positions of the anchors, each below n.
        block: block size b, anchor included.
        mask_id: token id of the masked slots.
    """
    count = len(anchors)
    offsets = torch.arange(block)
    positions = anchors[:, None] + offsets
    filled = torch.full((count, block), mask_id)
    filled[:, 0] = tokens[anchors]
    following = positions[:, 1:]
    labels = tokens[following.clamp(max=len(tokens) - 1)].masked_fill(following >= len(tokens), IGNORED)
    context = int(anchors.max())
    return Blocks(
        filled.flatten(), positions.flatten(), labels, packed_mask(anchors, block, context), context
    )


def packed_mask(anchors: Tensor, block: int, context: int) -> Tensor:
    """Bool [A * b, context + A * b]: query i sees context position j < its block's anchor, and all of its own block."""
    of_query = torch.arange(len(anchors)).repeat_interleave(block)
    sees_context = torch.arange(context)[None] < anchors[of_query][:, None]
    return torch.cat([sees_context, of_query[:, None] == of_query[None]], dim=1)


def random_anchors(start: int, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct positions of an answer that begins at `start` in a text of `length` tokens, ascending.

    The last token has nothing after it to predict, so it is no anchor.
    """
    available = max(0, length - 1 - start)
    return torch.randperm(available, generator=generator)[:count].sort().values + start
