"""Domino's head: a recurrent state of the path inside the block corrects each slot's logits.

arXiv 2605.29707. A GRU reads the bonus token and then the drafted ones; the slot's own state and that of its path
go through a low-rank network, whose output is added to the backbone's logits. Parameter names are the tensor names
of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.heads import Head, Trunk
from ddtree.errors import CheckpointError, ConfigError

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
