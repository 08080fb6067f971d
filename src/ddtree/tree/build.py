"""The best tree of factorized marginals: DDTree's Algorithm 1 (arXiv 2604.12989), without its heap."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each, check_range, in_use


def merge(trees: list[DraftTree], budgets: list[int]) -> DraftTree:
    """The union of the trees' prefixes, cut to the best of each row.

    A prefix that several trees hold scores as in the tree that thinks most of it; a parent then still scores no
    less than its children, and no two siblings carry the same token. Ties go by depth, then to the earlier tree.

    Args:
        trees: trees over the same rows, with the same bonus tokens.
        budgets: most nodes besides the root, 0..1024, for each row.

    Raises:
        ConfigError: there are no trees, their roots differ, or a budget is outside its range.
    """
    if not trees:
        raise ConfigError("trees=[] holds no tree to merge: give at least one")
    roots = trees[0].tokens[:, 0].tolist()
    for tree in trees[1:]:
        if tree.tokens[:, 0].tolist() != roots:
            raise ConfigError(
                "the trees to merge have different roots: give trees drafted from the same rows"
            )
    check_each("budgets", budgets, len(roots), 0, MAX_BUDGET)
    rows = [_union([tree.row(row) for tree in trees], budget) for row, budget in enumerate(budgets)]
    return DraftTree.stack(rows)


def _union(trees: list[DraftTree], budget: int) -> DraftTree:
    """The best prefixes of trees of one row each."""
    tokens, parents, depths, scores = trees[0].tokens[0, :1].tolist(), [0], [0], [0.0]
    seen: dict[tuple[int, int], int] = {}
    for tree in trees:
        # Where each node of this tree stands in the union.
        own = [0]
        columns = (tree.tokens, tree.parents, tree.depths, tree.logprobs)
        for token, parent, depth, score in list(zip(*(c[0].tolist() for c in columns), strict=True))[1:]:
            key = (own[parent], token)
            place = seen.setdefault(key, len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                depths.append(depth)
                scores.append(score)
            elif score > scores[place]:
                scores[place] = score
            own.append(place)
    order = [0, *sorted(range(1, len(tokens)), key=lambda node: (-scores[node], depths[node]))[:budget]]
    places = {node: place for place, node in enumerate(order)}
    device = trees[0].tokens.device

    def column(values: list[int] | list[float]) -> Tensor:
        return torch.tensor([values], device=device)

    return DraftTree(
        column([tokens[node] for node in order]),
        column([places[parents[node]] for node in order]),
        column([depths[node] for node in order]),
        column([scores[node] for node in order]),
        [len(order)],
    )


UNIT = 2.0**-32
ABSENT = 1 << 42
_LEAST = -ABSENT * UNIT


def costs_of(logprobs: Tensor) -> Tensor:
    """int64 costs of log-probabilities; those above 0 count as 0, NaN and -inf as absent."""
    kept = logprobs.float().nan_to_num(nan=_LEAST, posinf=0.0, neginf=_LEAST).clamp(_LEAST, 0)
    return (kept * (-1 / UNIT)).to(torch.int64)


def array_costs_of(logprobs: NDArray[np.float32]) -> NDArray[np.int64]:
    """As `costs_of`, for an array."""
    kept = np.minimum(np.fmax(logprobs, np.float32(_LEAST)), np.float32(0))
    kept *= np.float32(-1 / UNIT)
    return kept.astype(np.int64)


def logprobs_of(costs: Tensor) -> Tensor:
    """float32 log-probabilities of costs; -inf of absent ones."""
    return (costs.to(torch.float32) * -UNIT).masked_fill(costs >= ABSENT, float("-inf"))


def cheapest(costs: Tensor, count: int) -> Tensor:
    """int64 [R, count]: where the `count` lowest of the costs [R, n <= 2^20] stand, in order; ties by index."""
    indices = torch.arange(costs.shape[1], device=costs.device)
    # Cost and index in one integer are never tied, so the choice is the same on every device.
    keys = (costs.clamp(max=ABSENT) << 20) + indices
    return keys.topk(count, largest=False).values & 0xFFFFF


@torch.no_grad()
def prune(
    tree: DraftTree, budgets: list[int], beta: float = 0.0, depths: list[int] | None = None
) -> DraftTree:
    """The best nodes of each row by log-probability + beta * depth, in that order; ties keep the order they had.

    A child never scores above its parent, so the result is prefix-closed. Deferred pruning with a depth penalty
    is DARTree's (arXiv 2608.13524); with beta = 0, a tree that holds the optimum becomes the best-first tree.

    Args:
        budgets: most nodes besides the root, 0..1024, for each row.
        beta: added once a level; at most 0. Useful values are -0.2 to 0.
        depths: deepest level to keep, 0..16, for each row; all levels by default.

    Raises:
        ConfigError: a value is outside its range.
    """
    rows, nodes = tree.tokens.shape
    check_each("budgets", budgets, rows, 0, MAX_BUDGET)
    if not beta <= 0 or beta == float("-inf"):
        raise ConfigError(
            f"beta={beta!r} is not a finite number of at most 0: it is a penalty for each level"
        )
    costs = costs_of(tree.logprobs + beta * tree.depths if beta else tree.logprobs)
    sizes = tree.sizes
    if min(sizes) < nodes:
        costs = costs.masked_fill(~in_use(tree), ABSENT)
    if depths is not None:
        check_each("depths", depths, rows, 0, MAX_DEPTH)
        costs = costs.masked_fill(tree.depths > torch.tensor(depths, device=costs.device)[:, None], ABSENT)
        sizes = (costs < ABSENT).sum(1).tolist()
    sizes = [min(size, budget + 1) for size, budget in zip(sizes, budgets, strict=True)]
    return reorder(tree, cheapest(costs, max(sizes)), sizes)


def reorder(tree: DraftTree, order: Tensor, sizes: list[int]) -> DraftTree:
    """The nodes `order` [R, n] of a tree, as a tree of these sizes; a node's parent must stand before it."""
    places = torch.zeros_like(tree.parents)
    new = torch.arange(order.shape[1], device=order.device).expand_as(order)
    places.scatter_(1, order, new)
    picked = DraftTree(
        tree.tokens.gather(1, order),
        places.gather(1, tree.parents.gather(1, order)),
        tree.depths.gather(1, order),
        tree.logprobs.gather(1, order),
        sizes,
    )
    return picked if min(sizes) == order.shape[1] else picked.padded()


