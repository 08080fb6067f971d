"""The target's features of whole texts, computed when they are wanted."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.train.distributed import Group


class Recorder:
    """Keeps, while open, the outputs of some decoder layers and what enters the head, of every token of a pass.

    The target computes logits only for the tokens asked for, so what enters its head is taken at the decoder's end.
    """

    def __init__(self, target: Target, layers: tuple[int, ...]) -> None:
        decoder = target.model.get_decoder()
        self._modules = [*(decoder.layers[layer] for layer in layers), decoder]
        self._kept: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        self._hooks = [m.register_forward_hook(self._keep(i)) for i, m in enumerate(self._modules)]
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Tensor:
        """Of the last pass: [R, n, F + 1, H], the layers' outputs in order, then what enters the head."""
        return torch.stack([self._kept[i] for i in range(len(self._modules))], dim=2)

    def _keep(self, slot: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._kept[slot] = output if isinstance(output, Tensor) else output[0]

        return hook


_PASS_TOKENS = 65_536


class Teacher:
    """Runs the frozen target over padded batches of texts.

    Args:
        target: the target.
        layers: its feature layers.
        group: the processes that compute features at once, each of its own texts.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], group: Group | None = None) -> None:
        self._target = target
        self._layers = layers
        self._group = group or Group()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Features [C, n, F + 1, H] of tokens int64 [C, n], on the target's device and in its dtype.

        Texts are padded at their end and attention is causal: padding changes nothing before it.
        """
        rows = max(1, _PASS_TOKENS // tokens.shape[1])
        texts = tokens.split(rows)
        # Layers of a sharded target run in all processes or in none.
        most = self._group.most(len(texts), tokens.device) if self._group.sharded else len(texts)
        found = [self._pass(part) for part in texts]
        for _ in range(len(texts), most):
            self._pass(tokens[:1, :1])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pass(self, tokens: Tensor) -> Tensor:
        cache = _Unkept(len(tokens))
        depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with Recorder(self._target, self._layers) as recorder:
            self._target.extend(cache, tokens, depths, None, keep=1)
            return recorder.take()


class _Unkept(KVCache):
    """The cache of a single pass, after which nothing is read again."""

    def __init__(self, rows: int) -> None:
        super().__init__(0)
        self.lengths = [0] * rows

    def open(self, start: int, stop: int, columns: int, pending: int = 0) -> int:
        return columns

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value
