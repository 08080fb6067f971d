"""Verification passes recorded once per shape and replayed: a small forward on a GPU costs what its launches cost.

A CUDA graph replays the same kernels on the same memory. So the nodes of a round, their positions and what they see
are written into buffers of a padded shape, keys and values go to the columns that a tensor names, and attention runs
over a padded number of key columns, of which the unused are hidden. Shapes grow in steps, so there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ddtree.model.attention import Visibility, key_positions, uncommitted_columns, visible_keys
from ddtree.model.kv_cache import KVCache
from ddtree.tree import DraftTree, ancestor_mask

_FEWEST_KEYS = 256
_MOST_NODES = 512  # beyond them the arithmetic takes longer than the launches
_MOST_SHAPES = 64

Run = Callable[[KVCache, Tensor, Tensor, Visibility], tuple[Tensor, Tensor | None]]


@dataclass
class _Shape:
    """The buffers of one shape: R rows, N nodes, L key columns.

    Attributes:
        tokens, positions, columns: int64 [R, N].
        visible: bool [R, N, L].
        key_positions: int64 [R, L].
        outputs: logits and features that a replay fills; None before the recording.
    """

    tokens: Tensor
    positions: Tensor
    columns: Tensor
    visible: Tensor
    key_positions: Tensor
    outputs: tuple[Tensor, Tensor | None] | None = None
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """Verification in recorded passes.

    Args:
        run: one forward of (cache, tokens [R, N], positions [R, N], visibility): logits and features.
        dtype: the model's.
        record: replay recordings; False runs the same padded passes without recording, on any device.
    """

    def __init__(self, run: Run, dtype: torch.dtype, record: bool = True) -> None:
        self._run = run
        self._dtype = dtype
        self._record = record
        self._shapes: WeakKeyDictionary[KVCache, tuple[int, dict[tuple[int, int, int], _Shape]]]
        self._shapes = WeakKeyDictionary()
        self._pool: Any = None

    def forget(self) -> None:
        """Drop all recordings: what a pass gives has changed."""
        self._shapes.clear()

    def fits(self, cache: KVCache, tree: DraftTree) -> bool:
        """Whether a recorded pass is worth while; without one committed token there are no buffers yet."""
        return tree.tokens.numel() <= _MOST_NODES and min(cache.lengths) > 0

    @torch.inference_mode()
    def verify(self, cache: KVCache, tree: DraftTree) -> tuple[Tensor, Tensor | None]:
        """Logits [R, n, V] and features [R, n, F * H] of all nodes; both are overwritten by the next pass."""
        rows, nodes = tree.tokens.shape
        padded = _step(nodes)
        keys = max(_FEWEST_KEYS, 1 << (cache.open(0, rows, padded) - 1).bit_length())
        shape = self._shape(cache, rows, padded, min(keys, cache.capacity), tree.tokens.device)
        _fill(shape, cache.lengths, tree)
        with cache.scattered(shape.columns, shape.visible.shape[2]):
            logits, features = self._outputs(cache, shape)
        return logits[:, :nodes], None if features is None else features[:, :nodes]

    def _outputs(self, cache: KVCache, shape: _Shape) -> tuple[Tensor, Tensor | None]:
        if shape.graph is not None:
            shape.graph.replay()
            assert shape.outputs is not None
            return shape.outputs
        outputs = self._pass(cache, shape)
        if self._record:
            self._make_graph(cache, shape)
        return outputs

    def _pass(self, cache: KVCache, shape: _Shape) -> tuple[Tensor, Tensor | None]:
        visibility = Visibility(shape.visible, shape.positions, shape.key_positions, self._dtype)
        return self._run(cache, shape.tokens, shape.positions, visibility)

    def _make_graph(self, cache: KVCache, shape: _Shape) -> None:
        """Record a pass that has just run (so that everything it needs is loaded)."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                shape.outputs = self._pass(cache, shape)
        except RuntimeError:
            # Models that look at values on the host (some mixtures of experts) cannot be recorded.
            self._record = False
            torch.cuda.synchronize()
            return
        shape.graph = graph
        self._pool = graph.pool()

    def _shape(self, cache: KVCache, rows: int, nodes: int, keys: int, device: torch.device) -> _Shape:
        version, shapes = self._shapes.get(cache, (-1, {}))
        if version != cache.version:
            # The recordings point into buffers that are gone.
            shapes = {}
            self._shapes[cache] = (cache.version, shapes)
        key = (rows, nodes, keys)
        if key not in shapes:
            if len(shapes) == _MOST_SHAPES:
                del shapes[next(iter(shapes))]
            tokens, positions, columns = torch.zeros((3, rows, nodes), dtype=torch.int64, device=device)
            visible = torch.zeros((rows, nodes, keys), dtype=torch.bool, device=device)
            key_positions = torch.zeros((rows, keys), dtype=torch.int64, device=device)
            shapes[key] = _Shape(tokens, positions, columns, visible, key_positions)
        return shapes[key]


def _step(nodes: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: padding costs less than half."""
    power = 1 << (nodes - 1).bit_length()
    return power * 3 // 4 if power >= 4 and nodes <= power * 3 // 4 else power


def _fill(shape: _Shape, lengths: list[int], tree: DraftTree) -> None:
    """Write a round into a shape's buffers. Nodes that pad it see themselves and the committed tokens."""
    nodes, (rows, padded, keys) = tree.tokens.shape[1], shape.visible.shape
    device = tree.tokens.device
    uncommitted = torch.eye(padded, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    uncommitted[:, :nodes, :nodes] = ancestor_mask(tree)
    shape.columns.copy_(uncommitted_columns(lengths, padded, device))
    shape.tokens[:, :nodes] = tree.tokens
    shape.positions[:] = shape.columns[:, :1]
    shape.positions[:, :nodes] += tree.depths
    shape.visible.copy_(visible_keys(shape.columns, uncommitted, keys))
    shape.key_positions.copy_(key_positions(shape.columns, shape.positions, keys))
