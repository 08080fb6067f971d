"""Verification passes recorded once per shape and replayed: a small forward on a GPU costs what its launches cost.

A CUDA graph replays the same kernels on the same memory. So the nodes of a round, their positions and what they see
are written into buffers of a padded shape, keys and values go to the columns that a tensor names, and attention runs
over a padded number of key columns, of which the unused are hidden. Shapes grow in steps, so that there are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ddtree.model.attention import Visibility, key_positions, uncommitted_columns, visible_keys
from ddtree.model.kv_cache import KVCache
from ddtree.tree import DraftTree, ancestor_mask

_FEWEST_KEYS = 256
_MOST_NODES = 512
"""Beyond so many nodes of all rows the arithmetic takes longer than the launches."""
_MOST_PASSES = 64

Run = Callable[[KVCache, Tensor, Tensor, Visibility], tuple[Tensor, Tensor | None]]


class _RecordedPass:
    """The buffers and the recording of one shape: R rows, N nodes, L key columns.

    Attributes:
        tokens: int64 [R, N].
        positions: int64 [R, N].
        columns: int64 [R, N], the key columns that the nodes' keys and values go to.
        visible: bool [R, N, L].
        key_positions: int64 [R, L].
        outputs: logits and features that a replay fills; None before the recording.
        graph: the recording; None before it is made, and where none can be.
    """

    def __init__(self, rows: int, nodes: int, keys: int, device: torch.device) -> None:
        zeros = torch.zeros((3, rows, nodes), dtype=torch.int64, device=device)
        self.tokens, self.positions, self.columns = zeros
        self.visible = torch.zeros((rows, nodes, keys), dtype=torch.bool, device=device)
        self.key_positions = torch.zeros((rows, keys), dtype=torch.int64, device=device)
        self.outputs: tuple[Tensor, Tensor | None] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, lengths: list[int], tree: DraftTree) -> None:
        """Write a round into the buffers. Nodes that pad it see themselves and the committed tokens."""
        nodes, (rows, padded, keys) = tree.tokens.shape[1], self.visible.shape
        device = tree.tokens.device
        uncommitted = torch.eye(padded, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        uncommitted[:, :nodes, :nodes] = ancestor_mask(tree)
        self.columns.copy_(uncommitted_columns(lengths, padded, device))
        self.tokens[:, :nodes] = tree.tokens
        self.positions[:] = self.columns[:, :1]
        self.positions[:, :nodes] += tree.depths
        self.visible.copy_(visible_keys(self.columns, uncommitted, keys))
        self.key_positions.copy_(key_positions(self.columns, self.positions, keys))


class CudaGraphs:
    """Verify trees in recorded passes.

    Args:
        run: one forward of (cache, tokens [R, N], positions [R, N], visibility): logits and features.
        dtype: the model's.
        record: record passes and replay them; False runs the same padded passes unrecorded, on any device.
    """

    def __init__(self, run: Run, dtype: torch.dtype, record: bool = True) -> None:
        self._run = run
        self._dtype = dtype
        self._record = record
        # By cache: the version of its buffers that the passes point into, and the passes by rows, nodes and keys.
        self._passes: WeakKeyDictionary[KVCache, tuple[int, dict[tuple[int, int, int], _RecordedPass]]]
        self._passes = WeakKeyDictionary()
        self._pool: Any = None

    def clear(self) -> None:
        """Drop all recordings, when other features are wanted of a pass."""
        self._passes.clear()

    def fits(self, cache: KVCache, tree: DraftTree) -> bool:
        """Return whether a recorded pass is worth while; it needs buffers, which the first committed token makes."""
        return tree.tokens.numel() <= _MOST_NODES and min(cache.lengths) > 0

    @torch.inference_mode()
    def verify(self, cache: KVCache, tree: DraftTree) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, n, V] and features [R, n, F * H] of all nodes; the next pass overwrites both."""
        rows, nodes = tree.tokens.shape
        padded = _padded(nodes)
        keys = max(_FEWEST_KEYS, 1 << (cache.open(0, rows, padded) - 1).bit_length())
        recorded = self._pass(cache, rows, padded, min(keys, cache.capacity), tree.tokens.device)
        recorded.fill(cache.lengths, tree)
        with cache.scattered(recorded.columns, recorded.visible.shape[2]):
            if recorded.outputs is not None and recorded.graph is not None:
                recorded.graph.replay()
                logits, features = recorded.outputs
            else:
                logits, features = self._forward(cache, recorded)
                if self._record:
                    self._make_graph(cache, recorded)
        return logits[:, :nodes], None if features is None else features[:, :nodes]

    def _pass(self, cache: KVCache, rows: int, nodes: int, keys: int, device: torch.device) -> _RecordedPass:
        """Return the pass of a shape, new or used before; the oldest goes when there are too many."""
        version, passes = self._passes.get(cache, (-1, {}))
        if version != cache.version:
            # The recordings point into buffers that are gone.
            passes = {}
            self._passes[cache] = (cache.version, passes)
        shape = (rows, nodes, keys)
        if shape not in passes:
            if len(passes) == _MOST_PASSES:
                del passes[next(iter(passes))]
            passes[shape] = _RecordedPass(*shape, device)
        return passes[shape]

    def _forward(self, cache: KVCache, recorded: _RecordedPass) -> tuple[Tensor, Tensor | None]:
        seen = Visibility(recorded.visible, recorded.positions, recorded.key_positions, self._dtype)
        return self._run(cache, recorded.tokens, recorded.positions, seen)

    def _make_graph(self, cache: KVCache, recorded: _RecordedPass) -> None:
        """Record a pass that has just run, so that everything it needs is loaded."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                recorded.outputs = self._forward(cache, recorded)
        except RuntimeError:
            # Models that look at values on the host (some mixtures of experts) cannot be recorded.
            self._record = False
            torch.cuda.synchronize()
            return
        recorded.graph = graph
        self._pool = graph.pool()


def _padded(nodes: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: padding adds less than half."""
    power = 1 << (nodes - 1).bit_length()
    return power * 3 // 4 if power >= 4 and nodes <= power * 3 // 4 else power
