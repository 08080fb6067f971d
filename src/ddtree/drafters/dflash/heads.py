"""Heads: small networks that make a block drafter's marginals depend on the path they stand on.

A block drafter predicts every position without knowing which tokens a branch chose before it. A head corrects the
prediction of a slot for the tokens chosen before it, at a fraction of the cost of another pass of the drafter. Each
starts with a correction of zero: an untrained head drafts as the backbone does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.dflash.network import Norm
from ddtree.errors import CheckpointError, ConfigError


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


_PREFIXES = ("draft_model.", "model.", "logit_head.")
_INPUT, _HIDDEN = "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"
_INNER, _OUTER = "embed_proj.0.weight", "embed_proj.2.weight"


class Domino(Head):
    """Adds outer(silu(inner [slot's normed state ; state of the path])) to the backbone's logits.

    Whole paths are scored by `forward`. Drafting takes the same apart: `start` and `step` carry the state of each
    branch, `inner` is what the slot and `hidden` what the branch adds to it, and `outer` has a row for each draft
    token, of which only the candidates' are needed.

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
        super().__init__()
        sizes = {"hidden_size": hidden_size, "size": size, "gru_hidden": gru_hidden, "rank": rank}
        for name, value in {**sizes, "pure_prefix": pure_prefix}.items():
            if value < (name in sizes):
                raise ConfigError(f"{name}={value!r} must be a whole number from {int(name in sizes)} up")
        self.hidden_size, self.size = hidden_size, size
        self.gru_hidden, self.rank, self.pure_prefix = gru_hidden, rank, pure_prefix
        self.prefix_gru = nn.GRU(hidden_size, gru_hidden, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_hidden, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, size, bias=False),
        )
        nn.init.zeros_(self.outer)

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "size": self.size,
            "gru_hidden": self.gru_hidden,
            "rank": self.rank,
            "pure_prefix": self.pure_prefix,
        }

    def forward(self, trunk: Trunk, states: Tensor, previous: Tensor, base: Tensor | None = None) -> Tensor:
        normed = trunk.norm(states)
        base = trunk.logits(normed) if base is None else base
        pure = self.pure_prefix
        if pure >= states.shape[1]:
            return base
        embedded = trunk.embed(previous).to(self.outer.dtype)
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

    def start(self, trunk: Trunk, bonus: Tensor) -> Tensor:
        """States [..., gru_hidden] of paths that hold the bonus tokens int64 [...] alone."""
        return self.step(trunk, self.outer.new_zeros(*bonus.shape, self.gru_hidden), bonus)

    def step(self, trunk: Trunk, state: Tensor, tokens: Tensor) -> Tensor:
        """States [..., gru_hidden] of paths with the target's token ids int64 [...] appended."""
        gru = self.prefix_gru
        embedded = trunk.embed(tokens).to(state.dtype)
        stepped = torch.gru_cell(
            embedded.flatten(0, -2),
            state.flatten(0, -2),
            cast(Tensor, gru.weight_ih_l0),
            cast(Tensor, gru.weight_hh_l0),
        )
        return stepped.view(state.shape)

    def inner(self, normed: Tensor) -> Tensor:
        """What slots of normed states [..., H] put into the low-rank network: [..., rank]."""
        return functional.linear(normed, self._inner[:, : self.hidden_size])

    def hidden(self, inner: Tensor, state: Tensor) -> Tensor:
        """The low-rank network's activations [..., rank], of slots' `inner` and paths' states [..., gru_hidden]."""
        return functional.silu(inner + functional.linear(state, self._inner[:, self.hidden_size :]))

    @property
    def _inner(self) -> Tensor:
        return cast(Tensor, self.embed_proj[0].weight)


def public(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Domino:
    """The head of a published Domino checkpoint (`projector_type` "domino" or "causal_v5").

    Args:
        config: its config.json; `pure_draft_prefix_len`, `gru_hidden_dim` and `emb_dim` stand in `dflash_config` or
            at the top. `shift_label` is the backbone's (`DFlashConfig.sample_from_anchor`).
        tensors: at least prefix_gru.weight_{ih,hh}_l0 and embed_proj.{0,2}.weight, the older ones after
            "logit_head."; others are not looked at.

    Raises:
        CheckpointError: a tensor is missing, or shapes and settings contradict each other.
    """
    settings = {**config, **(config.get("dflash_config") or {})}
    found = {_canonical(name): tensor for name, tensor in tensors.items()}
    missing = [name for name in (_INPUT, _HIDDEN, _INNER, _OUTER) if name not in found]
    if missing:
        raise CheckpointError(f"this Domino drafter lacks {', '.join(missing)}: download it again")
    gru_hidden, hidden_size = found[_HIDDEN].shape[1], found[_INPUT].shape[1]
    size, rank = found[_OUTER].shape
    pure = settings.get("pure_draft_prefix_len", 0)
    if isinstance(pure, bool) or not isinstance(pure, int) or pure < 0:
        raise CheckpointError(f"pure_draft_prefix_len={pure!r} must be a whole number from 0 up")
    for key, width in (("gru_hidden_dim", gru_hidden), ("emb_dim", rank)):
        if settings.get(key, width) != width:
            raise CheckpointError(
                f"{key}={settings[key]!r}, but the Domino head's tensors are made for {width}"
            )
    with torch.device("meta"):
        head = Domino(hidden_size, size, gru_hidden, rank, pure)
    for name, tensor in head.state_dict().items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name} is {list(found[name].shape)}, not {list(tensor.shape)} as the Domino head's others say"
            )
    head.load_state_dict({name: found[name] for name in (_INPUT, _HIDDEN, _INNER, _OUTER)}, assign=True)
    return head


def _canonical(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return f"embed_proj.{name}" if name in ("0.weight", "2.weight") else name


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
        super().__init__()
        inner = hidden_size if intermediate_size is None else intermediate_size
        for name, value in {"hidden_size": hidden_size, "intermediate_size": inner}.items():
            if value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 up")
        self.hidden_size, self.intermediate_size, self.eps = hidden_size, inner, rms_norm_eps
        self.embed_norm = Norm(hidden_size, eps=rms_norm_eps)
        self.gate_up = nn.Linear(2 * hidden_size, 2 * inner)
        self.down = nn.Linear(inner, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, trunk: Trunk, states: Tensor, previous: Tensor, base: Tensor | None = None) -> Tensor:
        own = trunk.norm(states)
        tokens = self.embed_norm(trunk.embed(previous)).to(own.dtype)
        joined = torch.cat(torch.broadcast_tensors(tokens, own), dim=-1)
        gate, up = self.gate_up(joined).chunk(2, dim=-1)
        return trunk.logits(trunk.norm(states + self.down(functional.silu(gate) * up)))

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": self.eps,
        }


_CLASSES: dict[str, Any] = {"markov": Markov, "treeflash": TreeFlash, "domino": Domino}
KINDS = tuple(_CLASSES)


def create(kind: str, **config: Any) -> Head:
    """A head of random weights, which corrects nothing until it is trained.

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
