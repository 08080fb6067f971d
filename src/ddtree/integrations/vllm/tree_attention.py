"""Attention of draft trees over vLLM's paged keys and values, beside the stock kernel for all other rows.

A tree's nodes lie in consecutive slots of the cache, at positions by depth, and each sees the committed tokens and its
own ancestors. The stock CPU kernel takes no mask, so rows with trees are computed here, from one mask a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.v1.attention import selector
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm.request_state import StepRow
from ddtree.model.attention import uncommitted_columns, visible_keys
from ddtree.tree import ancestor_mask

_SPREAD = 2
"""Rows share a batch as long as the longest has at most so many times the blocks of the shortest."""


@dataclass(frozen=True)
class TreeBatch:
    """Rows with trees that are computed together: R rows, N nodes, C blocks, L keys.

    Attributes:
        places: int64 [R, N], each node's place among the step's tokens; a slice where there is one row. Padding repeats
            the root, whose result it repeats.
        blocks: int64 [R * C], blocks of the cache; a slice, which copies nothing, where those of a single row lie side
            by side.
        bias: float32 [R, 1, N, L], 0 for the keys that a node sees and -inf for others.
    """

    places: Tensor | slice
    blocks: Tensor | slice
    bias: Tensor


def batches(rows: Sequence[StepRow], block_table: Tensor, block_size: int) -> list[TreeBatch]:
    """Return the rows of a step in batches of about one length.

    Args:
        rows: with trees, at least one.
        block_table: int [requests, blocks].
        block_size: keys of a block, e.g. 32.
    """
    ordered = sorted(rows, key=lambda row: row.base + row.size)
    counts = [-(-(row.base + row.size) // block_size) for row in ordered]
    made, first = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or counts[place] > _SPREAD * counts[first]:
            made.append(_batch(ordered[first:place], counts[place - 1], block_table, block_size))
            first = place
    return made


def _batch(rows: Sequence[StepRow], blocks: int, block_table: Tensor, block_size: int) -> TreeBatch:
    widest = max(row.size for row in rows)
    places = torch.empty((len(rows), widest), dtype=torch.int64)
    bias = torch.full((len(rows), 1, widest, blocks * block_size), float("-inf"))
    for place, row in enumerate(rows):
        places[place] = row.start
        places[place, : row.size] += torch.arange(row.size)
        columns = uncommitted_columns([row.base], row.size, bias.device)
        visible = visible_keys(columns, ancestor_mask(row.tree), bias.shape[3])[0]
        bias[place, 0, : row.size].masked_fill_(visible, 0.0)
        bias[place, 0, row.size :].masked_fill_(visible[0], 0.0)
    table = block_table[[row.index for row in rows], :blocks].to(torch.int64)
    # Blocks beyond a shorter row's own are not seen, but they are read.
    used = torch.arange(blocks) * block_size < torch.tensor([[row.base + row.size] for row in rows])
    flat = torch.where(used, table, table[:, :1]).flatten()
    if len(rows) > 1:
        return TreeBatch(places, flat, bias)
    start, first = rows[0].start, int(flat[0])
    adjacent = torch.equal(flat, torch.arange(first, first + blocks))
    return TreeBatch(slice(start, start + widest), slice(first, first + blocks) if adjacent else flat, bias)


def keys_of(kv_cache: Tensor) -> Tensor:
    """Return a view of the keys in a layer's cache [blocks, Hkv, S, 2 * D], as they are stored: [blocks, Hkv, D, S]."""
    blocks, heads, size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, width // 2, size)[:, :, 0]


def values_of(kv_cache: Tensor) -> Tensor:
    """Return a view of the values in a layer's cache [blocks, Hkv, S, 2 * D]: [blocks, Hkv, S, D]."""
    blocks, heads, size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, size, width // 2)[:, :, 1]


