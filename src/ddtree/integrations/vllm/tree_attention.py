"""Attention of draft trees over the engine's paged keys and values, beside the stock kernel for all other rows.

A tree's nodes lie in consecutive slots of the cache, at positions by depth, and each sees the committed tokens and its
own ancestors. The stock CPU kernel takes no mask, so rows with trees are computed here, from one mask a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention import selector
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm.trees import Row

_SPREAD = 2
"""Rows share a batch as long as the longest has at most so many times the blocks of the shortest."""
_SCORES = 2**24
"""Scores held at once; more nodes times keys are computed a few heads at a time."""


@dataclass(frozen=True)
class Batch:
    """Rows with trees that are computed together: R of them, N nodes, C blocks of S keys.

    Attributes:
        places: int64 [R, N], each node's place among the step's tokens; the root's for padding. Of a single row, where
            they stand side by side, a slice.
        real: bool [R, N], which nodes are no padding; None where all are.
        blocks: int64 [R * C] of the cache; those of a single row that lie side by side as a slice, which copies none.
        bias: float32 [R, C, 1, 1, N, S], 0 for the keys that a node sees and -inf for others.
    """

    places: Tensor | slice
    real: Tensor | None
    blocks: Tensor | slice
    bias: Tensor


def batches(rows: Sequence[Row], block_table: Tensor, block_size: int) -> list[Batch]:
    """The rows of a step in batches of about one length.

    Args:
        rows: with trees.
        block_table: int [requests, blocks].
        block_size: keys of a block.
    """
    if not rows:
        return []
    ordered = sorted(rows, key=lambda row: row.base + len(row.nodes))
    counts = [-(-(row.base + len(row.nodes)) // block_size) for row in ordered]
    made, first = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or counts[place] > _SPREAD * counts[first]:
            made.append(_batch(ordered[first:place], counts[place - 1], block_table, block_size))
            first = place
    return made


def _batch(rows: Sequence[Row], blocks: int, block_table: Tensor, block_size: int) -> Batch:
    widest = max(len(row.nodes) for row in rows)
    places = torch.zeros((len(rows), widest), dtype=torch.int64)
    real = torch.zeros((len(rows), widest), dtype=torch.bool)
    hidden = torch.ones((len(rows), widest, blocks * block_size), dtype=torch.bool)
    for place, row in enumerate(rows):
        count = len(row.nodes)
        places[place] = row.start
        places[place, :count] += torch.arange(count)
        real[place, :count] = True
        hidden[place, :, : row.base + 1] = False
        hidden[place, :count, row.base : row.base + count] = ~torch.tensor(row.nodes.visible())
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    shaped = bias.view(len(rows), widest, blocks, block_size).transpose(1, 2)
    table = block_table[[row.index for row in rows], :blocks].to(torch.int64)
    # Blocks beyond a shorter row's own are not seen, but they are read.
    used = torch.arange(blocks) * block_size < torch.tensor([[row.base + len(row.nodes)] for row in rows])
    flat = torch.where(used, table, table[:, :1]).flatten()
    seen = shaped[:, :, None, None].contiguous()
    if len(rows) > 1:
        return Batch(places, None if bool(real.all()) else real, flat, seen)
    first = int(flat[0])
    adjacent = bool((flat == torch.arange(first, first + blocks)).all())
    start = rows[0].start
    return Batch(slice(start, start + widest), None, slice(first, first + blocks) if adjacent else flat, seen)


def keys_of(kv_cache: Tensor) -> Tensor:
    """Keys of a layer's cache [blocks, Hkv, S, 2 * D], as they lie there: [blocks, Hkv, D, S]."""
    blocks, heads, size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, width // 2, size)[:, :, 0]


def values_of(kv_cache: Tensor) -> Tensor:
    """Values of a layer's cache [blocks, Hkv, S, 2 * D]: [blocks, Hkv, S, D]."""
    blocks, heads, size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, size, width // 2)[:, :, 1]


