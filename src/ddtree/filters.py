"""Which tokens top-k, top-p and min-p keep.

Definitions are those of Hugging Face's warpers, applied in that order to temperature-scaled logits:

- top-k keeps every token at least as likely as the k-th, so tokens equal to it stay as well;
- top-p, over what top-k left and renormalised, keeps a token while the tokens before it in the order
  (probability descending, id ascending) sum to less than p; of tokens that are equal at the cut, the lower
  ids stay;
- min-p keeps tokens at least min_p times as likely as the likeliest.

Tokens with logit -inf are never kept. At least one token is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FIRST_GUESS = 256
_SECOND_GUESS = 4096


def support(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor | None:
    """Ids of the tokens kept, ascending, int64 [k]; None where all V are kept.

    Args:
        logits: float32 [V], already divided by the temperature, at least one of them finite and none NaN or
            +inf.
        top_k, top_p, min_p: as in `SamplingParams`; 0, 1 and 0 are off.
    """
    by_count = 0 < top_k < logits.numel()
    if by_count:
        ids = _at_least(logits, float(torch.topk(logits, top_k).values[-1]))
        if top_p < 1.0:
            ids = _nucleus_of_few(logits, ids, top_p)
    elif top_p < 1.0:
        ids = _nucleus(logits, top_p)
    elif min_p > 0.0:
        return _at_least(logits, float(logits.amax()) + math.log(min_p))
    else:
        return None
    if min_p > 0.0:
        kept = logits[ids]
        ids = ids[kept >= float(kept.amax()) + math.log(min_p)]
    return ids


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits [V], by (value descending, id ascending), int64 [count]."""
    top = torch.topk(logits, min(count, logits.numel()))
    ids = _settle_ties(logits, top.values, top.indices, top.values.numel()).sort().values
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def _at_least(logits: Tensor, floor: float) -> Tensor:
    kept = logits >= floor if floor > -math.inf else logits > floor
    return kept.nonzero().flatten()


def _count(cumulative: Tensor, top_p: float) -> int:
    """How many tokens of a descending order top-p keeps, given their inclusive cumulative probabilities."""
    return int((cumulative < top_p).sum()) + 1


def _nucleus_of_few(logits: Tensor, ids: Tensor, top_p: float) -> Tensor:
    """top-p among `ids`, renormalised over them."""
    values, order = torch.sort(logits[ids], descending=True, stable=True)
    cumulative = torch.softmax(values.double(), dim=0).cumsum(dim=0)
    return ids[order[: _count(cumulative, top_p)]].sort().values


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """top-p over the whole vocabulary: the leading few usually reach p, and only else is all of it sorted."""
    peak = logits.amax()
    total = (logits - peak).exp_().sum().double()
    size = logits.numel()
    for guess in (_FIRST_GUESS, _SECOND_GUESS):
        if guess >= size:
            break
        values, indices = torch.topk(logits, guess)
        cumulative = ((values - peak).double().exp() / total).cumsum(dim=0)
        if float(cumulative[-1]) >= top_p:
            return _settle_ties(logits, values, indices, _count(cumulative, top_p)).sort().values
    values, order = torch.sort(logits, descending=True, stable=True)
    cumulative = ((values - peak).double().exp() / total).cumsum(dim=0)
    ids = order[: _count(cumulative, top_p)].sort().values
    return ids[logits[ids] > -math.inf]


def _settle_ties(logits: Tensor, values: Tensor, indices: Tensor, count: int) -> Tensor:
    """The first `count` ids by (value descending, id ascending), as an unordered set, given a descending top-k."""
    cut = values[count - 1]
    above = int((values > cut).sum())
    # topk picks any of the equal values; more of them may lie beyond its end.
    if above == count - 1 and count < values.numel() and bool(values[count] < cut):
        return indices[:count]
    tied = (logits == cut).nonzero().flatten()[: count - above]
    return torch.cat((indices[:above], tied))
