"""The network of a DFlash drafter: a few decoder layers that read the target's features as extra keys and values.

Architecture of arXiv 2602.06036: a block of slots (the bonus token's embedding, then mask embeddings) runs through
Qwen3-style layers. Each layer attends to the block itself and to the context, whose keys and values come from the
target's features of the committed tokens, projected once (`DFlashNet.context`). Input embedding and head are the
target's. Parameter names are the tensor names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.model.attention import grouped
from ddtree.model.kv_cache import KVCache

Rotation = tuple[Tensor, Tensor]
LayerJoin = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Join = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's number, and keys and values of the slots; returns those of all that the slots may see."""


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a DFlash drafter; names as in its checkpoint's config.json where it has them.

    Attributes:
        hidden_size: H, the target's.
        vocab_size: V, the target's.
        block_size: slots of a block, the bonus token's included.
        mask_token_id: token whose embedding fills the slots to predict.
        target_layer_ids: target layers (0-based) whose outputs are the features, in order.
        num_target_layers: layers of the target it was made for; None when the checkpoint does not say.
        windows: sliding window of each layer, the query's own position included; None for full attention.
            Empty when all layers are full.
        causal: for each layer, whether a slot sees only earlier ones. Empty when none is.
        sample_from_anchor: slot k predicts the token after its own position, and slot 0 counts; otherwise slot k
            predicts the token at its own position, and slot 0 is not read.
        input_embedding_scale: factor on the rows of the target's embedding matrix.
        output_multiplier: factor on the head's logits.
        final_logit_softcapping: c in c * tanh(logits / c), after the factor; None or 0 for none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    attention_bias: bool = False
    max_position_embeddings: int = 40960
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    sample_from_anchor: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def first_slot(self) -> int:
        """The slot that predicts depth 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None for full attention."""
        return self.windows[layer] if self.windows else None

    def is_causal(self, layer: int) -> bool:
        """Return whether the slots of a layer see only earlier ones."""
        return bool(self.causal) and self.causal[layer]


