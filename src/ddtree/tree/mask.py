"""Which nodes a node may attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.draft_tree import DraftTree, in_use


@torch.no_grad()
def ancestor_mask(tree: DraftTree) -> Tensor:
    """bool [R, N, N]: [r, i, j] says that node j is node i or an ancestor of it. Padding sees itself only."""
    rows, nodes = tree.parents.shape
    own = torch.arange(nodes, device=tree.parents.device).expand(rows, nodes)
    parents = tree.parents if min(tree.sizes) == nodes else torch.where(in_use(tree), tree.parents, own)
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    # After k turns a row holds its 2^k nearest ancestors (itself the first), and `jump` the next one up.
    jump = parents
    for _ in range((nodes - 1).bit_length()):
        mask |= mask.gather(1, jump[:, :, None].expand_as(mask))
        jump = jump.gather(1, jump)
    return mask
