"""Which tokens top-k, top-p and min-p keep.

Definitions are those of Hugging Face's warpers, applied in that order to temperature-scaled logits:

- top-k keeps every token at least as likely as the k-th, so tokens equal to it stay as well;
- top-p, over what top-k left and renormalised, keeps a token while the tokens before it in the order
  (probability descending, id ascending) sum to less than p; of tokens equal at the cut, the lower ids stay;
- min-p keeps tokens at least min_p times as likely as the likeliest.

Tokens with logit -inf are never kept. At least one token is.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LEADING = 256


def support(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor | None:
    """Ids of the tokens kept, ascending, int64 [k]; None where all V are kept.

    Args:
        logits: float32 [V], divided by the temperature, at least one of them finite, none NaN or +inf.
        top_k, top_p, min_p: as in `SamplingParams`; 0, 1 and 0 are off.
    """
    ids: Tensor | None = None
    if 0 < top_k < logits.numel():
        ids = _at_least(logits, float(torch.topk(logits, top_k).values[-1]))
    if top_p < 1.0:
        ids = _nucleus(logits, top_p) if ids is None else ids[_nucleus(logits[ids], top_p)]
    if min_p > 0.0:
        # The likeliest token is always among those kept so far.
        floor = float(logits.amax()) + math.log(min_p)
        ids = _at_least(logits, floor) if ids is None else ids[_at_least(logits[ids], floor)]
    return ids


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest finite logits [V], by (value descending, id ascending), int64."""
    values = torch.topk(logits, min(count, logits.numel())).values
    ids = _first(logits, float(values[-1]), values.numel())
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def _at_least(logits: Tensor, floor: float) -> Tensor:
    kept = logits >= floor if floor > -math.inf else logits > floor
    return kept.nonzero().flatten()


def _first(logits: Tensor, cut: float, count: int) -> Tensor:
    """The first `count` ids by (value descending, id ascending), put in ascending order.

    `cut` is the value of the last of them.
    """
    ids = _at_least(logits, cut)
    excess = ids.numel() - count
    if excess <= 0:
        return ids
    tied = (logits[ids] == cut).nonzero().flatten()
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[tied[-excess:]] = False
    return ids[keep]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Ids that top-p keeps of logits [n], ascending."""
    peak = logits.amax()
    total = (logits - peak).exp_().sum().double()
    # The leading few usually reach p; sorting everything is for flat distributions.
    for leading in (_LEADING, logits.numel()):
        values = _descending(logits, leading)
        cumulative = ((values - peak).double().exp_() / total).cumsum(dim=0)
        if float(cumulative[-1]) >= top_p:
            break
    count = min(int((cumulative < top_p).sum()) + 1, values.numel())
    return _first(logits, float(values[count - 1]), count)


def _descending(logits: Tensor, leading: int) -> Tensor:
    """The `leading` largest values (all, if there are fewer), descending."""
    if leading < logits.numel():
        return torch.topk(logits, leading).values
    if logits.device.type == "cpu":
        # numpy sorts bare values some thirty times faster than torch sorts values with their indices.
        return torch.from_numpy(np.sort(logits.numpy())).flip(0)
    return torch.sort(logits, descending=True).values
