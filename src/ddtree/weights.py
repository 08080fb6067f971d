"""Whether a checkpoint's weight files hold what its model needs, told from names and shapes alone."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ddtree.compat import places_in_model
from ddtree.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
_AGAIN = "download the checkpoint again"
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def weight_files(name: str, folder: Path) -> list[Path]:
    """The files that transformers would load.

    Raises:
        CheckpointError: there are none, or the index names one that is not there.
    """
    first = next((folder / file for file in _FILES if (folder / file).exists()), None)
    if first is None:
        raise CheckpointError(f"{name} has no weights (model.safetensors): {_AGAIN}")
    if first.suffix != ".json":
        return [first]
    try:
        files = sorted({folder / str(file) for file in json.loads(first.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} is damaged ({type(error).__name__}): {_AGAIN}") from error
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing, and {first.name} names it: {_AGAIN}")
    return files


def read_shapes(file: Path) -> Shapes:
    """Names and shapes of a file's tensors, without their values. Raises CheckpointError for a damaged file."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in found.items()}
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{file} is damaged ({line}): {_AGAIN}") from error


def check_weights(name: str, model: Any, found: Shapes) -> None:
    """Compare tensors with those that a model without values needs.

    Raises:
        CheckpointError: some are missing or have another shape; the message names the first of them.
    """
    needed = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    places_of = places_in_model(model)
    there: set[str] = set()
    for key, shape in found.items():
        places, whole = places_of(key)
        there |= places
        for place in places & needed.keys():
            # What is cut or joined on the way has a shape of its own in the file.
            if whole and needed[place] != shape:
                wanted = list(needed[place])
                raise CheckpointError(
                    f"{name} is damaged: {key} has shape {list(shape)}, and by config.json {wanted}: {_AGAIN}"
                )
    missing = _without_ties(model, needed.keys() - there, there)
    if missing:
        raise CheckpointError(
            f"{name} is incomplete: {len(missing)} tensors are missing ({missing[0]}, ...): {_AGAIN}"
        )


def _without_ties(model: Any, missing: set[str], there: set[str]) -> list[str]:
    """The missing names that are no other name of a tensor which is there, and that the model does not do without."""
    spared = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    same: dict[int, set[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), set()).add(key)
    tied = {key for keys in same.values() if keys & there for key in keys}
    return sorted(key for key in missing - tied if not any(re.search(pattern, key) for pattern in spared))
