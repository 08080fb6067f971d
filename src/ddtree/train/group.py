"""Training in several processes, one per device: each takes its share of the batches, and gradients are summed.

`torchrun` and `accelerate launch` both start the processes and say in the environment which one each is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn


class Group:
    """The processes of a training run; without a launcher, this one alone.

    Attributes:
        rank: this process's number.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def join(device: torch.device) -> Group:
        """Meet the other processes that the launcher started, if any."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Group(int(os.environ.get("RANK", "0")) if size > 1 else 0, size)

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each process's tensors by their sums over all processes."""
        if self.size > 1:
            together = list(tensors)
            flat = torch.cat([tensor.flatten() for tensor in together])
            distributed.all_reduce(flat)
            for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self, value: float, device: torch.device) -> float:
        """The main process's value, for all."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float32, device=device)
        distributed.broadcast(shared, 0)
        return float(shared)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()

    def leave(self) -> None:
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def local_device(name: str) -> str:
    """A device of its own for each process on a machine, when the launcher started several."""
    own = os.environ.get("LOCAL_RANK")
    return f"cuda:{own}" if name == "cuda" and own is not None else name


def gradients(net: nn.Module) -> list[Tensor]:
    """Gradients of all parameters; those without one get zeros, so that all processes have the same."""
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
