"""Counts how often code reads a tensor's values on the host: on a GPU each time waits for the device."""

from collections import Counter
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_AWAITED = {
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.masked_select.default: "masked_select",
}
# Under inference mode these are not dispatched.
_METHODS = (
    "item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "tolist", "numpy", "__array__",
)  # fmt: skip


class HostReads(TorchDispatchMode):
    """Counts the reads inside a `with` block, by kind.

    Attributes:
        counts: "item", "float", "int", "bool", "tolist", "numpy", "nonzero" (also indexing with booleans), "equal",
            "copy" (between devices), ...
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def __enter__(self) -> Self:
        for name in _METHODS:
            self._patch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation that waits, and run it."""
        kwargs = kwargs or {}
        if op in _AWAITED:
            self.counts[_AWAITED[op]] += 1
        elif op in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            self.counts["nonzero"] += any(part is not None and part.dtype == torch.bool for part in args[1])
        elif op is torch.ops.aten._to_copy.default:
            self.counts["copy"] += kwargs.get("device", args[0].device).type != args[0].device.type
        return op(*args, **kwargs)

    def _counting(self, name: str, method: Any) -> Any:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.counts[name.strip("_")] += 1
            return method(tensor, *args, **kwargs)

        return counted
