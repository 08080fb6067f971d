"""Texts that repeat themselves, told for many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

PERIOD = 40
TOKENS = 24
REACH = 4 * PERIOD
"""How many of a text's last tokens `looping` looks at."""


def looping(tails: Tensor, lengths: Tensor) -> Tensor:
    """Whether each text ends in four turns of one period up to 40, or 24 tokens and one period more: bool [R].

    Args:
        tails: [R, w], the last w tokens of each text; at least `REACH`, unless no text has more than w.
        lengths: [R], tokens of each text. What stands before a shorter text's first token is not looked at.
    """
    width = tails.shape[1]
    found = torch.zeros(len(tails), dtype=torch.bool, device=tails.device)
    for period in range(1, PERIOD + 1):
        span = max(3 * period, TOKENS)
        if span + period > width:
            break
        same = tails[:, width - span :] == tails[:, width - span - period : width - period]
        found |= same.all(dim=1) & (lengths >= span + period)
    return found


def tails_of(tokens: Tensor, ends: Tensor) -> Tensor:
    """The `REACH` tokens of each row [R, T] before its end [R]; those of a shorter row begin with others."""
    columns = ends[:, None] + torch.arange(-REACH, 0, device=tokens.device)
    return tokens.gather(1, columns.clamp(0, tokens.shape[1] - 1))
