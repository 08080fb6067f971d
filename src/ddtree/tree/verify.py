"""Follow the target's own choices down the tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.tree.tree import DraftTree, in_use


def walk(tree: DraftTree, choose: Callable[[list[int], list[int]], list[int]]) -> list[list[int]]:
    """From the root, go to the child that carries the target's choice, until none does; all rows at once.

    Args:
        choose: given the rows still walking and the node at which each stands, the token that the target
            chooses after each. A token that no child carries (-1, say) ends a row's walk. The last token chosen
            for a row is its next bonus token.

    Returns:
        For each row the accepted path: node indices, the root first.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    # The target's choice comes to the host in any case, and a path is short: looking up beats comparing all nodes.
    children = [
        # Neither the root nor padding is anyone's child. Of equal siblings the first counts.
        dict(
            zip(
                zip(parents[row][size:0:-1], tokens[row][size:0:-1], strict=True),
                range(size, 0, -1),
                strict=True,
            )
        )
        for row, size in enumerate(size - 1 for size in tree.sizes)
    ]
    paths = [[0] for _ in tree.sizes]
    walking = list(range(len(paths)))
    while walking:
        nodes = [paths[row][-1] for row in walking]
        chosen = choose(walking, nodes)
        going = []
        for row, step in zip(walking, zip(nodes, chosen, strict=True), strict=True):
            child = children[row].get(step)
            if child is not None:
                paths[row].append(child)
                going.append(row)
        walking = going
    return paths


# Nodes of a tree up to which a row of the mask is one whole number, and those up to which whole rows are copied faster
# than single places are marked.
_TINY, _SMALL = 62, 160


@torch.no_grad()
def ancestor_mask(tree: DraftTree) -> Tensor:
    """bool [R, N, N]: [r, i, j] says that node j is node i or an ancestor of it. Padding sees itself only."""
    rows, nodes = tree.parents.shape
    if tree.parents.device.type != "cpu":
        return _on_device(tree)
    if nodes <= _TINY:
        return torch.from_numpy(_by_bits(tree))
    # Nodes are numbered through all rows.
    parents = (tree.parents.numpy() + np.arange(0, rows * nodes, nodes)[:, None]).ravel()
    if min(tree.sizes) < nodes:
        own = np.arange(rows * nodes)
        beyond = own % nodes >= np.array(tree.sizes).repeat(nodes)
        parents[beyond] = own[beyond]
    deepest = int(tree.depths.numpy().max())
    build = _by_doubling if nodes <= _SMALL else _by_climbing
    return torch.from_numpy(build(parents, nodes, deepest).reshape(rows, nodes, nodes))


def _by_bits(tree: DraftTree) -> NDArray[np.bool_]:
    """Node i's ancestors and itself as the bits of a number: its parent's, and bit i."""
    nodes = tree.parents.shape[1]
    numbers = []
    for parents, size in zip(tree.parents.tolist(), tree.sizes, strict=True):
        seen = [1]
        for node in range(1, size):
            seen.append(seen[parents[node]] | 1 << node)
        numbers.append(seen + [1 << node for node in range(size, nodes)])
    return np.array(numbers, np.int64)[:, :, None] >> np.arange(nodes) & 1 == 1


def _by_doubling(parents: NDArray[np.int64], nodes: int, deepest: int) -> NDArray[np.bool_]:
    mask = np.zeros((len(parents), nodes), dtype=bool)
    mask.reshape(-1, nodes * nodes)[:, :: nodes + 1] = True
    # After k turns a row holds its 2^k nearest ancestors, itself the first, and `parents` is the next one up.
    for _ in range(deepest.bit_length()):
        mask |= mask.take(parents, axis=0)
        parents = parents[parents]
    return mask


def _by_climbing(parents: NDArray[np.int64], nodes: int, deepest: int) -> NDArray[np.bool_]:
    own = np.arange(len(parents))
    # A node's row begins at own * nodes; in it, its tree's first node has column 0.
    begin = own * nodes - own // nodes * nodes
    mask = np.zeros(len(own) * nodes, dtype=bool)
    mask[begin + own] = True
    for _ in range(deepest):
        own = parents[own]
        mask[begin + own] = True
    return mask


def _on_device(tree: DraftTree) -> Tensor:
    """By doubling, in as many turns as any tree of this size may need, so that nothing has to be read back."""
    rows, nodes = tree.parents.shape
    own = torch.arange(nodes, device=tree.parents.device).expand(rows, nodes)
    parents = tree.parents if min(tree.sizes) == nodes else torch.where(in_use(tree), tree.parents, own)
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    for _ in range((nodes - 1).bit_length()):
        mask |= mask.gather(1, parents[:, :, None].expand_as(mask))
        parents = parents.gather(1, parents)
    return mask
