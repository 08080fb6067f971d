"""DDTree's Algorithm 1 (arXiv 2604.12989) as it stands: a heap of the next siblings and first children.

The quickest way to a small tree, and the steadiest where scores are all alike.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from ddtree.tree.costs import ABSENT


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
