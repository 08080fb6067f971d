"""The best prefixes of factorized marginals on the CPU, found by how often they leave the greedy path.

A prefix is a set of deviations (level, rank > 0), followed greedily to some level. The best B hold few deviations
each, so a handful of vectorised rounds finds them: first those with one deviation, then, from what survives, those
with two, and so on. What a prefix may cost is bounded by the B-th best found so far.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.tree.costs import ABSENT, array_costs_of

Ints = NDArray[np.int64]

_ROW = 48
_BLOCK = 16384


class Prefixes(NamedTuple):
    """Nodes [n] in order, all rows' one after another: by cost, then level, rank, and the parent's place."""

    rows: Ints
    places: Ints  # among the row's nodes, from 1
    levels: Ints  # from 0
    ranks: Ints
    costs: Ints
    parents: Ints  # the parent's place, 0 for the root


class _Nodes(NamedTuple):
    """Nodes [n], or the first nodes of deviations, in the order they were found."""

    costs: Ints
    # Which candidates come below: row * (levels + 1) + the next level. Of a deviation: those it is one of.
    spots: Ints
    ranks: Ints
    parents: Ints


def best_prefixes(logprobs: NDArray[np.float32], budgets: list[int], depths: list[int]) -> Prefixes | None:
    """The cheapest prefixes of each row.

    Args:
        logprobs: [R, L, K], descending along K.
        budgets: most prefixes of each row.
        depths: levels in use of each row.

    Returns:
        None if many more prefixes than asked for cost the same, as no distribution's do; then a heap is better.
    """
    rows = len(logprobs)
    costs, single, bound = _first_bound(logprobs, budgets, depths)
    alive = single <= bound[:, None, None]
    deep = int(np.count_nonzero(alive[:, :, 0].any(axis=0)))
    if deep == 0:
        return Prefixes(*[np.empty(0, np.int64)] * 6)
    window, spots, parents = _constants(rows, deep)
    greedy = np.full((rows, 2 * deep), ABSENT)
    greedy[:, :deep] = single[:, :deep, 0]
    # tails[spot, t]: what t more greedy levels cost after a deviation there.
    tails = (greedy[:, window] - greedy[:, : deep + 1, None]).reshape(-1, deep)
    found = [_Nodes(greedy[:, :deep].ravel(), spots, np.zeros(len(spots), np.int64), parents)]
    bounds = bound.repeat(deep + 1)
    deviations = _one_deviation(single, alive, deep)
    wide = int(deviations.ranks.max(initial=0))
    if wide == 0:
        return _in_order(found, bounds, deep, np.array(budgets))
    below = np.full((rows, deep + 1, wide), ABSENT)
    below[:, :deep] = costs[:, :deep, 1 : wide + 1]
    nexts = below.reshape(-1, wide)

    known, total = rows * deep, sum(budgets)
    limits = np.array(budgets)
    most = 64 * total + 4096
    while True:
        if known + len(deviations.costs) > most:
            return None
        nodes = _follow(deviations, tails, bounds, known)
        found.append(nodes)
        base, known = known, known + len(nodes.costs)
        if len(found) == 2 or 2 * len(nodes.costs) > total:
            bound = _bound_of(found, bound, deep, limits)
            bounds = bound.repeat(deep + 1)
        active = (nodes.costs <= (bounds - nexts[:, 0])[nodes.spots]).nonzero()[0]
        if len(active) == 0:
            return _in_order(found, bounds, deep, limits)
        deviations = _deviate(nodes, active, base, nexts, bounds, most)


def _first_bound(
    logprobs: NDArray[np.float32], budgets: list[int], depths: list[int]
) -> tuple[Ints, Ints, Ints]:
    """Costs [R, L, K] of as many ranks as may matter; of the prefixes that end with their first deviation (or have
    none); the bound [R] that these set."""
    rows, levels, most = logprobs.shape
    ranks = 8 + 4 * max(budgets) // levels
    # A first level that is flat to the end of these will not do with them.
    if ranks < most and (logprobs[:, 0, ranks] > logprobs[:, :3, 0].sum(axis=1)).any():
        ranks = most
    while True:
        costs = array_costs_of(logprobs[:, :, :ranks])
        if min(depths) < levels:
            for row, limit in enumerate(depths):
                costs[row, limit:] = ABSENT
        single = costs.copy()
        single[:, 1:] += costs[:, :-1, 0].cumsum(axis=1)[:, :, None]
        bound = _smallest(single.reshape(rows, -1), budgets)
        # Where the last rank is within the bound at some level, further ones may be.
        if ranks >= most or not (single[:, :, -1] <= bound[:, None]).any():
            return costs, single, bound
        ranks = most


def _one_deviation(single: Ints, alive: NDArray[np.bool_], deep: int) -> _Nodes:
    """First nodes of the deviations from the greedy path, whose node of row r and level d is r * deep + d."""
    _, levels, ranks = single.shape
    alive[:, :, 0] = False
    flat = alive.ravel().nonzero()[0]
    cell = flat // ranks
    row = cell // levels
    parent = cell - row * (levels - deep) - 1
    parent[cell == row * levels] = -1
    return _Nodes(single.ravel()[flat], cell - row * (levels - deep - 1), flat - cell * ranks, parent)


def _follow(deviations: _Nodes, tails: Ints, bounds: Ints, known: int) -> _Nodes:
    """The nodes of deviations and of the greedy levels after them that stay within the bound."""
    costs, spots, ranks, parents = deviations
    deep = tails.shape[1]
    table = tails[spots]
    table += costs[:, None]
    flat = (table <= bounds[spots][:, None]).ravel().nonzero()[0]
    which = flat // deep
    steps = flat - which * deep
    # Each deviation's nodes stand one after another, the first by itself.
    begins = (steps == 0).nonzero()[0]
    node_parents = np.arange(known - 1, known - 1 + len(flat))
    node_parents[begins] = parents
    node_ranks = np.zeros(len(flat), np.int64)
    node_ranks[begins] = ranks
    return _Nodes(table.ravel()[flat], spots[which] + steps + 1, node_ranks, node_parents)


def _deviate(nodes: _Nodes, active: Ints, base: int, nexts: Ints, bounds: Ints, most: int) -> _Nodes:
    """First nodes of one more deviation from active nodes; stops soon after it has found `most`.

    It goes block by block of ranks, since most nodes have few within the bound.
    """
    parts: list[tuple[Ints, Ints, Ints]] = []
    count, low, wide = 0, 0, nexts.shape[1]
    while low < wide and len(active) and count <= most:
        high = min(wide, low + max(8, _BLOCK // len(active)))
        spots = nodes.spots[active]
        block = nexts[spots, low:high]
        block += nodes.costs[active][:, None]
        within = block <= bounds[spots][:, None]
        flat = within.ravel().nonzero()[0]
        which = flat // (high - low)
        count += len(flat)
        parts.append((block.ravel()[flat], flat - which * (high - low) + (low + 1), active[which]))
        if high < wide:
            active = active[within[:, -1]]
        low = high
    if len(parts) == 1:
        costs, ranks, parents = parts[0]
    else:
        costs, ranks, parents = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Nodes(costs, nodes.spots[parents], ranks, parents + base)


def _smallest(costs: Ints, budgets: list[int]) -> Ints:
    """The B-th smallest cost of each row [R, n]; where fewer are present, the largest cost that is not absent."""
    count = costs.shape[1]
    wanted = np.clip(budgets, 1, count) - 1
    parted = costs.copy()
    parted.partition(np.unique(wanted) if len(wanted) > 1 else wanted, axis=1)
    bound = np.minimum(parted[np.arange(len(costs)), wanted], ABSENT - 1)
    if count < max(budgets):
        bound[np.array(budgets) > count] = ABSENT - 1
    return bound


def _bound_of(found: list[_Nodes], bound: Ints, deep: int, budgets: Ints) -> Ints:
    """The bound that the nodes found so far set."""
    rows = (np.concatenate([nodes.spots for nodes in found]) - 1) // (deep + 1)
    keys = np.concatenate([nodes.costs for nodes in found])
    keys += rows << _ROW
    keys.sort()
    starts = keys.searchsorted(np.arange(len(budgets) + 1) << _ROW)
    wanted = starts[:-1] + np.maximum(budgets, 1) - 1
    lowered = keys[np.minimum(wanted, len(keys) - 1)] & ((1 << _ROW) - 1)
    return np.where(wanted < starts[1:], np.minimum(bound, lowered), bound)


def _in_order(found: list[_Nodes], bounds: Ints, deep: int, budgets: Ints) -> Prefixes:
    """The best of each row among the nodes found."""
    costs, spots, ranks, parents = (np.concatenate(part) for part in zip(*found, strict=True))
    order = (costs <= bounds[spots]).nonzero()[0]
    keys = ((spots[order] - 1) // (deep + 1) << _ROW) + costs[order]
    sorting = keys.argsort()
    keys, order = keys[sorting], order[sorting]
    equal = keys[1:] == keys[:-1]
    if equal.any():
        _settle(order, keys, equal, ((spots - 1) % (deep + 1) << 10) + ranks, parents)
    rows = keys >> _ROW
    place = np.arange(1, len(order) + 1) - keys.searchsorted(np.arange(len(budgets)) << _ROW)[rows]
    kept = place <= budgets[rows]
    if not kept.all():
        order, rows, place = order[kept], rows[kept], place[kept]
    places = np.empty(len(costs) + 1, np.int64)
    places[order] = place
    places[-1] = 0
    levels = spots[order] - 1 - rows * (deep + 1)
    return Prefixes(rows, place, levels, ranks[order], costs[order], places[parents[order]])


def _settle(order: Ints, keys: Ints, equal: NDArray[np.bool_], details: Ints, parents: Ints) -> None:
    """Put runs of equal keys into the order of their details, then of their parents' places; in place."""
    tied = np.zeros(len(order), bool)
    tied[1:] = equal
    tied[:-1] |= equal
    at = tied.nonzero()[0]
    places = np.empty(len(details) + 1, np.int64)
    places[-1] = -1
    while True:
        places[order] = np.arange(len(order))
        nodes = order[at]
        settled = nodes[np.lexsort((places[parents[nodes]], details[nodes], keys[at]))]
        if (settled == nodes).all():
            return
        # Children of what moved may have to follow.
        order[at] = settled


@lru_cache(maxsize=64)
def _constants(rows: int, deep: int) -> tuple[Ints, Ints, Ints]:
    """[L + 1, L] the sum of its indices; spots and parents of the greedy paths' nodes."""
    levels = np.arange(deep)
    spots = np.arange(rows)[:, None] * (deep + 1) + levels + 1
    parents = np.arange(rows * deep) - 1
    parents[::deep] = -1
    return np.arange(deep + 1)[:, None] + levels, spots.ravel(), parents
