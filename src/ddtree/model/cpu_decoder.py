"""Decoder layers of Llama's structure, run on a CPU in fewer and larger operations than transformers takes.

A forward of a small model is hundreds of short operations beside its matrix products. `CpuDecoder` joins the products
that share an input, rotates queries and keys together, and uses one operation for a norm. Its logits and features have
the same bits as those of the model's own code on the same packed weights, or it is not used (`Target` compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.model.attention import Visibility, attend, window_of
from ddtree.model.packed_weights import PackedProduct, PackedWeights, pack

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers compute what `CpuDecoder` does, at any position; a comparison of a short text cannot tell."""
_PARTS = {
    "transformers.activations",
    *(f"torch.nn.modules.{name}" for name in ("linear", "activation", "sparse", "container")),
}


class CpuDecoder:
    """Runs a causal LM's decoder layers and head on packed weights.

    Args:
        model: in 16 bits on a CPU.
        layers: its decoder layers.

    Attributes:
        packed: lets the model's own code run on the same products.

    Raises:
        ValueError: the model has another structure, or a part that is not its family's own, or cannot be packed.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        name = model.config.model_type
        family = f"transformers.models.{name}.modeling_{name}"
        plain = {type(part).__module__ for part in model.modules()} <= _PARTS | {family}
        if name not in _FAMILIES or not plain or not hasattr(model, "lm_head"):
            raise ValueError(f"{type(model).__name__} is not built as a plain Llama")
        inner = model.model
        self._embed, self._rotary, self._norm = inner.embed_tokens, inner.rotary_emb, inner.norm
        self._layers = [_DecoderLayer(layer) for layer in layers]
        self._head = _packed(model.lm_head)
        self.packed = PackedWeights([p for layer in self._layers for p in layer.products] + [self._head])
        parts = list(model.modules())
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._attributes = [vars(part) for part in parts]
        self._children = [(part._modules, dict(part._modules)) for part in parts if part._modules]

    @property
    def current(self) -> bool:
        """Whether the model still consists of the parts that it had."""
        return all(now == before for now, before in self._children)

    def hooked(self, ours: type) -> bool:
        """Return whether a hook of another type than ours, or a `forward` of a module's own, counts for the model.

        Neither is called here.
        """
        if any("forward" in attributes for attributes in self._attributes):
            return True
        return any(not isinstance(hook, ours) for hooks in self._hooks if hooks for hook in hooks.values())

    def __call__(
        self,
        cache: Any,
        tokens: Tensor,
        positions: Tensor,
        seen: Visibility,
        keep: int,
        features: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of one forward, as `Target.run` does.

        Args:
            features: the layers whose outputs are wanted side by side.
        """
        x = self._embed(tokens)
        rotation = _rotation(*self._rotary(x, positions))
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x = layer(index, x, rotation, cache, seen)
            if index in features:
                outputs[index] = x
        logits = self._head(_norm(self._norm, x[:, -keep:]))
        return logits, torch.cat([outputs[index] for index in features], dim=-1) if features else None


class _DecoderLayer:
    """One decoder layer: attention, then a gated MLP, each after a norm and added to its input.

    Attributes:
        products: the packed products of its weights.

    Raises:
        ValueError: a weight cannot be packed.
    """

    def __init__(self, layer: Any) -> None:
        self._attention, self._mlp = attention, mlp = layer.self_attn, layer.mlp
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.products = (
            _packed(attention.q_proj, attention.k_proj, attention.v_proj),
            _packed(attention.o_proj),
            _packed(mlp.gate_proj, mlp.up_proj),
            _packed(mlp.down_proj),
        )
        self._normed = hasattr(attention, "q_norm")
        size, queries, keys = attention.head_dim, *self.products[0].widths[:2]
        self._size, self._scale = size, attention.scaling
        self._queries, self._turned = queries // size, (queries + keys) // size

    def __call__(
        self, index: int, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, seen: Visibility
    ) -> Tensor:
        """Return the layer's output [R, n, H] for its input x [R, n, H], which is left as it is."""
        joined, out, gate_up, down = self.products
        heads = joined(_norm(self._before_attention, x)).view(*x.shape[:2], -1, self._size)
        turned, values = heads[:, :, : self._turned], heads[:, :, self._turned :]
        if self._normed:
            queries, keys = turned[:, :, : self._queries], turned[:, :, self._queries :]
            normed = _norm(self._attention.q_norm, queries), _norm(self._attention.k_norm, keys)
            turned = torch.cat(normed, dim=2)
        cos, sin = rotation
        # Dimension i turns with dimension i + D / 2.
        turned = turned * cos + turned.roll(self._size // 2, dims=-1) * sin
        query, key = (part.transpose(1, 2) for part in turned.tensor_split((self._queries,), dim=2))
        keys, values = cache.update(key, values.transpose(1, 2), index)
        attended = attend(query, keys, values, seen, window_of(self._attention), self._scale)
        x = x + out(attended.flatten(2))
        gate, up = gate_up.parts(_norm(self._before_mlp, x))
        x += down(self._mlp.act_fn(gate).mul_(up))
        return x


def _rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [R, n, 1, D], the sines of the first half negative: those turn backwards."""
    half = sin.shape[-1] // 2
    return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, :, None]


def _norm(module: Any, x: Tensor) -> Tensor:
    """Return an RMS norm of x [..., H] with the bits of transformers' own, which rounds before the weight counts."""
    return torch.rms_norm(x, module.weight.shape, None, module.variance_epsilon).mul_(module.weight)


def _packed(*layers: nn.Module) -> PackedProduct:
    product = pack(*layers)
    if product is None:
        raise ValueError("the weights cannot be packed")
    return product
