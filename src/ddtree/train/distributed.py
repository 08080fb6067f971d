"""Training in several processes, one per device: each takes its share of the batches, and gradients are summed.

`torchrun` and `accelerate launch` start the processes, and Hugging Face accelerate makes a group of them. With
`accelerate launch --use_fsdp`, or `--fsdp`, accelerate shards the target and the drafter over them as well (FSDP2).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.errors import ConfigError

_LONG = timedelta(days=30)  # the others wait while the main process fits the coupling or stores features
# All that the launcher's environment could say otherwise.
_FSDP: dict[str, Any] = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "reshard_after_forward": True,
    "cpu_offload": False,
    "cpu_ram_efficient_loading": False,
    "activation_checkpointing": False,
}


class Group:
    """The processes of a training run; without a launcher, this one alone.

    Args:
        accelerator: an `accelerate.Accelerator`, or None for a single process.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes, as in 8.
        sharded: True if each process holds a part of every weight only.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self.rank: int = accelerator.process_index if accelerator else 0
        self.size: int = accelerator.num_processes if accelerator else 1
        self.sharded = bool(accelerator and accelerator.is_fsdp2)
        self._accelerator = accelerator

    @classmethod
    def join(cls, device: torch.device, fsdp: bool = False) -> Group:
        """Meet the processes that the launcher started; alone without a launcher.

        Args:
            device: device of this process.
            fsdp: shard weights, see `wants_fsdp`.

        Raises:
            ConfigError: there are several processes, and accelerate is not installed.
        """
        if launched() == 1:
            return cls()
        if find_spec("accelerate") is None:
            raise ConfigError("training in several processes needs accelerate: pip install 'ddtree[train]'")
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

        plugin = None
        if fsdp:
            plugin = FullyShardedDataParallelPlugin(**_FSDP)
        handlers = [InitProcessGroupKwargs(timeout=_LONG)]
        cpu = device.type == "cpu"
        return cls(Accelerator(cpu=cpu, mixed_precision="no", fsdp_plugin=plugin, kwargs_handlers=handlers))

    @property
    def main(self) -> bool:
        """True in the process that writes files and reports."""
        return self.rank == 0

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each process's tensors, on one device, by their sums over all processes."""
        if self.size > 1:
            together = list(tensors)
            flat = self._accelerator.reduce(torch.cat([tensor.flatten() for tensor in together]), "sum")
            for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def from_main(self, value: Any) -> Any:
        """Return the main process's value in all processes."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def largest(self, value: int) -> int:
        """Return the largest value of a process in all processes."""
        if self.size == 1:
            return value
        from accelerate.utils import gather_object

        return int(max(gather_object([value])))

    def shard(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Shard a module and its optimizer in place; those of `module._no_split_modules` are gathered one by one."""
        self._gather_one_by_one(module)
        self._accelerator.prepare(module, optimizer)

    def shard_target(self, model: Any, device: torch.device) -> None:
        """Freeze a causal LM and shard its decoder in place.

        Embedding and head stay whole, on `device`, since drafters use them by themselves.
        """
        from accelerate.utils import fsdp2_prepare_model

        decoder = model.get_decoder()
        model.requires_grad_(False)
        whole = [model.get_input_embeddings(), model.get_output_embeddings()]
        self._accelerator.state.fsdp_plugin.ignored_modules = whole
        self._gather_one_by_one(decoder)
        fsdp2_prepare_model(self._accelerator, decoder)
        for module in whole:
            module.to(device)

    def _gather_one_by_one(self, module: Any) -> None:
        # Accelerate keeps the layers of the first module that it sees for all later ones.
        plugin = self._accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = list(module._no_split_modules)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            self._accelerator.wait_for_everyone()

    def leave(self) -> None:
        """End the group, once in each process."""
        if self.size > 1:
            self._accelerator.end_training()


def launched() -> int:
    """Return how many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wants_fsdp(option: bool, device: torch.device) -> bool:
    """Return whether to shard weights: by the option, or by `accelerate launch --use_fsdp`.

    Raises:
        ConfigError: there are no several GPUs to shard over.
    """
    wanted = option or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if wanted and (launched() == 1 or device.type != "cuda"):
        raise ConfigError(
            f"FSDP shards over processes on GPUs, here is {launched()} on {device.type}: start several with torchrun "
            "or accelerate launch, or leave --fsdp out"
        )
    return wanted


def local_device(name: str) -> str:
    """Return "cuda:N" for "cuda" in the N-th process of a machine, as the launcher numbers them; else the name."""
    own = os.environ.get("LOCAL_RANK")
    return f"cuda:{own}" if name == "cuda" and own is not None else name


def gradients(net: nn.Module) -> list[Tensor]:
    """Return the gradients of all trainable parameters, zeros for those without: all processes have the same."""
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
