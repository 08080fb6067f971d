"""What an arm that was not played would have made of a round: its drafter's own tree and the answer are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree.tree import DraftTree


@dataclass(frozen=True)
class Outcome:
    """Nodes of one row's tree besides the root, in its order.

    Attributes:
        logprobs: float32 [n].
        depths: int64 [n].
        accepted: bool [n], which the answer would have passed through.
    """

    logprobs: NDArray[np.float32]
    depths: NDArray[np.int64]
    accepted: NDArray[np.bool_]


def outcome(tree: DraftTree, row: int, answer: Sequence[int], chain: bool) -> Outcome:
    """How a row's tree would have done.

    Args:
        tree: a drafter's own.
        row: which row.
        answer: the tokens that follow the root.
        chain: only the path of each node's first child counts.
    """
    size = tree.sizes[row]
    tokens, parents = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
    nodes = spine(parents) if chain else range(1, size)
    places = {(parents[node], tokens[node]): at for at, node in enumerate(nodes)}
    accepted = np.zeros(len(nodes), dtype=np.bool_)
    node = 0
    for token in answer:
        at = places.get((node, token))
        if at is None:
            break
        accepted[at] = True
        node = nodes[at]
    kept = list(nodes)
    return Outcome(tree.logprobs[row].cpu().numpy()[kept], tree.depths[row].cpu().numpy()[kept], accepted)


def spine(parents: Sequence[int]) -> list[int]:
    """The path of first children, without the root."""
    path: list[int] = []
    node = 0
    for place in range(1, len(parents)):
        # A node's first child stands before its others, and after the node.
        if parents[place] == node:
            path.append(place)
            node = place
    return path
