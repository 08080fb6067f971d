"""TreeFlash's head: a slot's state, moved by the embedding of the token before it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.dflash_net import Norm
from ddtree.drafters.heads import Head, Trunk
from ddtree.errors import ConfigError


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
