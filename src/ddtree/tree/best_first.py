"""The best tree of factorized marginals: DDTree's Algorithm 1 (arXiv 2604.12989), without its heap."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.deviations import best_prefixes
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each
from ddtree.tree.grow import assemble
from ddtree.tree.prune import best


@torch.no_grad()
def best_first(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    """The likeliest prefixes when each depth has its own distribution, whatever was chosen before.

    Nodes come in the pop order of a best-first heap: by score, ties by depth, then rank, then the parent's
    place. A score is the parent's score plus the token's log-probability, in float32.

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
    tokens, logprobs = tokens[:, :depth, :width], logprobs[:, :depth, :width].float()
    if tokens.device.type == "cpu":
        return _on_cpu(bonus, tokens, logprobs, budgets, depths)
    return _level_by_level(bonus, tokens, logprobs, depths, width).truncate(budgets)


def _on_cpu(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    costs = np.maximum(0 - logprobs.numpy(), 0)
    for row, depth in enumerate(depths):
        costs[row, depth:] = np.inf
    row, level, rank, cost, parent = best_prefixes(costs, budgets)
    rows = len(bonus)
    if rows == 1:
        sizes, place = [len(row) + 1], np.arange(1, len(row) + 1)
        parent = parent + 1
    else:
        counts = np.bincount(row, minlength=rows)
        sizes = (counts + 1).tolist()
        place = np.arange(1, len(row) + 1) - (counts.cumsum() - counts)[row]
        parent = np.append(place, 0)[parent]
    nodes = max(sizes)
    at = row * nodes + place
    whole = np.zeros((3, rows * nodes), np.int64)
    whole[0, ::nodes] = bonus
    whole[0, at] = tokens.numpy()[row, level - 1, rank]
    whole[1, at] = parent
    whole[2, at] = level
    scores = np.full(rows * nodes, -np.inf, np.float32)
    scores[::nodes] = 0
    scores[at] = 0 - cost
    return DraftTree(
        *torch.from_numpy(whole.reshape(3, rows, nodes)),
        torch.from_numpy(scores.reshape(rows, nodes)),
        sizes,
    )


def _level_by_level(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, depths: list[int], width: int
) -> DraftTree:
    """The `width` best of each level, on the device, with no host round trip until the end.

    Child j of the i-th best prefix of a level is beaten by the children up to j of the prefixes up to i, so only
    pairs with (i + 1)(j + 1) <= width count.
    """
    levels = torch.arange(tokens.shape[1], device=tokens.device)
    beyond = levels >= torch.tensor(depths, device=tokens.device)[:, None]
    logprobs = logprobs.clamp(max=0).masked_fill(beyond[:, :, None], float("-inf"))
    root = DraftTree.root(bonus, tokens.device)
    grown_levels = [(root.tokens, root.parents, root.logprobs)]
    first, scores = 0, root.logprobs
    for level in range(tokens.shape[1]):
        ranks, slots = _pairs(tokens.shape[2], scores.shape[1], width, tokens.device)
        grown = scores[:, slots] + logprobs[:, level, ranks]
        picked = best(grown, min(width, grown.shape[1]))
        scores = grown.gather(1, picked)
        grown_levels.append((tokens[:, level].gather(1, ranks[picked]), slots[picked] + first, scores))
        first += grown_levels[-2][0].shape[1]
    return assemble(grown_levels)


def _pairs(ranks: int, prefixes: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n], [n]: the pairs (rank j, prefix i) with (i + 1)(j + 1) <= width, rank by rank."""
    counts = [min(prefixes, width // (rank + 1)) for rank in range(min(ranks, width))]
    rank = [j for j, count in enumerate(counts) for _ in range(count)]
    prefix = [i for count in counts for i in range(count)]
    return torch.tensor(rank, device=device), torch.tensor(prefix, device=device)
