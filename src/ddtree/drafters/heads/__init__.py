"""Heads: small networks that make a block drafter's marginals depend on the path they stand on.

A block drafter predicts every position without knowing which tokens a branch chose before it. A head corrects the
prediction of a slot for the tokens chosen before it, at a fraction of the cost of another pass of the drafter. Each
starts with a correction of zero: an untrained head drafts as the backbone does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn


class Trunk(Protocol):
    """What a head borrows from backbone and target; frozen.

    Attributes:
        size: Vd, tokens of the draft vocabulary.
    """

    size: int

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., H] of the target's token ids [...]."""

    def norm(self, states: Tensor) -> Tensor:
        """The backbone's final norm."""

    def logits(self, normed: Tensor) -> Tensor:
        """Float32 scores [..., Vd] of normed states [..., H]."""

    def index(self, tokens: Tensor) -> Tensor:
        """Draft tokens of the target's token ids; -1 for those outside the draft vocabulary."""

    def tokens(self, index: Tensor) -> Tensor:
        """The target's token ids of draft tokens."""


class Head(nn.Module, ABC):
    """A correction of a backbone's logits by the path before each slot."""

    kind: ClassVar[str]

    @abstractmethod
    def forward(self, trunk: Trunk, states: Tensor, previous: Tensor, base: Tensor | None = None) -> Tensor:
        """Corrected logits of whole paths, as in training; drafting takes the same in other portions.

        Args:
            trunk: the backbone's and target's parts.
            states: [A, L, H], the backbone's states, before its final norm, of the slots of depths 1..L.
            previous: int64 [A, L], the target's id of the token before each of them; the bonus token first.
            base: the backbone's own logits float32 [A, L, Vd], where they are at hand.

        Returns:
            Float32 logits [A, L, Vd].
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The constructor's keyword arguments, as JSON values."""
