"""Grow a tree level by level from a scorer's children."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ddtree.tree.costs import ABSENT, cheapest, costs_of, logprobs_of
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_range
from ddtree.tree.prune import reorder


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
