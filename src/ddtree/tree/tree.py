"""Hold a batch of prefix-closed token trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddtree.errors import ConfigError, is_whole

MAX_BUDGET = 1024
MAX_DEPTH = 16
_HOST = "cpu"
_PADDING = (0, 0, 0, float("-inf"))
"""Token, parent, depth and log-probability of padding."""


@dataclass
class DraftTree:
    """A batch of R draft trees, each padded to N nodes; node 0 is the root, which holds the bonus token.

    A row's nodes are sorted by score, so that its first nodes are its tree of a smaller budget.
    Padding has token 0, parent 0, depth 0 and log-probability -inf.

    Attributes:
        tokens: int64 [R, N].
        parents: int64 [R, N], index of the parent, smaller than the node's own; 0 for the root.
        depths: int64 [R, N], 0 for the root, at most 16.
        logprobs: float32 [R, N], log-probability of the node's prefix under the drafter, at most the parent's;
            0 for the root.
        sizes: nodes in use of each row, root included.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    logprobs: Tensor
    sizes: list[int]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents, depths and log-probabilities."""
        return self.tokens, self.parents, self.depths, self.logprobs

    @staticmethod
    def of(columns: Iterable[Tensor], sizes: list[int]) -> DraftTree:
        """Make trees of `columns` and sizes."""
        tokens, parents, depths, logprobs = columns
        return DraftTree(tokens, parents, depths, logprobs, sizes)

    @staticmethod
    def root(bonus: list[int], device: torch.device | str = "cpu") -> DraftTree:
        """Make trees of the root alone: one row for each bonus token."""
        tokens = torch.tensor(bonus, dtype=torch.int64, device=device).reshape(-1, 1)
        zeros = torch.zeros_like(tokens)
        return DraftTree(tokens, zeros, zeros, zeros.float(), [1] * len(bonus))

    @staticmethod
    def stack(trees: list[DraftTree]) -> DraftTree:
        """Make one batch of the rows of all `trees`, in order.

        Raises:
            ConfigError: there are no trees.
        """
        if not trees:
            raise ConfigError("trees=[] holds no tree to stack: give at least one")
        if len(trees) == 1:
            return trees[0]
        width = max(tree.tokens.shape[1] for tree in trees)
        columns = [
            torch.cat([pad(part, (0, width - part.shape[1]), value=fill) for part in parts])
            for parts, fill in zip(zip(*(tree.columns for tree in trees), strict=True), _PADDING, strict=True)
        ]
        return DraftTree.of(columns, [size for tree in trees for size in tree.sizes])

    def row(self, index: int) -> DraftTree:
        """Return the tree of one row, without its padding."""
        size = self.sizes[index]
        return DraftTree.of((column[index, :size][None] for column in self.columns), [size])

    def truncate(self, budgets: list[int]) -> DraftTree:
        """Keep the first nodes of each row: its tree of a smaller budget (nodes besides the root).

        Raises:
            ConfigError: a budget is outside 0..1024, or there is not one for each row.
        """
        check_each("budgets", budgets, len(self.sizes), 0, MAX_BUDGET)
        sizes = [min(size, budget + 1) for size, budget in zip(self.sizes, budgets, strict=True)]
        width = max(sizes)
        tree = DraftTree.of((column[:, :width] for column in self.columns), sizes)
        return tree if min(sizes) == width else tree.padded()

    def padded(self) -> DraftTree:
        """Make everything beyond the sizes padding."""
        beyond = ~in_use(self)
        filled = zip(self.columns, _PADDING, strict=True)
        return DraftTree.of((column.masked_fill(beyond, fill) for column, fill in filled), self.sizes)


def on_host(device: torch.device) -> bool:
    """Return whether tensors of a device are read without waiting for it, so that work may go from node to node."""
    return device.type == _HOST


def in_use(tree: DraftTree) -> Tensor:
    """Return bool [R, N]: True for nodes that are no padding."""
    device = tree.tokens.device
    sizes = torch.tensor(tree.sizes, device=device)
    return torch.arange(tree.tokens.shape[1], device=device) < sizes[:, None]


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number within low..high."""
    if not is_whole(value) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is outside {low}..{high}: give a whole number in that range")


def check_each(name: str, values: list[int], rows: int, low: int, high: int) -> None:
    """Raise ConfigError unless there is a whole number within low..high for each row."""
    if len(values) != rows:
        raise ConfigError(f"{name} has {len(values)} entries for {rows} rows: give one for each row")
    for value in values:
        check_range(name, value, low, high)
