"""Build draft trees: best first from marginals, level by level from a scorer, by pruning, by merging."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each, check_range, in_use, on_host

UNIT = 2.0**-32
"""Log-probability of one unit of cost: sums of whole numbers are exact, and the same on every device."""
ABSENT = 1 << 42
"""Cost of a candidate that is not there."""
_LEAST = -ABSENT * UNIT


def costs_of(logprobs: Tensor) -> Tensor:
    """Return int64 costs of log-probabilities; those above 0 count as 0, NaN and -inf as absent."""
    kept = logprobs.float().nan_to_num(nan=_LEAST, posinf=0.0, neginf=_LEAST).clamp(_LEAST, 0)
    return (kept * (-1 / UNIT)).to(torch.int64)


def logprobs_of(costs: Tensor) -> Tensor:
    """Return float32 log-probabilities of costs; -inf of absent ones."""
    return (costs.to(torch.float32) * -UNIT).masked_fill(costs >= ABSENT, float("-inf"))


def cheapest(costs: Tensor, count: int) -> Tensor:
    """Return int64 [R, count]: the places of the `count` lowest of costs [R, n <= 2^20], in order; ties by index."""
    indices = torch.arange(costs.shape[1], device=costs.device)
    # Cost and index in one integer are never tied, so the choice is the same on every device.
    keys = (costs.clamp(max=ABSENT) << 20) + indices
    return keys.topk(count, largest=False).values & 0xFFFFF


def best_first(
    bonus: list[int],
    tokens: Tensor,
    logprobs: Tensor,
    budgets: list[int],
    depths: list[int],
    widths: list[int] | None = None,
) -> DraftTree:
    """Build the likeliest prefixes when each depth has its own distribution, whatever was chosen before.

    DDTree's Algorithm 1 (arXiv 2604.12989). Nodes come in the pop order of its best-first heap: by score, ties by
    depth, then rank, then the parent's place. Scores are summed and compared exactly, in fixed point (`costs_of`), so
    that every device builds the same tree.

    Args:
        bonus: the root's token of each row.
        tokens: int64 [R, L, K], candidates of depth 1..L, best first. The best B nodes need min(B, V) of them.
        logprobs: float [R, L, K], their log-probabilities, descending; -inf where there is no candidate.
        budgets: most nodes besides the root, 0..1024, for each row; 8 to 64 are usual.
        depths: deepest level, 0..16, for each row; L when larger.
        widths: candidates of a level that each row uses, 1 for a chain; all of them are there, so that on a device
            nothing is read to see how many nodes there are. None uses all that are not -inf.

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
    depth, width = min(max(depths), tokens.shape[1]), max(budgets)
    if width == 0 or depth == 0 or tokens.shape[2] == 0:
        return DraftTree.root(bonus, tokens.device)
    tokens, logprobs = tokens[:, :depth, :width], logprobs[:, :depth, :width]
    levels, most = tokens.shape[1:]
    ranks = [most if widths is None else min(widths[row], most) for row in range(rows)]
    if not on_host(tokens.device):
        scorer, sizes = _MarginalScorer(tokens, logprobs, depths, ranks), None
        if widths is not None:
            sizes = [
                _most_nodes(own, min(deepest, levels), budget)
                for own, deepest, budget in zip(ranks, depths, budgets, strict=True)
            ]
        grown = grow(bonus, scorer, width, depth, device=tokens.device, sizes=sizes)
        return grown if sizes else grown.truncate(budgets)
    names, costs = tokens.tolist(), costs_of(logprobs).tolist()
    return DraftTree.stack(
        [
            _by_heap(
                bonus[row],
                names[row][: depths[row]],
                [level[: ranks[row]] for level in costs[row][: depths[row]]],
                budgets[row],
            )
            for row in range(rows)
        ]
    )


def _most_nodes(width: int, depth: int, budget: int) -> int:
    """Return the nodes of a tree of `width` children each, root included, of which the budget is used."""
    nodes = level = 1
    for _ in range(depth):
        level *= width
        nodes += level
        if nodes > budget:
            return budget + 1
    return nodes


def _by_heap(bonus: int, names: list[list[int]], costs: list[list[int]], budget: int) -> DraftTree:
    """Build one row's tree on the CPU, where a heap is quicker than tensors: the cheapest prefixes, in order.

    Prefixes come by cost, then level, rank, and the parent's place.

    Args:
        bonus: the root's token.
        names: token of each candidate by level and rank.
        costs: cost of each candidate, ascending along the ranks.
        budget: most prefixes.
    """
    # Cost, depth, rank, and the parent's place in the tree.
    nodes = [(0, 0, 0, 0)]
    heap = [(costs[0][0], 1, 0, 0)] if costs else []
    for node in range(1, budget + 1):
        if not heap or heap[0][0] >= ABSENT:
            break
        nodes.append(heap[0])
        cost, depth, rank, parent = heap[0]
        row = costs[depth - 1]
        if rank + 1 < len(row):
            heapreplace(heap, (cost - row[rank] + row[rank + 1], depth, rank + 1, parent))
        else:
            heappop(heap)
        if depth < len(costs):
            heappush(heap, (cost + costs[depth][0], depth + 1, 0, node))
    totals, depths, ranks, parents = zip(*nodes, strict=True)
    tokens = [bonus, *(names[depth - 1][rank] for depth, rank in zip(depths[1:], ranks[1:], strict=True))]
    return DraftTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([depths]),
        torch.tensor([[-total * UNIT for total in totals]]),
        [len(nodes)],
    )