def move(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy keys and values from slots to others, int64 [n] each, all read before any is written."""
    size = kv_cache.shape[2]
    (source, at), (target, to) = ((slots // size, slots % size) for slots in (sources, targets))
    keys, values = keys_of(kv_cache), values_of(kv_cache)
    keys[target, :, :, to] = keys[source, :, :, at]
    values[target, :, to] = values[source, :, at]


def attend(query: Tensor, kv_cache: Tensor, batch: TreeBatch, scale: float) -> Tensor:
    """Return the attention of a batch's nodes, summed in float32.

    Args:
        query: [tokens, Hq, D] of the whole step.
        kv_cache: of a layer, with the step's own keys and values written.
        batch: the rows.
        scale: of the scores, e.g. 0.125.

    Returns:
        [R, N, Hq, D], of the cache's dtype.
    """
    rows, _, nodes, _ = batch.bias.shape
    kept = kv_cache.shape[1]
    # The queries of all heads that share keys become rows of one matrix: [R, Hkv, G * N, D].
    own = query[batch.places].view(rows, nodes, kept, -1, query.shape[2]).permute(0, 2, 3, 1, 4)
    groups = own.shape[2]
    keys = keys_of(kv_cache)[batch.blocks].unflatten(0, (rows, -1)).permute(0, 2, 1, 4, 3)
    values = values_of(kv_cache)[batch.blocks].unflatten(0, (rows, -1)).transpose(1, 2)
    out = scaled_dot_product_attention(
        own.flatten(2, 3).float(),
        keys.flatten(2, 3).float(),
        values.flatten(2, 3).float(),
        attn_mask=batch.bias.repeat(1, 1, groups, 1),
        scale=scale,
    )
    return out.unflatten(2, (groups, nodes)).flatten(1, 2).transpose(1, 2).to(kv_cache.dtype)


@dataclass
class TreeMetadata(cpu_attn.CPUAttentionMetadata):
    """Stock metadata of a step, with its trees.

    Attributes:
        trees: rows with trees.
        others: whether there are rows for the stock kernel.
    """

    trees: Sequence[TreeBatch] = ()
    others: bool = True


class TreeMetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """Builds `TreeMetadata`, into which the runner puts the step's trees."""

    isa: str

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            # Tiles keep keys and values in another order than is read here.
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)

    def build(self, *args: Any, **kwargs: Any) -> TreeMetadata:
        """Return the stock metadata of a step, with room for its trees."""
        return TreeMetadata(**vars(super().build(*args, **kwargs)))


class TreeAttention(cpu_attn.CPUAttentionBackendImpl):
    """Attention by the stock kernel, except for rows with trees."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **scales: Any,
    ) -> Tensor:
        """Write the attention of all tokens into `output` and return it; shapes are vLLM's."""
        trees: Sequence[TreeBatch] = getattr(attn_metadata, "trees", ())
        if not trees or attn_metadata.others:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        for batch in trees:
            found = attend(query.view(-1, self.num_heads, self.head_size), kv_cache, batch, self.scale)
            output.view(-1, self.num_heads, self.head_size)[batch.places] = found
        return output


class TreeBackend(cpu_attn.CPUAttentionBackend):
    """Backend for the name CPU_ATTN, which vLLM's CPU platform always asks for."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttention]:
        """Return the class of the layers' attention."""
        return TreeAttention

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        """Return the class that builds a step's metadata."""
        return TreeMetadataBuilder


def register() -> None:
    """Let engines of this process use `TreeBackend` wherever vLLM would use its CPU attention."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{TreeBackend.__name__}")
    # An engine that was made here before may have left the stock one.
    selector._cached_get_attn_backend.cache_clear()


def check_layout(kv_cache: Tensor, isa: str) -> None:
    """Raise UnsupportedModelError unless the engine writes keys and values where they are read here.

    Args:
        kv_cache: of a layer; its shape and dtype are tried on a small cache of the same kind.
        isa: name of the layout that vLLM's kernels use, e.g. "vec".
    """
    _, heads, size, width = kv_cache.shape
    trial = torch.zeros((2, heads, size, width), dtype=kv_cache.dtype)
    slots = torch.tensor([1, size - 1, size, 2 * size - 2])
    written = torch.arange(len(slots) * heads * (width // 2)).view(len(slots), heads, -1) % 251 + 1
    key, value = written.to(kv_cache.dtype), -written.to(kv_cache.dtype)
    halves = trial.view(2, heads, 2 * size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key, value, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    found = keys_of(trial)[slots // size, :, :, slots % size]
    held = values_of(trial)[slots // size, :, slots % size]
    if not (torch.equal(found, key) and torch.equal(held, value)):
        raise UnsupportedModelError(
            f"vLLM's kernels keep keys and values of this model in an order ({isa}) that trees are not verified in: "
            "serve it with --drafting off, or with ddtree's own engine"
        )
