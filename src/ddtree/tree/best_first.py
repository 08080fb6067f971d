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
    depth = min(max(depths), tokens.shape[1])
    if max(budgets) == 0 or depth == 0 or tokens.shape[2] == 0:
        return DraftTree.root(bonus, tokens.device)
    build = _on_cpu if tokens.device.type == "cpu" else _level_by_level
    return build(bonus, tokens, logprobs, budgets, [min(limit, depth) for limit in depths])


def _on_cpu(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    values = logprobs.detach().float().numpy()[:, : max(depths), : max(budgets)]
    if sum(budgets) + _ROW * len(budgets) > _SMALL:
        nodes = best_prefixes(values, budgets, depths)
        if nodes is not None:
            return _assembled(bonus, tokens, nodes)
    if len(bonus) == 1:
        return _one_by_heap(bonus[0], tokens, values, budgets[0], depths[0])
    return _assembled(bonus, tokens, _by_heap(values, budgets, depths))


def _assembled(bonus: list[int], tokens: Tensor, nodes: Prefixes) -> DraftTree:
    row, place, level, rank, cost, parent = nodes
    rows = len(bonus)
    sizes = np.bincount(row, minlength=rows) + 1
    length = int(sizes.max())
    at = row * length + place
    columns = np.zeros((3, rows * length), np.int64)
    columns[0, ::length] = bonus
    columns[0, at] = tokens.numpy()[row, level, rank]
    columns[1, at] = parent
    columns[2, at] = level + 1
    scores = np.full(rows * length, -np.inf, np.float32)
    scores[::length] = 0
    scores[at] = cost * -UNIT
    shape = (rows, length)
    return DraftTree(
        torch.from_numpy(columns[0].reshape(shape)),
        torch.from_numpy(columns[1].reshape(shape)),
        torch.from_numpy(columns[2].reshape(shape)),
        torch.from_numpy(scores.reshape(shape)),
        sizes.tolist(),
    )


def _one_by_heap(
    bonus: int, tokens: Tensor, values: NDArray[np.float32], budget: int, depth: int
) -> DraftTree:
    """The tree of one row. It is small, and lists are quicker than arrays there."""
    levels, ranks, costs, parents = pop_order(array_costs_of(values[0, :depth, :budget]).tolist(), budget)
    names = tokens[0, :depth, :budget].tolist()
    return DraftTree(
        torch.tensor([[bonus, *(names[level][rank] for level, rank in zip(levels, ranks, strict=True))]]),
        torch.tensor([[0, *parents]]),
        torch.tensor([[0, *(level + 1 for level in levels)]]),
        torch.tensor([[0.0, *(cost * -UNIT for cost in costs)]]),
        [len(levels) + 1],
    )


def _by_heap(values: NDArray[np.float32], budgets: list[int], depths: list[int]) -> Prefixes:
    """As `best_prefixes`, row by row."""
    columns: tuple[list[int], ...] = ([], [], [], [], [], [])
    for row, (budget, depth) in enumerate(zip(budgets, depths, strict=True)):
        if budget == 0 or depth == 0:
            continue
        levels, *others = pop_order(array_costs_of(values[row, :depth, :budget]).tolist(), budget)
        count = len(levels)
        for column, part in zip(columns, ([row] * count, range(1, count + 1), levels, *others), strict=True):
            column += part
    return Prefixes(*(np.array(column, np.int64) for column in columns))


@torch.no_grad()
def _level_by_level(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    """The best of each level, on the device, with no host round trip until the end.

    Child j of the i-th best prefix of a level is beaten by the children up to j of the prefixes up to i, so of
    B nodes only pairs with (i + 1)(j + 1) <= B count.
    """
    device, depth, width = tokens.device, max(depths), max(budgets)
    tokens, logprobs = tokens[:, :depth, :width], logprobs[:, :depth, :width]
    beyond = torch.arange(depth, device=device) >= torch.tensor(depths, device=device)[:, None]
    steps = costs_of(logprobs).masked_fill(beyond[:, :, None], ABSENT)
    root = DraftTree.root(bonus, device)
    levels = [(root.tokens, root.parents, root.parents)]
    first, costs = 0, root.parents
    for level in range(depth):
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
