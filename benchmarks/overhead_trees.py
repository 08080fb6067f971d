"""Time to build draft trees and their masks, without top-k, against a plain heap in Python.

    OMP_NUM_THREADS=1 python benchmarks/overhead_trees.py

Marginals are synthetic: at each depth a power law over the vocabulary with some noise, the top candidate less sure
the deeper it stands ("drafter"), equally unsure everywhere ("flat"), or nearly certain ("sure"). Both start from the
same top-k tensors and end with the same tensors: tokens, parents, depths, scores and the visibility of nodes. The
two take turns of some calls, each turn on other marginals; shown are medians over the turns, in milliseconds, and
the median of the turns' ratios. A batch is one call for its rows here, and one heap a row there.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ddtree.tree import DraftTree, ancestor_mask, best_first

VOCABULARY = 151_936
DEPTH = 15
# Exponent of the power law at the first and at the last depth.
KINDS = {"drafter": (2.5, 1.2), "flat": (1.0, 1.0), "sure": (4.0, 3.0)}

Built = tuple[DraftTree, Tensor]


def marginals(kind: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [DEPTH, count] of the likeliest `count` of the vocabulary at each depth."""
    first, last = KINDS[kind]
    exponents = torch.linspace(first, last, DEPTH)[:, None]
    noise = 0.5 * torch.randn(DEPTH, VOCABULARY, generator=generator)
    logits = noise - exponents * torch.log(torch.arange(1, VOCABULARY + 1))
    top = torch.log_softmax(logits, -1).topk(count)
    return top.indices, top.values


def heap_tree(bonus: int, tokens: Tensor, logprobs: Tensor, budget: int) -> Built:
    """DDTree's Algorithm 1 and its visibility loop, plainly."""
    ids, scores = tokens.tolist(), logprobs.tolist()
    depth, count = len(scores), len(scores[0])
    node_tokens, parents, depths, totals = [bonus], [0], [0], [0.0]
    heap = [(-scores[0][0], 1, 0, 0)]
    while heap and len(node_tokens) <= budget:
        cost, level, rank, parent = heapq.heappop(heap)
        node = len(node_tokens)
        node_tokens.append(ids[level - 1][rank])
        parents.append(parent)
        depths.append(level)
        totals.append(-cost)
        if rank + 1 < count:
            heapq.heappush(heap, (-(totals[parent] + scores[level - 1][rank + 1]), level, rank + 1, parent))
        if level < depth:
            heapq.heappush(heap, (cost - scores[level][0], level + 1, 0, node))
    nodes = len(node_tokens)
    visible = np.zeros((nodes, nodes), dtype=bool)
    visible[0, 0] = True
    for node in range(1, nodes):
        visible[node, :node] = visible[parents[node], :node]
        visible[node, node] = True
    tree = DraftTree(
        torch.tensor([node_tokens]),
        torch.tensor([parents]),
        torch.tensor([depths]),
        torch.tensor([totals]),
        [nodes],
    )
    return tree, torch.from_numpy(visible)[None]


def heaps(tokens: Tensor, logprobs: Tensor, budget: int) -> list[Built]:
    return [heap_tree(1, *row, budget) for row in zip(tokens, logprobs, strict=True)]


def ours(tokens: Tensor, logprobs: Tensor, budget: int) -> Built:
    rows, depth, _ = tokens.shape
    tree = best_first([1] * rows, tokens, logprobs, [budget] * rows, [depth] * rows)
    return tree, ancestor_mask(tree)


def seconds(function: Callable[[], object], calls: int) -> float:
    """Median time of some calls one after another, so that neither side starts each with the other's caches."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def same(left: list[Built], right: Built) -> bool:
    """Whether the two hold the same trees and masks (the heap adds in float64: scores may differ in rounding)."""
    tree, mask = right
    for row, (other, visible) in enumerate(left):
        mine = tree.row(row)
        names = ("tokens", "parents", "depths")
        if not all(torch.equal(getattr(other, name), getattr(mine, name)) for name in names):
            return False
        size = mine.sizes[0]
        if not torch.equal(visible[0], mask[row, :size, :size]):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--turns", type=int, default=12, help="different marginals")
    parser.add_argument("--calls", type=int, default=15, help="calls of each in a turn")
    args = parser.parse_args()

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(
        f"{'marginals':>9} {'batch':>5} {'B':>5} {'heap ms':>8} {'ours ms':>8} {'heap/ours':>9} "
        f"{'tree ms':>8} {'mask ms':>8}  same"
    )
    for kind in args.kinds:
        most = max(args.budgets)
        pool = [marginals(kind, most, generator) for _ in range(max(args.batches) + 3)]
        for batch in args.batches:
            for budget in args.budgets:
                times: list[tuple[float, float, float, float]] = []
                agree = 0
                for turn in range(args.turns):
                    rows = [pool[(turn + row) % len(pool)] for row in range(batch)]
                    tokens, logprobs = (torch.stack([r[i][:, :budget] for r in rows]) for i in (0, 1))
                    work = (tokens, logprobs, budget)
                    tree, _ = ours(*work)
                    agree += same(heaps(*work), ours(*work))
                    theirs = seconds(partial(heaps, *work), args.calls)
                    mine = seconds(partial(ours, *work), args.calls)
                    masking = seconds(partial(ancestor_mask, tree), args.calls)
                    times.append((theirs, mine, theirs / mine, masking))
                heap, own, ratio, mask = (statistics.median(column) for column in zip(*times, strict=True))
                print(
                    f"{kind:>9} {batch:>5} {budget:>5} {heap * 1e3:>8.3f} {own * 1e3:>8.3f} {ratio:>9.2f} "
                    f"{(own - mask) * 1e3:>8.3f} {mask * 1e3:>8.3f}  {agree}/{args.turns}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
