"""Best-first trees on the host, whose children are made only where a node was taken.

A network scores all children of a level in one batch, and `ddtree.tree.grow` is made for that. N-grams are looked up
one context at a time: here a node's children are asked for when the node enters the tree, and one by one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.tree import DraftTree

Children = Iterator[tuple[int, float]]
"""Tokens and probabilities, best first; each is above 0."""


class PathModel(Protocol):
    """Gives the children of any path of tokens below the root. Each path has a state, which only the model reads."""

    def start(self) -> Any:
        """Return the state of the root."""

    def step(self, state: Any, token: int) -> Any:
        """Return the state of a path with one more token; the given state stays as it is."""

    def children(self, state: Any) -> Children:
        """Return the children of the path with this state."""


class LazyTree:
    """The tree of one row as Python lists, one entry a node: quicker than tensors while it grows.

    Attributes:
        tokens, parents, depths, logprobs: as in `DraftTree`; the root is node 0.
    """

    def __init__(self, bonus: int) -> None:
        self.tokens, self.parents, self.depths, self.logprobs = [bonus], [0], [0], [0.0]

    def append(self, token: int, parent: int, depth: int, logprob: float) -> None:
        """Add a node at the end."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.logprobs.append(logprob)


def grow_lazily(row: DraftRow, model: PathModel) -> LazyTree:
    """Return the best nodes of one row within its budget and depth; ties by depth, then rank, then parent."""
    tree = LazyTree(row.tokens[-1])
    states: dict[int, Any] = {}
    # An entry is the best child of a node that is not in the tree yet, and its later siblings:
    # (cost, depth, rank among siblings, parent, token, siblings).
    waiting: list[tuple[float, int, int, int, int, Children]] = []
    node = 0
    while node < row.budget:
        depth = tree.depths[node]
        if depth < row.depth:
            before = states.get(tree.parents[node])
            states[node] = model.step(before, tree.tokens[node]) if node else model.start()
            children = model.children(states[node])
            first = next(children, None)
            if first is not None:
                cost = -math.log(first[1]) - tree.logprobs[node]
                heapq.heappush(waiting, (cost, depth + 1, 0, node, first[0], children))
        if not waiting:
            break
        cost, depth, rank, parent, token, siblings = waiting[0]
        tree.append(token, parent, depth, -cost)
        node += 1
        following = None if row.chain else next(siblings, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            # Siblings descend, but for rounding.
            cost = max(cost, -math.log(following[1]) - tree.logprobs[parent])
            heapq.heapreplace(waiting, (cost, depth, rank + 1, parent, following[0], siblings))
    return tree


def batched(trees: list[LazyTree], device: torch.device) -> DraftTree:
    """Return the rows' trees as one batch of tensors on a device."""
    sizes = [len(tree.tokens) for tree in trees]
    width = max(sizes)

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        lists = [getattr(tree, name) for tree in trees]
        return torch.tensor([own + [fill] * (width - len(own)) for own in lists], dtype=dtype, device=device)

    return DraftTree(
        column("tokens", 0, torch.int64),
        column("parents", 0, torch.int64),
        column("depths", 0, torch.int64),
        column("logprobs", -math.inf, torch.float32),
        sizes,
    )
