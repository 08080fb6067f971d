"""The best prefixes of factorized marginals on the CPU, found by how often they leave the greedy path.

A prefix is a set of deviations (depth, rank > 0) followed greedily to some depth. The B best hold few deviations
each, so a handful of vectorised rounds finds them: all prefixes with at most one deviation at once, then, of those
that survive, the ones with two, and so on. Every round lowers the bound under which a prefix must stay.

Costs are negated log-probabilities, float32, added from the root down; inf marks what is absent. A cost's bits order
as it does, which makes (row, cost, depth, rank) one integer, the key by which nodes are ranked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]

_ROW, _COST, _DEPTH = 47, 15, 10
_FINITE = np.float32(np.finfo(np.float32).max)
_BLOCK = 16384


def best_prefixes(costs: Floats, budgets: list[int]) -> tuple[Ints, Ints, Ints, Floats, Ints]:
    """The cheapest prefixes of each row, in order: by cost, depth, rank, then the parent's place.

    Args:
        costs: [R, L, K], at least 0, ascending along K.
        budgets: most prefixes of each row, at least 1.

    Returns:
        Row, depth (from 1), rank and cost of each node, all rows' nodes one after another, and where its parent
        stands in the same list, -1 for the root.
    """
    keys, parents = _candidates(costs, budgets)
    order = _cheapest(keys, parents, budgets)
    chosen = keys[order]
    places = np.empty(len(keys) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = -1
    return chosen >> _ROW, (chosen >> _DEPTH) & 31, chosen & 1023, _cost(chosen), places[parents[order]]


def _candidates(costs: Floats, budgets: list[int]) -> tuple[Ints, Ints]:
    """Keys and parents (places in the same list) of a prefix-closed set that holds the best prefixes."""
    rows, _, ranks = costs.shape
    single = costs.copy()
    single[:, 1:] += np.add.accumulate(costs[:, :-1, 0], axis=1)[:, :, None]
    bound = _bound(single.reshape(rows, -1), budgets)
    alive = single <= bound[:, None, None]
    # Beyond these nothing stays under the bound, whatever else a prefix deviates in.
    deep = np.count_nonzero(alive[:, :, 0].any(axis=0))
    wide = np.count_nonzero(alive.reshape(-1, ranks).any(axis=0))
    if deep == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    costs = costs[:, :deep, :wide]
    single = single[:, :deep, :wide]

    # table[d, r, e, j]: row r deviates to rank j at level e and goes on greedily to level d; e = j = 0 is the
    # greedy path itself, which the other levels' rank 0 would repeat.
    below, above, levels = _triangles(deep)
    table = np.empty((deep, rows, deep, wide), np.float32)
    table[...] = np.where(below, costs[:, :, 0].T[:, :, None], np.float32(0))[..., None]
    single[:, 1:, 0] = np.inf
    table[levels, :, levels] = single.swapaxes(0, 1)
    _add_down(table)
    table += above
    bound = _bound(table.swapaxes(0, 1).reshape(rows, -1), budgets)

    flat = np.flatnonzero(table <= bound[:, None, None])
    cost = table.ravel()[flat]
    cell = flat // wide
    rank = flat - cell * wide
    fresh = rank > 0
    place = cell // deep
    level = place // rows
    row = place - level * rows
    start = cell - place * deep == level
    step = rows * deep * wide
    places = np.empty(table.size + 1, np.int64)
    places[flat] = np.arange(len(flat))
    places[-1] = -1
    above_it = np.where(start, place * (deep * wide), flat) - step
    parents = [places[np.maximum(above_it, -1)]]
    keys = [_key(row, cost, level, rank * start)]
    if wide == 1:
        return keys[0], parents[0]

    # One level more, of nothing, below the deepest.
    nexts = np.full((rows, deep + 1, wide), np.inf, np.float32)
    nexts[:, :deep] = costs
    greedy = nexts[:, :, 0].T.copy()
    nexts = nexts.reshape(-1, wide)
    second = nexts[:, 1].copy()
    child = row * (deep + 1) + level + 1
    active = np.flatnonzero((cost + second[child] <= bound[row]) & fresh)
    known, base, total = len(flat), 0, sum(budgets)
    while len(active):
        which, rank, cost = _children(cost[active], nexts, child[active], bound[row[active]])
        which = active[which]
        row, start_level, parent = row[which], level[which] + 1, which + base
        base = known
        width = len(row)
        table = np.where(levels[:, None] > start_level, greedy[:deep, row], np.float32(0))
        table[start_level, np.arange(width)] = cost
        _add_down(table)
        flat = np.flatnonzero((table <= bound[row]) & (levels[:, None] >= start_level))
        level = flat // width
        column = flat - level * width
        start = level == start_level[column]
        places = np.empty(table.size, np.int64)
        places[flat] = np.arange(known, known + len(flat))
        known += len(flat)
        cost, row = table.ravel()[flat], row[column]
        parents.append(np.where(start, parent[column], places[flat - width]))
        keys.append(_key(row, cost, level, rank[column] * start))
        if known > 2 * total and 2 * len(flat) > total:
            bound = _cost(_last_keys(np.concatenate(keys), budgets))
        child = row * (deep + 1) + level + 1
        active = np.flatnonzero(cost + second[child] <= bound[row])
    return np.concatenate(keys), np.concatenate(parents)


def _children(cost: Floats, nexts: Floats, child: Ints, bound: Floats) -> tuple[Ints, Ints, Floats]:
    """Parent, rank and cost of the children of rank > 0 within the bound; first siblings are few, so in blocks."""
    parents: list[Ints] = []
    ranks: list[Ints] = []
    costs: list[Floats] = []
    left = np.arange(len(cost))
    low, wide = 1, nexts.shape[1]
    while low < wide and len(left):
        high = min(wide, low + max(8, _BLOCK // len(left)))
        block = cost[left, None] + nexts[child[left], low:high]
        within = block <= bound[left, None]
        hit = np.flatnonzero(within)
        parent = hit // (high - low)
        parents.append(left[parent])
        ranks.append(hit - parent * (high - low) + low)
        costs.append(block.ravel()[hit])
        left, low = left[within[:, -1]], high
    if len(parents) == 1:
        return parents[0], ranks[0], costs[0]
    return np.concatenate(parents), np.concatenate(ranks), np.concatenate(costs)


def _add_down(table: Floats) -> None:
    """Running sums along the first axis, in place."""
    if table[0].size < 100:
        # One call, but slow for each number.
        np.add.accumulate(table, axis=0, out=table)
        return
    for level in range(1, len(table)):
        table[level] += table[level - 1]


def _key(row: Ints, cost: Floats, level: Ints, rank: Ints) -> Ints:
    key = cost.view(np.int32).astype(np.int64)
    key <<= _COST
    key += (row << _ROW) + ((level + 1) << _DEPTH) + rank
    return key


def _cost(keys: Ints) -> Floats:
    return ((keys >> _COST) & 0xFFFFFFFF).astype(np.int32).view(np.float32)


def _bound(costs: Floats, budgets: list[int]) -> Floats:
    """The B-th smallest finite cost of each row [R, n], or the largest finite number where there are fewer."""
    count = costs.shape[1]
    wanted = [min(budget, count) - 1 for budget in budgets]
    # As integers: numpy's partition of floats takes quadratic time on many equal ones.
    parted = np.partition(costs.view(np.int32), sorted(set(wanted)), axis=1)
    bound = np.minimum(parted[np.arange(len(costs)), wanted].view(np.float32), _FINITE)
    if count < max(budgets):
        bound[np.array(budgets) > count] = _FINITE
    return bound


def _last_keys(keys: Ints, budgets: list[int]) -> Ints:
    """The B-th smallest of each row's keys; its last where there are fewer."""
    keys = np.sort(keys)
    starts = keys.searchsorted(np.arange(len(budgets) + 1) << _ROW)
    return keys[np.minimum(starts[:-1] + budgets, starts[1:]) - 1]


