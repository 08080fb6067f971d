"""Sharding (FSDP2): each process holds its part of every weight, and whole layers only while they run.

A layer is put together by all processes at once, so they must run a sharded module equally often. Where the main
process works alone, the others run the target along with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddtree.errors import UnsupportedModelError
from ddtree.model.target import Target, decoder_layers
from ddtree.train.distributed import Group
from ddtree.train.features import Teacher


def shard(
    module: nn.Module, layers: Iterable[nn.Module], device: torch.device, kept: Iterable[nn.Parameter] = ()
) -> None:
    """Shard a module in place, layer by layer; gradients become sums over the processes.

    Args:
        module: on any device; no more than a layer at a time is whole on `device`.
        layers: modules in it that are put together one after the other; the rest is when `module` runs.
        device: of this process.
        kept: parameters that stay whole and where they are.
    """
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    ignored = set(kept)
    for part in (*layers, module):
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        sharded.set_gradient_divide_factor(1.0)
        # Gloo has sums only.
        sharded.set_force_sum_reduction_for_comms(True)


def shard_target(model: Any, device: torch.device) -> None:
    """Freeze a causal LM and shard its decoder layers; what a drafter borrows (embedding, norm, head) stays whole.

    Raises:
        UnsupportedModelError: a layer has weights of several dtypes, which cannot be sharded together.
    """
    layers = decoder_layers(model)
    for layer in layers:
        dtypes = {parameter.dtype for parameter in layer.parameters()}
        if len(dtypes) > 1:
            raise UnsupportedModelError(
                f"a layer of {type(model).__name__} has weights of several dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}), which --fsdp cannot shard: give one with --dtype"
            )
    model.requires_grad_(False)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    kept = [parameter for parameter in model.parameters() if parameter not in inside]
    shard(model.get_decoder(), layers, device, kept)
    model.to(device)


def whole(value: Any, keep: bool = True) -> Any:
    """A nested state with its sharded tensors put together on the CPU. All processes have to ask for it at once.

    Args:
        value: tensors in dicts and lists; what is not sharded stays as it is.
        keep: whether this process wants them; if not, it gets empty tensors in their place.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, dict):
        return {name: whole(part, keep) for name, part in value.items()}
    return [whole(part, keep) for part in value] if isinstance(value, list) else value


def parts(value: Any, own: Any) -> Any:
    """The reverse of `whole`: this process's parts of a nested state, sharded as `own`, which is nested alike."""
    if isinstance(own, DTensor):
        return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    if isinstance(value, dict):
        return {name: parts(part, own[name]) for name, part in value.items()}
    return [*map(parts, value, own)] if isinstance(value, list) else value


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


@contextmanager
def alone(group: Group, target: Target | None) -> Iterator[bool]:
    """Have the main process work alone inside the block, with the target if it likes.

    Yields:
        Whether this is the main process. The others come here when the main one has left the block if the target is
        sharded, and at once otherwise.
    """
    if not group.sharded or target is None:
        yield group.main
    elif group.main:
        hook = target.model.get_decoder().register_forward_pre_hook(lambda *_: _tell(group, target, True))
        try:
            yield True
        finally:
            hook.remove()
            _tell(group, target, False)
    else:
        teacher, token = Teacher(target, ()), torch.zeros((1, 1), dtype=torch.int64, device=target.device)
        while group.agree(0.0, target.device):
            teacher(token)
        yield False


def _tell(group: Group, target: Target, running: bool) -> None:
    """Tell the other processes whether the target runs once more."""
    group.agree(float(running), target.device)
