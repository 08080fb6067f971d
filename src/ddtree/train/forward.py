"""The drafter over a batch of packed blocks, as it is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.drafters.dflash_net import DFlashNet
from ddtree.train.batches import Batch
from ddtree.train.blocks import Blocks, pack


def block_states(net: DFlashNet, embedding: Tensor, batch: Batch, features: Tensor) -> tuple[Tensor, Blocks]:
    """States [C, A, b - 1, H], before the final norm, of the slots that predict, and the blocks they belong to.

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
    """Mixed precision where the target is in half precision, and none where it is in single."""
    low = embedding.dtype != torch.float32
    return torch.autocast(embedding.device.type, torch.bfloat16, enabled=low)