def _cheapest(keys: Ints, parents: Ints, budgets: list[int]) -> Ints:
    """Which nodes are the best of each row, in the order of rows and keys; equal keys by their parents' places."""
    within: Ints | None = None
    if len(keys) > 2 * sum(budgets):
        within = np.flatnonzero(keys <= _last_keys(keys, budgets)[keys >> _ROW])
        order = within[np.argsort(keys[within])]
    else:
        order = np.argsort(keys)
    ranked = keys[order]
    repeated = ranked[1:] == ranked[:-1]
    if repeated.any():
        _settle(order, ranked, repeated, parents, len(keys))
    starts = ranked.searchsorted(np.arange(len(budgets)) << _ROW)
    kept = np.arange(len(order)) < (starts + budgets)[ranked >> _ROW]
    return order if kept.all() else order[kept]


def _settle(order: Ints, ranked: Ints, repeated: NDArray[np.bool_], parents: Ints, count: int) -> None:
    """Put runs of equal keys into the order of their parents, in place; deeper runs follow shallower ones."""
    tied = np.zeros(len(order), bool)
    tied[1:] = repeated
    tied[:-1] |= repeated
    at = np.flatnonzero(tied)
    keys = ranked[at]
    places = np.empty(count + 1, np.int64)
    places[-1] = -1
    while True:
        places[order] = np.arange(len(order))
        nodes = order[at]
        settled = nodes[np.lexsort((places[parents[nodes]], keys))]
        if (settled == nodes).all():
            return
        order[at] = settled


@lru_cache(maxsize=16)
def _triangles(levels: int) -> tuple[NDArray[np.bool_], Floats, Ints]:
    """[L, 1, L] where the first index exceeds the second; [L, 1, L, 1] inf where the second does; 0..L-1."""
    below = np.tri(levels, k=-1, dtype=bool)
    above = np.where(below.T, np.float32(np.inf), np.float32(0))
    return below[:, None, :], above[:, None, :, None], np.arange(levels)
