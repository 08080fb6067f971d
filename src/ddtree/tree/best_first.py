"""The best tree of factorized marginals: DDTree's Algorithm 1 (arXiv 2604.12989), without its heap."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each
from ddtree.tree.grow import assemble
from ddtree.tree.prune import best


@torch.no_grad()
def best_first(
    bonus: list[int], tokens: Tensor, logprobs: Tensor, budgets: list[int], depths: list[int]
) -> DraftTree:
    """The prefixes of highest probability when each depth has its own distribution, whatever was chosen before.

    Nodes come in the pop order of a best-first heap: by score, ties by depth, then rank, then the parent's place.
    A score is the parent's score plus the token's log-probability, in float32.

    Args:
        bonus: the root's token of each row.
        tokens: int64 [R, L, K], candidates of depth 1..L, best first. A tree of B nodes needs min(B, V) of them.
        logprobs: float [R, L, K], their log-probabilities, descending; -inf where there is no candidate.
        budgets: most nodes besides the root, 0..1024, for each row.
        depths: deepest level, 0..16, for each row; L when larger.

    Raises:
        ConfigError: a value is outside its range, or the shapes do not fit together.
    """
    rows = len(bonus)
    if tokens.shape != logprobs.shape or tokens.dim() != 3 or tokens.shape[0] != rows:
        raise ConfigError(
            f"tokens {list(tokens.shape)} and logprobs {list(logprobs.shape)} must both be [rows, depth, candidates] "
            f"with {rows} rows, one for each bonus token"
        )
    check_each("budgets", budgets, rows, 0, MAX_BUDGET)
    check_each("depths", depths, rows, 0, MAX_DEPTH)
    width, depth = max(budgets), min(max(depths), tokens.shape[1])
    if width == 0 or depth == 0:
        return DraftTree.root(bonus, tokens.device)
    tokens = tokens[:, :depth, :width]
    logprobs = logprobs[:, :depth, :width].float().clamp(max=0)
    if min(depths) < depth:
        levels = torch.arange(depth, device=tokens.device)
        too_deep = levels >= torch.tensor(depths, device=tokens.device)[:, None]
        logprobs = logprobs.masked_fill(too_deep[:, :, None], float("-inf"))
    return _level_by_level(bonus, tokens, logprobs, width).truncate(budgets)


def _level_by_level(bonus: list[int], tokens: Tensor, logprobs: Tensor, width: int) -> DraftTree:
    """The `width` best of each level, with no host round trip until the end.

    Child j of the i-th best prefix of a level is beaten by the children up to j of the prefixes up to i, so only
    pairs with (i + 1)(j + 1) <= width count.
    """
    root = DraftTree.root(bonus, tokens.device)
    levels = [(root.tokens, root.parents, root.logprobs)]
    first, scores = 0, root.logprobs
    for level in range(tokens.shape[1]):
        ranks, slots = _pairs(tokens.shape[2], scores.shape[1], width, tokens.device)
        grown = scores[:, slots] + logprobs[:, level, ranks]
        picked = best(grown, min(width, grown.shape[1]))
        scores = grown.gather(1, picked)
        levels.append((tokens[:, level].gather(1, ranks[picked]), slots[picked] + first, scores))
        first += levels[-2][0].shape[1]
    return assemble(levels)


def _pairs(ranks: int, prefixes: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n], [n]: the pairs (rank j, prefix i) with (i + 1)(j + 1) <= width, rank by rank."""
    counts = [min(prefixes, width // (rank + 1)) for rank in range(min(ranks, width))]
    rank = [j for j, count in enumerate(counts) for _ in range(count)]
    prefix = [i for count in counts for i in range(count)]
    return torch.tensor(rank, device=device), torch.tensor(prefix, device=device)
