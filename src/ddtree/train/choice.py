"""Choosing tokens for many rows at once, without sorting or summing up a vocabulary for each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 256
_CANDIDATES = (
    512  # user turns are sampled among so many most likely tokens, which hold nearly all of a top-p of 0.95
)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of logits [R, V], the first of equals; int64 [R]."""
    return logits.float().max(dim=-1).indices


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V] at temperature 1, by inversion of `uniform` [R] in [0, 1); int64 [R].

    A block of tokens is found by the blocks' masses, then the token within it: a running sum over the whole
    vocabulary takes several times as long as everything else here.
    """
    size = logits.shape[-1]
    scores = logits.float()
    mass = scores.sub(scores.amax(dim=-1, keepdim=True)).exp_()
    if size % _BLOCK:
        mass = pad(mass, (0, -size % _BLOCK))
    blocks = mass.view(len(mass), -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    running = sums.cumsum(dim=-1)
    aim = uniform.to(running.dtype)[:, None] * running[:, -1:]
    block = _invert(sums, running, aim)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    rest = (aim - (running.gather(1, block) - sums.gather(1, block))).clamp_(min=0)
    return (block * _BLOCK + _invert(inner, inner.cumsum(dim=-1), rest))[:, 0]


def draw_nucleus(logits: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """As `draw`, from the smallest set of most likely tokens whose mass reaches `top_p`."""
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    best, order = scores.topk(min(_CANDIDATES, scores.shape[-1]), dim=-1)
    mass = (best - total).exp()
    mass = mass * (mass.cumsum(dim=-1) - mass < top_p)
    running = mass.cumsum(dim=-1)
    aim = uniform.to(running.dtype)[:, None] * running[:, -1:]
    return order.gather(1, _invert(mass, running, aim))[:, 0]


def _invert(mass: Tensor, running: Tensor, aim: Tensor) -> Tensor:
    """Where the running sums [R, n] pass `aim` [R, 1]: int64 [R, 1], always a place with some mass."""
    index = torch.searchsorted(running, aim, right=True)
    # A rounded aim may reach the total itself, past the last place with any mass.
    places = torch.arange(mass.shape[-1], device=mass.device)
    last = (mass > 0).mul(places).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last)