class _MarginalScorer:
    """A scorer for `grow` whose children do not depend on their parents.

    With as many prefixes a level as the budget, the grown tree holds the best-first tree: each of the best B nodes is
    among the best B of its level.
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor, depths: list[int], widths: list[int]) -> None:
        _, levels, ranks = tokens.shape
        bounds = torch.tensor([depths, widths], device=tokens.device)[:, :, None]
        too_deep = torch.arange(levels, device=tokens.device) >= bounds[0]
        too_wide = torch.arange(ranks, device=tokens.device) >= bounds[1]
        absent = too_deep[:, :, None] | too_wide[:, None]
        self._tokens = tokens
        self._logprobs = logprobs.float().masked_fill(absent, float("-inf"))

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Give every prefix the candidates of this depth."""
        shape = (-1, parents.shape[1], -1)
        return (
            self._tokens[:, depth - 1, None].expand(shape),
            self._logprobs[:, depth - 1, None].expand(shape),
        )


class Scorer(Protocol):
    """Supplies the children of kept prefixes to `grow`; each path-conditioned method has one."""

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Score the children of the prefixes that the last level kept.

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
    sizes: list[int] | None = None,
) -> DraftTree:
    """Grow a supertree: at each level the best children of the last level's best prefixes, whatever their parents.

    Runs on the device with one host round trip, at the end, to read how many nodes there are, or none.
    Scores are summed and compared exactly (see `costs_of`); ties go by depth, then rank among the siblings, then
    the parent's place.

    Args:
        bonus: the root's token of each row.
        scorer: gives the children.
        width: most prefixes to expand a level, 1..1024.
        depth: number of levels, 1..16.
        keep: most nodes to keep a level, at least `width` (the default): those not expanded may still be
            candidates for the pruned tree, as in EAGLE-2 (arXiv 2406.16858).
        device: where the scorer's tensors live.
        sizes: nodes of each row to keep, root included, where it is known that there are as many.

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
    return _assemble(levels, sizes)


def _assemble(levels: list[tuple[Tensor, Tensor, Tensor]], sizes: list[int] | None) -> DraftTree:
    """Make one tree, best first, of levels (tokens, parents, costs int64 [R, n]), each in order, root first."""
    tokens, parents, costs = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    depths = torch.cat([torch.full_like(level[0], depth) for depth, level in enumerate(levels)], dim=1)
    sizes = sizes or (costs < ABSENT).sum(1).tolist()
    tree = DraftTree(tokens, parents, depths, logprobs_of(costs), sizes)
    return _reorder(tree, cheapest(costs, max(sizes)), sizes)


@torch.no_grad()
def prune(
    tree: DraftTree, budgets: list[int], beta: float = 0.0, depths: list[int] | None = None
) -> DraftTree:
    """Keep the best nodes of each row by log-probability + beta * depth, in that order; ties keep their old order.

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
    return _reorder(tree, cheapest(costs, max(sizes)), sizes)


def _reorder(tree: DraftTree, order: Tensor, sizes: list[int]) -> DraftTree:
    """Make a tree of these sizes from the nodes `order` [R, n] of a tree; a node's parent must come before it."""
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


def merge(trees: list[DraftTree], budgets: list[int]) -> DraftTree:
    """Unite the trees' prefixes and keep the best of each row.

    A prefix in several trees gets its highest score. A parent then still scores no less than its children, and no two
    siblings carry the same token. Ties go by depth, then to the earlier tree.

    Args:
        trees: trees over the same rows, with the same bonus tokens.
        budgets: most nodes besides the root, 0..1024, for each row.

    Raises:
        ConfigError: there are no trees, their roots differ, or a budget is outside its range.
    """
    if not trees:
        raise ConfigError("trees=[] holds no tree to merge: give at least one")
    roots = trees[0].tokens[:, 0].tolist()
    if any(tree.tokens[:, 0].tolist() != roots for tree in trees):
        raise ConfigError("the trees to merge have different roots: give trees drafted from the same rows")
    check_each("budgets", budgets, len(roots), 0, MAX_BUDGET)
    rows = [_union([tree.row(row) for tree in trees], budget) for row, budget in enumerate(budgets)]
    return DraftTree.stack(rows)


def _union(trees: list[DraftTree], budget: int) -> DraftTree:
    """Unite trees of one row each."""
    tokens, parents, depths, scores = trees[0].tokens[0, :1].tolist(), [0], [0], [0.0]
    seen: dict[tuple[int, int], int] = {}
    for tree in trees:
        # The place in the union of each node of this tree.
        own = [0]
        for token, parent, depth, score in list(zip(*(c[0].tolist() for c in tree.columns), strict=True))[1:]:
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
    columns: tuple[list[Any], ...] = (tokens, [places.get(parent) for parent in parents], depths, scores)
    device = trees[0].tokens.device
    picked = (torch.tensor([[column[node] for node in order]], device=device) for column in columns)
    return DraftTree.of(picked, [len(order)])
