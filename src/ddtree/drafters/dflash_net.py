"""The DFlash draft network: a few decoder layers that fill a block of masks, with target features as context.

Architecture of DFlash (arXiv 2602.06036): queries come from the block alone; keys and values come from the committed
tokens' projected target features and from the block, which sees itself whole. Parameter names are those of published
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.attention import Visibility
from ddtree.cache import KVCache

Rope = tuple[Tensor, Tensor]
Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a draft network and of the target it was made for; names as in published `config.json` files."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.heads, self.key_heads, self.size = config.num_attention_heads, config.num_key_value_heads, size
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.key_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.key_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, n, D] of x [R, n, hidden]; the context and the block share these weights."""
        shape = (*x.shape[:2], self.key_heads, self.size)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), rope)
        return keys.transpose(1, 2), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, rope: Rope, join: Join, visibility: Visibility) -> Tensor:
        rows, n, _ = x.shape
        queries = rotate(self.q_norm(self.q_proj(x).view(rows, n, self.heads, self.size)), rope)
        keys, values = join(*self.keys_values(x, rope))
        # Query heads that share a key head are folded into rows, as in the target's attention.
        fold = self.heads // self.key_heads
        queries = queries.transpose(1, 2).reshape(rows, self.key_heads, fold * n, self.size)
        bias = visibility.bias(None, fold)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        return self.o_proj(out.reshape(rows, self.heads, n, self.size).transpose(1, 2).reshape(rows, n, -1))


class MLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, join: Join, visibility: Visibility) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, join, visibility)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashNet(nn.Module):
    """Block embeddings and target features in, hidden states of the block's slots out; slot k >= 1 predicts the
    token at its own position. Embedding and head are the target's."""

    def __init__(self, config: DFlashConfig, target_hidden_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        width = len(config.target_layer_ids) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context(self, features: Tensor) -> Tensor:
        """Target features [..., F * H] of committed tokens -> context [..., hidden]."""
        return self.hidden_norm(self.fc(features))

    def forward(self, x: Tensor, positions: Tensor, c: Tensor, c_positions: Tensor, mask: Tensor) -> Tensor:
        """Any number of packed blocks over one context, in one pass (training).

        Args:
            x: block embeddings [R, S, hidden].
            positions: int64 [R, S], absolute.
            c: context [R, C, hidden].
            c_positions: int64 [R, C], absolute.
            mask: bool [R, S, C + S], which context tokens and block slots each slot sees.

        Returns:
            Final hidden states [R, S, hidden].
        """
        rope, c_rope = self._rope(positions, x.dtype), self._rope(c_positions, x.dtype)
        visibility = Visibility(mask, positions, positions, x.dtype)
        for layer in self.layers:
            own = layer.self_attn

            def join(keys: Tensor, values: Tensor, own: Attention = own) -> tuple[Tensor, Tensor]:
                c_keys, c_values = own.keys_values(c, c_rope)
                return torch.cat([c_keys, keys], dim=2), torch.cat([c_values, values], dim=2)

            x = layer(x, rope, join, visibility)
        return self.norm(x)

    def remember(self, cache: KVCache, row: int, features: Tensor) -> None:
        """Append the context keys and values of newly committed tokens, features [n, F * H], to a row."""
        n = len(features)
        start = cache.lengths[row]
        c = self.context(features[None])
        rope = self._rope(torch.arange(start, start + n, device=c.device)[None], c.dtype)
        cache.open(row, row + 1, n)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_values(c, rope), index)
        cache.advance()
        cache.commit([list(range(n))])

    def draft(self, cache: KVCache, x: Tensor) -> Tensor:
        """One pass over a block per row, x [R, S, hidden], behind the rows' remembered context; leaves no trace."""
        rows, size, _ = x.shape
        lengths = torch.tensor(cache.lengths, device=x.device)[:, None]
        positions = lengths + torch.arange(size, device=x.device)
        width = cache.open(0, rows, size)
        visible = None
        if rows > 1:
            visible = torch.arange(width, device=x.device) < lengths + size
            visible = visible[:, None].expand(rows, size, width)
        visibility = Visibility(visible, positions, positions, x.dtype)
        rope = self._rope(positions, x.dtype)
        for index, layer in enumerate(self.layers):

            def join(keys: Tensor, values: Tensor, index: int = index) -> tuple[Tensor, Tensor]:
                return cache.update(keys, values, index)

            x = layer(x, rope, join, visibility)
        cache.advance()
        cache.commit([[] for _ in range(rows)])
        return self.norm(x)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Cosines and sines [R, n, 1, D] of absolute positions."""
        size = self.config.head_dim
        powers = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        angles = positions[..., None].float() / self.config.rope_theta**powers
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [R, n, heads, D], halves paired."""
    cos, sin = rope
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
