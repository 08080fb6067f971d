"""Training in several processes, one per device: each takes its share of the batches, and gradients are summed.

`torchrun` and `accelerate launch` both start the processes and say in the environment which one each is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn

from ddtree.errors import ConfigError

_LONG = timedelta(days=30)  # some wait while the main process works alone
# What accelerate's launcher may say of FSDP, where other values would be something else than what happens here.
_LAUNCHER = {
    "FSDP_SHARDING_STRATEGY": ("full_shard", "1"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "full_shard"),
    "FSDP_OFFLOAD_PARAMS": ("false",),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false",),
}


class Group:
    """The processes of a training run; without a launcher, this one alone.

    Attributes:
        rank: this process's number.
        size: how many there are.
        sharded: whether each holds a part of the weights only.
    """

    def __init__(self, rank: int = 0, size: int = 1, sharded: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sharded = sharded

    @staticmethod
    def join(device: torch.device, sharded: bool = False) -> Group:
        """Meet the other processes that the launcher started, if any."""
        size = launched()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        if size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_LONG)
        return Group(int(os.environ.get("RANK", "0")) if size > 1 else 0, size, sharded)

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

    def most(self, value: int, device: torch.device) -> int:
        """The largest value of a process, for all."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, device=device)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return int(shared)

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


def launched() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def fsdp_asked(option: bool, device: torch.device) -> bool:
    """Whether weights shall be sharded: by the option, or by `accelerate launch --use_fsdp`.

    Raises:
        ConfigError: there is nothing to shard over, or the launcher asks for a kind of sharding that there is not.
    """
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    for name, accepted in _LAUNCHER.items() if by_launcher else ():
        value = os.environ.get(name, accepted[0]).lower()
        if value not in accepted:
            raise ConfigError(
                f"accelerate's launcher says {name}={value}, and only {accepted[0]} is supported: change its "
                "configuration, or launch without FSDP and give --fsdp"
            )
    asked = option or by_launcher
    if asked and (launched() == 1 or device.type not in ("cuda", "cpu")):
        raise ConfigError(
            f"FSDP shards over processes on GPUs or CPUs, here is {launched()} on {device.type}: start several with "
            "torchrun or accelerate launch, or leave --fsdp out"
        )
    return asked


def gradients(net: nn.Module) -> list[Tensor]:
    """Gradients of all parameters; those without one get zeros, so that all processes have the same."""
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
