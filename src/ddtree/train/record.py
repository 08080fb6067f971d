"""Taking from a target pass what a drafter is trained on."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.target import Target


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
