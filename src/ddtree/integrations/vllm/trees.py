"""Draft trees as they travel through vLLM: its scheduler sends flat lists of tokens, the worker keeps their shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.tree import DraftTree


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return one row with a single path of tokens, e.g. [5, 6, 7]; the root's token comes first."""
    depths = torch.arange(len(tokens))[None]
    return DraftTree(
        torch.tensor([list(tokens)]), (depths - 1).clamp(min=0), depths, -depths.float(), [len(tokens)]
    )


def as_scheduled(tree: DraftTree | None, root: int, drafted: Sequence[int]) -> DraftTree:
    """Return the tree of the tokens that the scheduler sent for a request.

    Args:
        tree: one row, as it was drafted for the request; None where nothing was.
        root: the request's last token.
        drafted: what the scheduler sent. It may cut the list of a tree, which leaves a smaller tree, since parents come
            before their children.

    Returns:
        The drafted tree, cut as the list is; a chain where the list is not the drafted one.
    """
    tokens = [root, *drafted]
    if tree is not None and tree.tokens[0, : len(tokens)].tolist() == tokens:
        return tree.truncate([len(drafted)])
    return chain(tokens)


@dataclass(frozen=True)
class StepRow:
    """A request's part in a step.

    Attributes:
        index: place of the request in the batch.
        start: place of the root among the step's tokens; the other nodes follow it.
        logits: place of the root's logits among those of the step; the other nodes' follow.
        base: absolute position of the root, so the number of tokens before it.
        tree: one row; the root alone where nothing was drafted.
    """

    index: int
    start: int
    logits: int
    base: int
    tree: DraftTree

    @property
    def size(self) -> int:
        """Return the number of nodes, root included."""
        return self.tree.sizes[0]

    @property
    def branched(self) -> bool:
        """Return whether the tree is no single path: causal attention and linear positions serve a path."""
        return int(self.tree.depths.max()) + 1 < self.size
