"""The Markov head: a low-rank bias on a slot's logits by the token before it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.heads import Head, Trunk
from ddtree.errors import ConfigError


class Markov(Head):
    """logits + W2 W1[previous], the cheapest first-order correction (DSpark's plain form, arXiv 2607.05147).

    Args:
        size: Vd, tokens of the draft vocabulary.
        vocab_size: V, the target's; W1 then has a row for each of its tokens. None keeps rows for draft tokens
            only, and one for all others: the small form.
        rank: r, width of W1 and W2.
        confidence: H, the size of the states, for a confidence head beside it; None for none.

    Raises:
        ConfigError: a size is not a whole number from 1 up.
    """

    kind: ClassVar[str] = "markov"

    def __init__(
        self, size: int, vocab_size: int | None = None, rank: int = 128, confidence: int | None = None
    ) -> None:
        super().__init__()
        for name, value in {
            "size": size,
            "vocab_size": vocab_size,
            "rank": rank,
            "confidence": confidence,
        }.items():
            if (value is None and name in ("size", "rank")) or (value is not None and value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 up")
        self.size, self.vocab_size, self.rank = size, vocab_size, rank
        self.w1 = nn.Embedding(size + 1 if vocab_size is None else vocab_size, rank)
        self.w2 = nn.Linear(rank, size, bias=False)
        nn.init.normal_(self.w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.w2.weight)
        self.confidence_proj = None if confidence is None else nn.Linear(confidence + rank, 1)

    def forward(self, trunk: Trunk, states: Tensor, previous: Tensor, base: Tensor | None = None) -> Tensor:
        if base is None:
            base = trunk.logits(trunk.norm(states))
        return base + self.w2(self._rows(trunk, previous)).float()

    def confidence(self, trunk: Trunk, states: Tensor, previous: Tensor) -> Tensor:
        """Logits float32 [..., L] of the chance that a slot's token is accepted when all before it are.

        Takes states [..., L, H] before the final norm, as `forward` does.

        Raises:
            ConfigError: the head was made without one.
        """
        if self.confidence_proj is None:
            raise ConfigError("this Markov head has no confidence head: make it with confidence=HIDDEN_SIZE")
        rows = self._rows(trunk, previous)
        normed = trunk.norm(states).to(rows.dtype)
        joined = torch.cat([normed.expand(*rows.shape[:-1], -1), rows], dim=-1)
        return self.confidence_proj(joined)[..., 0].float()

    def config(self) -> dict[str, Any]:
        proj = self.confidence_proj
        return {
            "size": self.size,
            "vocab_size": self.vocab_size,
            "rank": self.rank,
            "confidence": None if proj is None else proj.in_features - self.rank,
        }

    def _rows(self, trunk: Trunk, previous: Tensor) -> Tensor:
        """W1's rows [..., r] of the target's tokens [...]."""
        if self.vocab_size is None:
            index = trunk.index(previous)
            previous = torch.where(index < 0, self.size, index)
        return functional.embedding(previous, self.w1.weight)
