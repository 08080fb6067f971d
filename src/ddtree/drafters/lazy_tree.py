"""Best-first trees on the host, whose children are made only where a node was taken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.tree import DraftTree

Children = Iterator[tuple[int, float]]
"""Tokens and probabilities, best first; each is above 0."""


class Nodes:
    """The columns of one row's tree.

    Attributes:
        tokens, parents, depths, logprobs: of each node, as in `DraftTree`.
    """

    def __init__(self, bonus: int) -> None:
        self.tokens, self.parents, self.depths, self.logprobs = [bonus], [0], [0], [0.0]

    def append(self, token: int, parent: int, depth: int, score: float) -> int:
        """Add a node and return its place."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.logprobs.append(score)
        return len(self.tokens) - 1


def grow_on_demand(row: DraftRow, children: Callable[[Nodes, int], Children | None]) -> Nodes:
    """The best nodes of one row, of its budget, depth and floor; ties by depth, then rank, then parent.

    Args:
        row: what is asked for.
        children: gives those of the node at a place, None for none; called once a node, in the order of the nodes.
    """
    nodes = Nodes(row.tokens[-1])
    # Each entry stands for a node's children from some rank on: (cost, depth, rank, node, token, those after it).
    waiting: list[tuple[float, int, int, int, int, Children]] = []
    node = 0
    while node < row.budget:
        depth = nodes.depths[node]
        if depth < row.depth and (own := children(nodes, node)) is not None:
            for token, chance in own:
                cost = -math.log(chance) - nodes.logprobs[node]
                heapq.heappush(waiting, (cost, depth + 1, 0, node, token, own))
                break
        if not waiting or waiting[0][0] > -row.floor:
            break
        cost, depth, rank, parent, token, rest = waiting[0]
        node = nodes.append(token, parent, depth, -cost)
        following = None if row.chain else next(rest, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            cost = max(cost, -math.log(following[1]) - nodes.logprobs[parent])
            heapq.heapreplace(waiting, (cost, depth, rank + 1, parent, following[0], rest))
    return nodes


def stacked(trees: list[Nodes], device: torch.device) -> DraftTree:
    """One batch of the rows' trees."""
    sizes = [len(nodes.tokens) for nodes in trees]
    width = max(sizes)

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        lists = [getattr(nodes, name) for nodes in trees]
        return torch.tensor([own + [fill] * (width - len(own)) for own in lists], dtype=dtype, device=device)

    return DraftTree(
        column("tokens", 0, torch.int64),
        column("parents", 0, torch.int64),
        column("depths", 0, torch.int64),
        column("logprobs", -math.inf, torch.float32),
        sizes,
    )
