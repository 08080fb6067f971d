"""Draft trees as they travel through the engine: its scheduler knows flat lists of tokens, the worker their shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.tree import DraftTree


@dataclass(frozen=True)
class Nodes:
    """One request's tree, the root first, parents before their children.

    Attributes:
        tokens: of each node; the root's is the last that was chosen.
        parents: index of each node's parent; 0 for the root.
        depths: of each node; 0 for the root.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @staticmethod
    def of(tree: DraftTree, row: int) -> Nodes:
        """One row of a batch of trees, without padding."""
        size = tree.sizes[row]
        return Nodes(*(part[row, :size].tolist() for part in (tree.tokens, tree.parents, tree.depths)))

    @staticmethod
    def chain(tokens: Sequence[int]) -> Nodes:
        """A single path."""
        places = range(len(tokens))
        return Nodes(list(tokens), [max(0, place - 1) for place in places], list(places))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether it is a single path, which causal attention and linear positions serve."""
        return self.depths == list(range(len(self)))

    def as_scheduled(self, root: int, drafted: Sequence[int]) -> Nodes:
        """The tree of what the scheduler sent: this one, cut as the list is, or else a chain of what is new to it."""
        if self.tokens[0] == root and self.tokens[1 : len(drafted) + 1] == list(drafted):
            count = len(drafted) + 1
            return Nodes(self.tokens[:count], self.parents[:count], self.depths[:count])
        return Nodes.chain([root, *drafted])

    def visible(self) -> list[list[bool]]:
        """Which nodes each node sees: itself and its ancestors."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = [False] * len(self) if node == 0 else list(rows[parent])
            row[node] = True
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Row:
    """A request's part in a step.

    Attributes:
        index: in the batch.
        start: of its nodes, the root first, among the step's tokens.
        logits: of its nodes' logits among those of the step.
        base: absolute position of the root; so many tokens stand before it.
        nodes: its tree; the root alone where nothing was drafted.
    """

    index: int
    start: int
    logits: int
    base: int
    nodes: Nodes

    @property
    def branched(self) -> bool:
        """Whether it needs an attention of its own."""
        return not self.nodes.is_chain