def move(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy keys and values from slots to others, int64 [n] each, all read before any is written."""
    size = kv_cache.shape[2]
    (source, at), (target, to) = ((slots // size, slots % size) for slots in (sources, targets))
    keys, values = keys_of(kv_cache), values_of(kv_cache)
    keys[target, :, :, to] = keys[source, :, :, at]
    values[target, :, to] = values[source, :, at]


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Attention of a batch's nodes, summed in float32.

    Args:
        query: [tokens, Hq, D] of the whole step.
        kv_cache: of a layer, with the step's own keys and values written.
        batch: the rows.
        scale: of the scores.

    Returns:
        [R, N, Hq, D], of the cache's dtype.
    """
    rows, nodes = len(batch.bias), batch.bias.shape[4]
    heads, size = query.shape[1:]
    kept = kv_cache.shape[1]
    own = query[batch.places].view(rows, nodes, kept, heads // kept, size).float() * scale
    own = own.permute(0, 2, 3, 1, 4).reshape(rows, 1, kept, -1, size)
    keys = _gathered(keys_of(kv_cache), batch.blocks, rows)
    values = _gathered(values_of(kv_cache), batch.blocks, rows)
    step = max(1, _SCORES // max(1, batch.bias.numel() * (heads // kept)))
    parts = [
        _weighted(own[:, :, head : head + step], keys, values, batch.bias, slice(head, head + step))
        for head in range(0, kept, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.view(rows, heads, nodes, size).transpose(1, 2).to(kv_cache.dtype)


def place(output: Tensor, found: Tensor, batch: Batch) -> None:
    """Write what `attend` found into the output [tokens, Hq, D] of the whole step."""
    if isinstance(batch.places, slice):
        output[batch.places] = found[0]
    elif batch.real is None:
        output[batch.places] = found
    else:
        output[batch.places[batch.real]] = found[batch.real]


def _gathered(stored: Tensor, blocks: Tensor | slice, rows: int) -> Tensor:
    """[R, C, Hkv, ...]: the blocks of each row."""
    return stored[blocks].unflatten(0, (rows, -1))


def _weighted(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, heads: slice) -> Tensor:
    """[R, h, G * N, D] of queries [R, 1, h, G * N, D]: blocks are multiplied one by one and weighed together."""
    scores = query @ keys[:, :, heads].float()
    nodes = bias.shape[4]
    scores.unflatten(3, (-1, nodes)).add_(bias)
    weights = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()
    total = weights.sum(dim=(1, 4))[..., None]
    return (weights @ values[:, :, heads].float()).sum(dim=1) / total


@dataclass
class TreeMetadata(cpu_attn.CPUAttentionMetadata):
    """The stock metadata of a step, and what its trees need.

    Attributes:
        batches: rows with trees.
        others: whether there are rows for the stock kernel.
    """

    batches: Sequence[Batch] = ()
    others: bool = True


class TreeMetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """Makes `TreeMetadata`, into which the runner puts the step's trees."""

    isa: str

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            # Tiles keep keys and values in another order than is read here.
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)

    def build(self, *args: Any, **kwargs: Any) -> TreeMetadata:
        return TreeMetadata(**vars(super().build(*args, **kwargs)))


class TreeAttention(cpu_attn.CPUAttentionBackendImpl):
    """The stock attention, except for rows with trees."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        trees: Sequence[Batch] = getattr(attn_metadata, "batches", ())
        if not trees or attn_metadata.others:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        for batch in trees:
            found = attend(query.view(-1, self.num_heads, self.head_size), kv_cache, batch, self.scale)
            place(output.view(-1, self.num_heads, self.head_size), found, batch)
        return output


class TreeBackend(cpu_attn.CPUAttentionBackend):
    """The backend that the engine's platform asks for by the name CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttention]:
        return TreeAttention

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
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
        isa: how the engine's kernels lay blocks out.
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


def with_trees(metadata: TreeMetadata, rows: Sequence[Row], requests: int, block_size: int) -> TreeMetadata:
    """The metadata of a step of so many requests, whose rows with trees are given."""
    return replace(
        metadata,
        batches=batches(rows, metadata.block_table, block_size),
        others=len(rows) < requests,
    )
