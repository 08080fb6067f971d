"""Heads: small networks that make a block drafter's marginals depend on the path before each slot.

A block drafter predicts every position without knowing which tokens a branch chose before it. A head corrects the
prediction of a slot for the tokens chosen before it, at a fraction of the cost of another pass of the drafter. Each
starts with a correction of zero: an untrained head drafts as the backbone does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.dflash.network import Norm
from ddtree.errors import CheckpointError, ConfigError, check_whole


class BackboneParts(Protocol):
    """The frozen parts of a backbone and its target that heads use."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [..., H] of the target's token ids [...]."""

    def norm(self, states: Tensor) -> Tensor:
        """Return the states after the backbone's final norm."""

    def logits(self, normed: Tensor) -> Tensor:
        """Return float32 scores [..., Vd] of normed states [..., H]."""

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft tokens of the target's token ids; -1 for those outside the draft vocabulary."""


class Head(nn.Module, ABC):
    """A correction of a backbone's logits by the path before each slot.

    Args:
        config: the keyword arguments of the subclass, as JSON values.
    """

    kind: ClassVar[str]

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self._config = config

    def config(self) -> dict[str, Any]:
        """Return the constructor's keyword arguments, as JSON values."""
        return dict(self._config)

    @abstractmethod
    def forward(
        self, backbone: BackboneParts, states: Tensor, previous: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return corrected logits of whole paths, as in training; drafting takes the same in other portions.

        Args:
            backbone: the backbone's and target's parts.
            states: [A, L, H], the backbone's states, before its final norm, of the slots of depths 1..L.
            previous: int64 [A, L], the target's id of the token before each of them; the bonus token first.
            base: the backbone's own logits float32 [A, L, Vd], where they are at hand.

        Returns:
            Float32 logits [A, L, Vd].
        """


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
        super().__init__(size=size, vocab_size=vocab_size, rank=rank, confidence=confidence)
        for name, value in self._config.items():
            if value is not None or name in ("size", "rank"):
                check_whole(name, value, 1)
        self.size, self.vocab_size, self.rank = size, vocab_size, rank
        self.w1 = nn.Embedding(size + 1 if vocab_size is None else vocab_size, rank)
        self.w2 = nn.Linear(rank, size, bias=False)
        nn.init.normal_(self.w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.w2.weight)
        self.confidence_proj = None if confidence is None else nn.Linear(confidence + rank, 1)

    def forward(
        self, backbone: BackboneParts, states: Tensor, previous: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return corrected logits of whole paths; see `Head.forward`."""
        if base is None:
            base = backbone.logits(backbone.norm(states))
        return base + self.w2(self._rows(backbone, previous)).float()

    def confidence(self, backbone: BackboneParts, states: Tensor, previous: Tensor) -> Tensor:
        """Return logits float32 [..., L] of the chance that a slot's token is accepted when all before it are.

        Takes states [..., L, H] before the final norm, as `forward` does.

        Raises:
            ConfigError: the head was made without one.
        """
        if self.confidence_proj is None:
            raise ConfigError("this Markov head has no confidence head: make it with confidence=HIDDEN_SIZE")
        rows = self._rows(backbone, previous)
        normed = backbone.norm(states).to(rows.dtype)
        joined = torch.cat([normed.expand(*rows.shape[:-1], -1), rows], dim=-1)
        return self.confidence_proj(joined)[..., 0].float()

    def _rows(self, backbone: BackboneParts, previous: Tensor) -> Tensor:
        """Return W1's rows [..., r] of the target's tokens [...]."""
        if self.vocab_size is None:
            index = backbone.index(previous)
            previous = torch.where(index < 0, self.size, index)
        return functional.embedding(previous, self.w1.weight)


class TreeFlash(Head):
    """A SwiGLU layer on the previous token's embedding and the slot's state, added to the state (arXiv 2606.03819).

    The embedding has a norm of its own here; the state enters through the backbone's final norm.

    Args:
        hidden_size: H, of states and embeddings.
        intermediate_size: I, of the layer; H by default.
        rms_norm_eps: of the embedding's norm.

    Raises:
        ConfigError: a size is not a whole number from 1 up.
    """

    kind: ClassVar[str] = "treeflash"

    def __init__(
        self, hidden_size: int, intermediate_size: int | None = None, rms_norm_eps: float = 1e-6
    ) -> None:
        inner = hidden_size if intermediate_size is None else intermediate_size
        super().__init__(hidden_size=hidden_size, intermediate_size=inner, rms_norm_eps=rms_norm_eps)
        check_whole("hidden_size", hidden_size, 1)
        check_whole("intermediate_size", inner, 1)
        self.embed_norm = Norm(hidden_size, eps=rms_norm_eps)
        self.gate_up = nn.Linear(2 * hidden_size, 2 * inner)
        self.down = nn.Linear(inner, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(
        self, backbone: BackboneParts, states: Tensor, previous: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return corrected logits of whole paths; see `Head.forward`. `base` is of no use here."""
        own = backbone.norm(states)
        tokens = self.embed_norm(backbone.embed(previous)).to(own.dtype)
        joined = torch.cat(torch.broadcast_tensors(tokens, own), dim=-1)
        gate, up = self.gate_up(joined).chunk(2, dim=-1)
        return backbone.logits(backbone.norm(states + self.down(functional.silu(gate) * up)))


class DominoHead(Head):
    """Adds outer(silu(inner [slot's normed state ; state of the path])) to the logits (Domino, arXiv 2605.29707).

    Whole paths are scored by `forward`. Drafting takes the same apart: `start` and `step` carry the state of each
    branch, `inner` is the slot's part and `hidden` adds the branch's, and `outer` has a row for each draft token, of
    which only the candidates' are needed.

    Args:
        hidden_size: H, the target's.
        size: Vd, tokens of the draft vocabulary.
        gru_hidden: width of the path's state.
        rank: width of the low-rank network.
        pure_prefix: the first depths that the backbone predicts alone; the block's input holds the bonus token, so
            that the first slot knows its predecessor anyway.

    Raises:
        ConfigError: a size is not a whole number from 1 up, or `pure_prefix` not one from 0 up.
    """

    kind: ClassVar[str] = "domino"

    def __init__(
        self, hidden_size: int, size: int, gru_hidden: int = 256, rank: int = 128, pure_prefix: int = 1
    ) -> None:
        super().__init__(
            hidden_size=hidden_size, size=size, gru_hidden=gru_hidden, rank=rank, pure_prefix=pure_prefix
        )
        for name, value in self._config.items():
            check_whole(name, value, 0 if name == "pure_prefix" else 1)
        self.hidden_size, self.size = hidden_size, size
        self.gru_hidden, self.rank, self.pure_prefix = gru_hidden, rank, pure_prefix
        self.prefix_gru = nn.GRU(hidden_size, gru_hidden, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_hidden, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, size, bias=False),
        )
        nn.init.zeros_(self.outer)

    def forward(
        self, backbone: BackboneParts, states: Tensor, previous: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return corrected logits of whole paths; see `Head.forward`."""
        normed = backbone.norm(states)
        base = backbone.logits(normed) if base is None else base
        pure = self.pure_prefix
        if pure >= states.shape[1]:
            return base
        embedded = backbone.embed(previous).to(self.outer.dtype)
        # A recurrent net of few numbers: float32 costs nothing here, and mixed precision knows no GRU on some devices.
        with torch.autocast(embedded.device.type, enabled=False):
            paths, _ = self.prefix_gru(embedded)
        joined = torch.cat([normed.to(paths.dtype), paths], dim=-1)[:, pure:]
        corrected = base[:, pure:] + self.embed_proj(joined).float()
        return torch.cat([base[:, :pure], corrected], dim=1) if pure else corrected

    @property
    def outer(self) -> Tensor:
        """Weights [Vd, rank]: a row for each draft token."""
        return cast(Tensor, self.embed_proj[2].weight)

    def start(self, backbone: BackboneParts, bonus: Tensor) -> Tensor:
        """Return the states [..., gru_hidden] of paths that hold the bonus tokens int64 [...] alone."""
        return self.step(backbone, self.outer.new_zeros(*bonus.shape, self.gru_hidden), bonus)

    def step(self, backbone: BackboneParts, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states [..., gru_hidden] of paths with the target's token ids int64 [...] appended."""
        embedded = backbone.embed(tokens).to(state.dtype)
        stepped = torch.gru_cell(
            embedded.flatten(0, -2),
            state.flatten(0, -2),
            cast(Tensor, self.prefix_gru.weight_ih_l0),
            cast(Tensor, self.prefix_gru.weight_hh_l0),
        )
        return stepped.view(state.shape)

    def inner(self, normed: Tensor) -> Tensor:
        """Return the part of slots of normed states [..., H] in the low-rank network's input: [..., rank]."""
        return functional.linear(normed, self._inner[:, : self.hidden_size])

    def hidden(self, inner: Tensor, state: Tensor) -> Tensor:
        """Return the low-rank network's activations [..., rank] for slots' `inner` and states [..., gru_hidden]."""
        return functional.silu(inner + functional.linear(state, self._inner[:, self.hidden_size :]))

    @property
    def _inner(self) -> Tensor:
        return cast(Tensor, self.embed_proj[0].weight)


_CLASSES: dict[str, Any] = {"markov": Markov, "treeflash": TreeFlash, "domino": DominoHead}
KINDS = tuple(_CLASSES)


def create(kind: str, **config: Any) -> Head:
    """Make a head of random weights, which corrects nothing until it is trained.

    Args:
        kind: one of `KINDS`.
        config: the keyword arguments of its class, as `Head.config` gives them.

    Raises:
        CheckpointError: there is no such kind, or it takes other settings.
    """
    if kind not in _CLASSES:
        raise CheckpointError(f"head kind {kind!r} is unknown: the heads known here are {', '.join(KINDS)}")
    try:
        head: Head = _CLASSES[kind](**config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a {kind} head cannot be made of the settings {config!r}: {error}") from error
    return head