class Norm(nn.RMSNorm):
    """RMSNorm in the input's dtype, so that mixed-precision training runs the fused kernel too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed over its last dimension."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, rotary positions and keys from elsewhere."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self._size = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=bias)
        self.q_norm = Norm(size, eps=config.rms_norm_eps)
        self.k_norm = Norm(size, eps=config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, Hkv, n, D] of states [R, n, H]; the same weights serve context and block."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2), rotation)
        return keys, self._heads(self.v_proj(states)).transpose(1, 2)

    def forward(self, x: Tensor, rotation: Rotation, bias: Tensor | None, join: LayerJoin) -> Tensor:
        """Return the attention's output [R, n, H].

        Args:
            x: [R, n, H].
            rotation: of the positions of x.
            bias: additive [R, 1, n, L], None when every slot sees every key.
            join: takes the slots' keys and values, and returns those of all L keys.
        """
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rotation)
        keys, values = join(*self.keys_values(x, rotation))
        query, keys = query.to(values.dtype), keys.to(values.dtype)
        out = grouped(query, keys, values, lambda fold: _folded(bias, fold), self._size**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self._size))


class MLP(nn.Module):
    """A SwiGLU layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [..., H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer over the block; the context enters through the attention's `join`."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, bias: Tensor | None, join: LayerJoin) -> Tensor:
        """Return the layer's output [R, n, H]; for the arguments see `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, bias, join)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashNet(nn.Module):
    """The drafter's own weights. Two ways through it give the same: `forward` (training) and `block` (drafting)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Return slots [..., H] from the target's embedding matrix [rows, H].

        Published checkpoints expect its bare rows times `input_embedding_scale`, whatever scaling the target's own
        embedding layer applies (Gemma).
        """
        slots = functional.embedding(tokens, weight)
        scale = self.config.input_embedding_scale
        return slots if scale == 1.0 else slots * scale

    def context(self, features: Tensor) -> Tensor:
        """Return the context states [..., H] of the target's features [..., F * H]."""
        return self.hidden_norm(self.fc(features))

    def logits(self, scores: Tensor) -> Tensor:
        """Return float32 logits from the head's scores, with the checkpoint's own factor and soft cap."""
        scores = scores.float()
        if self.config.output_multiplier != 1.0:
            scores = scores * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return scores if not cap else torch.tanh(scores / cap) * cap

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return states [R, S, H] of the slots, before the final norm; normed, they go into the target's head.

        Args:
            x: [R, S, H], slots of one block or of several packed side by side.
            positions: int64 [R, S], absolute.
            context: [R / k, C, H], from `context`; each of its rows is that of k rows of x, one behind the other.
            context_positions: int64 [R / k, C].
            mask: bool [R, S, C + S], which context states, then slots, each slot sees; None for all. Sliding windows
                and causal layers narrow it further, by position.
        """
        rotation = self._rotation(context_positions, context.dtype)
        attentions = self._attentions()
        shared = len(x) // len(context)

        def join(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            # Here, inside the layer's own pass: that is when a sharded layer's weights are there.
            injected = attentions[index].keys_values(context, rotation)
            before, values_before = (part.repeat_interleave(shared, 0) for part in injected)
            return torch.cat([before, keys], dim=2), torch.cat([values_before, values], dim=2)

        key_positions = torch.cat([context_positions.repeat_interleave(shared, 0), positions], dim=1)
        return self._run(x, positions, key_positions, mask, join)

    def inject(self, context: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Append the context's keys and values to the open window of a cache; context [R, n, H], positions [R, n]."""
        rotation = self._rotation(positions, context.dtype)
        for index, attention in enumerate(self._attentions()):
            cache.update(*attention.keys_values(context, rotation), index)

    def block(
        self, x: Tensor, positions: Tensor, cache: KVCache, key_positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Do as `forward`, for blocks whose context is in a cache with an open window of S columns for the slots.

        Args:
            x: [R, S, H].
            positions: int64 [R, S].
            key_positions: int64 [R, L], of the cache's columns; anything where the mask hides them.
            mask: bool [R, S, L], or None when every slot sees every column.
        """

        def join(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return cache.update(keys, values, index)

        return self._run(x, positions, key_positions, mask, join)

    def _attentions(self) -> list[Attention]:
        return [cast(Layer, layer).self_attn for layer in self.layers]

    def _run(
        self, x: Tensor, positions: Tensor, key_positions: Tensor, mask: Tensor | None, join: Join
    ) -> Tensor:
        rotation = self._rotation(positions, x.dtype)
        biases: dict[tuple[int | None, bool], Tensor | None] = {}
        for index, layer in enumerate(self.layers):
            kind = (self.config.window(index), self.config.is_causal(index))
            if kind not in biases:
                biases[kind] = _bias(mask, positions, key_positions, *kind, x.dtype)
            x = layer(x, rotation, biases[kind], lambda k, v, index=index: join(index, k, v))
        return x

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return cosines and sines [R, 1, n, D / 2] of positions [R, n]."""
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions[:, None, :, None].float() * self.config.rope_theta**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return [R, h, n, D] with rotary positions: dimension i turns with dimension i + D / 2."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _folded(bias: Tensor | None, fold: int) -> Tensor | None:
    return bias if bias is None or fold == 1 else bias.repeat(1, 1, fold, 1)


def _bias(
    mask: Tensor | None,
    positions: Tensor,
    key_positions: Tensor,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the additive mask [R, 1, S, L]: 0 where visible, -inf elsewhere; None when all is."""
    if causal or window is not None:
        ahead = key_positions[:, None, :] - positions[:, :, None]
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            seen &= ahead.abs() < window
        mask = seen if mask is None else mask & seen
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, float("-inf"))[:, None]
