"""The target's features of whole texts: outputs of some of its layers, and what enters its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.storage import atomic_write
from ddtree.train.distributed import Group

_PASS_TOKENS = 65_536  # of one pass in training, padding included
_CPU_TEXT_TOKENS = 1024  # of one pass over whole texts: on a CPU what stays in its caches
_TEXT_TOKENS = 8192


class Teacher:
    """Runs the frozen target over padded batches of texts.

    Args:
        target: the target.
        layers: its feature layers, as in (1, 14, 27).
        group: the processes that compute features at the same time, each of its own texts.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], group: Group | None = None) -> None:
        self._target = target
        self._layers = layers
        self._group = group or Group()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return features [C, n, F + 1, H] of tokens int64 [C, n], on the target's device and in its dtype.

        The last of the F + 1 is what enters the target's head. Texts are padded at their end and attention is causal:
        padding changes nothing before it.
        """
        texts = tokens.split(max(1, _PASS_TOKENS // tokens.shape[1]))
        found = [self._pass(part) for part in texts]
        # Layers of a sharded target run in all processes or in none.
        passes = self._group.largest(len(texts)) if self._group.sharded else len(texts)
        for _ in range(len(texts), passes):
            self._pass(tokens[:1, :1])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pass(self, tokens: Tensor) -> Tensor:
        target, entering = self._target, []
        before = target.feature_layers
        target.use_features(self._layers)
        # The target computes logits of the last token only, so the head's own input would not be that of every token.
        decoder = target.model.get_decoder()
        hook = decoder.register_forward_hook(lambda _module, _inputs, output: entering.append(output[0]))
        try:
            depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            forward = target.extend(_PassCache(len(tokens)), tokens, depths, None, keep=1)
        finally:
            hook.remove()
            target.use_features(before)
        [hidden] = entering
        if forward.features is None:
            return hidden[:, :, None]
        layers = forward.features.unflatten(-1, (len(self._layers), -1))
        return torch.cat([layers, hidden[:, :, None]], dim=2)


class _PassCache(KVCache):
    """The cache of a single pass: nothing is read again, so it keeps nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__(0)
        self.lengths = [0] * rows

    def open(self, start: int, stop: int, columns: int, pending: int = 0) -> int:
        """Take the keys to be those of the pass alone."""
        return columns

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the pass's own keys and values."""
        return key, value


def teacher_pass(target: Target, texts: list[list[int]], layers: tuple[int, ...]) -> list[Tensor]:
    """Compute the target's features of whole texts: per text, bfloat16 [n, F + 1, H] on the CPU (see `Teacher`)."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    teacher = Teacher(target, layers)
    most = _CPU_TEXT_TOKENS if target.device.type == "cpu" else _TEXT_TOKENS
    while order:
        width = len(texts[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, most // width)))]
        padded = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, i in enumerate(batch):
            padded[row, : len(texts[i])] = torch.tensor(texts[i])
        features = teacher(padded.to(target.device)).to("cpu", torch.bfloat16)
        for row, i in enumerate(batch):
            # A copy, so that the pass's padding does not live as long as the text.
            found[i] = features[row, : len(texts[i])].clone()
    return found


def save_features(path: Path, features: Tensor) -> None:
    """Write features [n, F + 1, H] in one step, as int16 with the bits of bfloat16."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, features.to(torch.bfloat16).contiguous().view(torch.int16).numpy())


def load_features(bits: NDArray[np.int16]) -> Tensor:
    """Return what `save_features` wrote as bfloat16."""
    return torch.from_numpy(bits).view(torch.bfloat16)
