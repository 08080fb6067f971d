"""Which nodes a node may attend to."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddtree.tree.draft_tree import DraftTree, in_use


@torch.no_grad()
def ancestor_mask(tree: DraftTree) -> Tensor:
    """bool [R, N, N]: [r, i, j] says that node j is node i or an ancestor of it. Padding sees itself only."""
    return _by_steps(tree) if tree.parents.device.type == "cpu" else _by_doubling(tree)


def _by_steps(tree: DraftTree) -> Tensor:
    """On the CPU: every node climbs to its root, all at once, and marks where it passes."""
    rows, nodes = tree.parents.shape
    own = np.arange(rows * nodes)
    first = np.arange(0, rows * nodes, nodes).repeat(nodes)
    parents = tree.parents.numpy().ravel() + first
    if min(tree.sizes) < nodes:
        beyond = own - first >= np.array(tree.sizes).repeat(nodes)
        parents[beyond] = own[beyond]
    # A node's row of the mask begins at own * nodes, and node j of its tree is column j - first.
    begin = own * nodes - first
    mask = np.zeros(rows * nodes * nodes, dtype=bool)
    mask[begin + own] = True
    for _ in range(int(tree.depths.numpy().max())):
        own = parents[own]
        mask[begin + own] = True
    return torch.from_numpy(mask.reshape(rows, nodes, nodes))


def _by_doubling(tree: DraftTree) -> Tensor:
    """On a device: few steps whatever the depths, so that nothing has to be read back."""
    rows, nodes = tree.parents.shape
    own = torch.arange(nodes, device=tree.parents.device).expand(rows, nodes)
    jump = tree.parents if min(tree.sizes) == nodes else torch.where(in_use(tree), tree.parents, own)
    mask = torch.eye(nodes, dtype=torch.bool, device=jump.device).repeat(rows, 1, 1)
    # After k turns a row holds its 2^k nearest ancestors (itself the first), and `jump` is the next one up.
    for _ in range((nodes - 1).bit_length()):
        mask |= mask.gather(1, jump[:, :, None].expand_as(mask))
        jump = jump.gather(1, jump)
    return mask
