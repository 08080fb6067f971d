"""The best tree of factorized marginals: DDTree's Algorithm 1 (arXiv 2604.12989), without its heap."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.costs import ABSENT, UNIT, array_costs_of, cheapest, costs_of
from ddtree.tree.deviations import Prefixes, best_prefixes
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each
from ddtree.tree.grow import assemble
from ddtree.tree.heap import pop_order

# On the CPU a plain heap is quicker up to this many nodes in all, a row counting as some nodes.
_SMALL = 176
_ROW = 16


def best_first(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    """The likeliest prefixes when each depth has its own distribution, whatever was chosen before.

    Nodes come in the pop order of a best-first heap: by score, ties by depth, then rank, then the parent's
    place. Scores are summed and compared exactly; see `costs`.

    Args:
        bonus: the root's token of each row.
        tokens: int64 [R, L, K], candidates of depth 1..L, best first. The best B nodes need min(B, V) of them.
        logprobs: float [R, L, K], their log-probabilities, descending; -inf where there is no candidate.
        budgets: most nodes besides the root, 0..1024, for each row.
        depths: deepest level, 0..16, for each row; L when larger.

    Raises:
        ConfigError: a value is outside its range, or the shapes do not fit together.
    """
    rows = len(bonus)
    if rows == 0 or tokens.shape != logprobs.shape or tokens.dim() != 3 or tokens.shape[0] != rows:
        raise ConfigError(
            f"bonus has {rows} entries, tokens is {list(tokens.shape)} and logprobs {list(logprobs.shape)}: "
            "give one entry for each row, and [rows, depth, candidates] twice"
        )
    check_each("budgets", budgets, rows, 0, MAX_BUDGET)
    check_each("depths", depths, rows, 0, MAX_DEPTH)
    width, depth = max(budgets), min(max(depths), tokens.shape[1])
    if width == 0 or depth == 0 or tokens.shape[2] == 0:
        return DraftTree.root(bonus, tokens.device)
    tokens, logprobs = tokens[:, :depth, :width], logprobs[:, :depth, :width]
    build = _on_cpu if tokens.device.type == "cpu" else _level_by_level
    return build(bonus, tokens, logprobs, budgets, depths)


def _on_cpu(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    values = logprobs.detach().float().numpy()
    nodes = None
    if sum(budgets) + _ROW * len(budgets) > _SMALL:
        nodes = best_prefixes(values, budgets, depths)
    if nodes is None:
        nodes = _by_heap(values, budgets, depths)
    row, level, rank, cost, parent = nodes
    rows = len(bonus)
    counts = np.bincount(row, minlength=rows)
    place = np.arange(1, len(row) + 1) - (counts.cumsum() - counts)[row]
    places = np.zeros(len(row) + 1, np.int64)
    places[:-1] = place
    length = int(counts.max()) + 1
    at = row * length + place
    columns = np.zeros((3, rows * length), np.int64)
    columns[0, ::length] = bonus
    columns[0, at] = tokens.numpy()[row, level, rank]
    columns[1, at] = places[parent]
    columns[2, at] = level + 1
    scores = np.full(rows * length, -np.inf, np.float32)
    scores[::length] = 0
    scores[at] = cost * -UNIT
    tree_tokens, parents, tree_depths = torch.from_numpy(columns.reshape(3, rows, length)).unbind()
    tree_scores = torch.from_numpy(scores.reshape(rows, length))
    return DraftTree(tree_tokens, parents, tree_depths, tree_scores, (counts + 1).tolist())


def _by_heap(values: NDArray[np.float32], budgets: list[int], depths: list[int]) -> Prefixes:
    """As `best_prefixes`, row by row."""
    rows: list[int] = []
    columns: tuple[list[int], ...] = ([], [], [], [])
    for row, (budget, depth) in enumerate(zip(budgets, depths, strict=True)):
        if budget == 0 or depth == 0:
            continue
        nodes = pop_order(array_costs_of(values[row, :depth, :budget]).tolist(), budget)
        parents = nodes[-1]
        if rows:
            # Places count on from the rows before; the root stays -1.
            parents = [parent + len(rows) if parent >= 0 else -1 for parent in parents]
        rows += [row] * len(parents)
        for column, part in zip(columns, (*nodes[:-1], parents), strict=True):
            column += part
    return Prefixes(np.array(rows, np.int64), *(np.array(column, np.int64) for column in columns))


@torch.no_grad()
def _level_by_level(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    """The best of each level, on the device, with no host round trip until the end.

    Child j of the i-th best prefix of a level is beaten by the children up to j of the prefixes up to i, so of
    B nodes only pairs with (i + 1)(j + 1) <= B count.
    """
    device, width = tokens.device, max(budgets)
    beyond = torch.arange(tokens.shape[1], device=device) >= torch.tensor(depths, device=device)[:, None]
    steps = costs_of(logprobs).masked_fill(beyond[:, :, None], ABSENT)
    root = DraftTree.root(bonus, device)
    levels = [(root.tokens, root.parents, root.parents)]
    first, costs = 0, root.parents
    for level in range(tokens.shape[1]):
        ranks, slots = _pairs(tokens.shape[2], costs.shape[1], width, device)
        grown = costs[:, slots] + steps[:, level, ranks]
        picked = cheapest(grown, min(width, grown.shape[1]))
        costs = grown.gather(1, picked)
        levels.append((tokens[:, level].gather(1, ranks[picked]), slots[picked] + first, costs))
        first += levels[-2][0].shape[1]
    return assemble(levels).truncate(budgets)


def _pairs(ranks: int, prefixes: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n], [n]: the pairs (rank j, prefix i) with (i + 1)(j + 1) <= width, rank by rank."""
    counts = [min(prefixes, width // (rank + 1)) for rank in range(min(ranks, width))]
    rank = [j for j, count in enumerate(counts) for _ in range(count)]
    prefix = [i for count in counts for i in range(count)]
    return torch.tensor(rank, device=device), torch.tensor(prefix, device=device)