class Scorer(Protocol):
    """What a path-conditioned method supplies to `grow`."""

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Children of the prefixes that the last level kept.

        Args:
            depth: depth of the children, 1, 2, ...
            parents: int64 [R, W]; for each kept prefix, the place of its parent among the prefixes of the
                call before, so that the scorer can gather its own state of each branch. All 0 at depth 1, where
                W = 1 and the prefix is the root.
            tokens: int64 [R, W]; the last token of each prefix.

        Returns:
            tokens int64 [R, W, K] and log-probabilities float [R, W, K] of the children, best first within
            each prefix; -inf where there is none. K may differ from level to level.
        """


@torch.no_grad()
def grow(
    bonus: list[int],
    scorer: Scorer,
    width: int,
    depth: int,
    *,
    keep: int | None = None,
    device: torch.device | str = "cpu",
) -> DraftTree:
    """A supertree: at each level the best children of the last level's best prefixes, whatever their parents.

    Runs on the device with one host round trip, at the end, to read how many nodes there are.
    Scores are summed and compared exactly (see `costs`); ties go by depth, then rank among the siblings, then
    the parent's place.

    Args:
        bonus: the root's token of each row.
        scorer: gives the children.
        width: most prefixes to expand a level, 1..1024.
        depth: number of levels, 1..16.
        keep: most nodes to keep a level, at least `width` (the default): those not expanded may still be
            candidates for the pruned tree, as in EAGLE-2 (arXiv 2406.16858).
        device: where the scorer's tensors live.

    Returns:
        At most 1 + keep * depth nodes a row, best first. Cut it with `prune` or `DraftTree.truncate`.

    Raises:
        ConfigError: width, depth or keep is outside its range.
    """
    check_range("width", width, 1, MAX_BUDGET)
    check_range("depth", depth, 1, MAX_DEPTH)
    keep = width if keep is None else keep
    check_range("keep", keep, width, MAX_BUDGET)
    root = DraftTree.root(bonus, device)
    rows = len(bonus)
    levels = [(root.tokens, root.parents, root.parents)]
    first, frontier, slots, costs = 0, root.tokens, root.parents, root.parents
    for level in range(1, depth + 1):
        child_tokens, child_logprobs = scorer.expand(level, slots, frontier)
        prefixes, ranks = child_logprobs.shape[1], min(child_logprobs.shape[2], keep)
        # Rank before parent: the order in which equal scores are taken.
        steps = costs_of(child_logprobs[:, :, :ranks]).transpose(1, 2)
        grown = (costs[:, None, :] + steps).reshape(rows, ranks * prefixes)
        picked = cheapest(grown, min(keep, ranks * prefixes))
        slots = picked % prefixes
        tokens = child_tokens[:, :, :ranks].transpose(1, 2).reshape(rows, -1).gather(1, picked)
        costs = grown.gather(1, picked)
        levels.append((tokens, slots + first, costs))
        first += levels[-2][0].shape[1]
        slots, frontier, costs = slots[:, :width], tokens[:, :width], costs[:, :width]
    return assemble(levels)


def assemble(levels: list[tuple[Tensor, Tensor, Tensor]]) -> DraftTree:
    """One tree, best first, of levels (tokens, parents, costs int64 [R, n]), each in order, root first."""
    tokens, parents, costs = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    depths = torch.cat([torch.full_like(level[0], depth) for depth, level in enumerate(levels)], dim=1)
    sizes = (costs < ABSENT).sum(1).tolist()
    tree = DraftTree(tokens, parents, depths, logprobs_of(costs), sizes)
    return reorder(tree, cheapest(costs, max(sizes)), sizes)


def pop_order(steps: list[list[int]], budget: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """The cheapest prefixes of one row, in order: by cost, then level, rank, and the parent's place.

    Args:
        steps: cost of each candidate by level and rank, ascending along the ranks.
        budget: most prefixes.

    Returns:
        Level (from 0), rank and cost of each node, and its parent's place in the list, from 1; 0 for the root.
    """
    levels: list[int] = []
    ranks: list[int] = []
    costs: list[int] = []
    parents: list[int] = []
    deepest = len(steps) - 1
    heap = [(steps[0][0], 0, 0, 0)]
    for node in range(1, budget + 1):
        cost, level, rank, parent = heap[0]
        if cost >= ABSENT:
            break
        levels.append(level)
        ranks.append(rank)
        costs.append(cost)
        parents.append(parent)
        row = steps[level]
        if rank + 1 < len(row):
            heapreplace(heap, (cost - row[rank] + row[rank + 1], level, rank + 1, parent))
        else:
            heappop(heap)
        if level < deepest:
            heappush(heap, (cost + steps[level + 1][0], level + 1, 0, node))
        elif not heap:
            break
    return levels, ranks, costs, parents


Ints = NDArray[np.int64]

_TABLE_ROW = 48
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
    keys += rows << _TABLE_ROW
    keys.sort()
    starts = keys.searchsorted(np.arange(len(budgets) + 1) << _TABLE_ROW)
    wanted = starts[:-1] + np.maximum(budgets, 1) - 1
    lowered = keys[np.minimum(wanted, len(keys) - 1)] & ((1 << _TABLE_ROW) - 1)
    return np.where(wanted < starts[1:], np.minimum(bound, lowered), bound)


def _in_order(found: list[_Nodes], bounds: Ints, deep: int, budgets: Ints) -> Prefixes:
    """The best of each row among the nodes found."""
    costs, spots, ranks, parents = (np.concatenate(part) for part in zip(*found, strict=True))
    order = (costs <= bounds[spots]).nonzero()[0]
    keys = ((spots[order] - 1) // (deep + 1) << _TABLE_ROW) + costs[order]
    sorting = keys.argsort()
    keys, order = keys[sorting], order[sorting]
    equal = keys[1:] == keys[:-1]
    if equal.any():
        _settle(order, keys, equal, ((spots - 1) % (deep + 1) << 10) + ranks, parents)
    rows = keys >> _TABLE_ROW
    place = np.arange(1, len(order) + 1) - keys.searchsorted(np.arange(len(budgets)) << _TABLE_ROW)[rows]
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
