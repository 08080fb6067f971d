"""Measured latency models in the user's cache folder, as readable JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters import parts_of
from ddtree.errors import ConfigError
from ddtree.policy.latency import CUT_SHORT, LatencyModel
from ddtree.policy.machine import device_name
from ddtree.storage import cache_folder

Key = dict[str, Any]
"""What a measurement holds for: plain JSON values."""

_LONGEST = 512  # tokens of context; the time of longer ones is told from shorter ones
_VALUES = 16  # of each weight, by which networks of one shape are told apart

# Parts of a configuration that no forward pass depends on.
_IDLE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}


def key(target: Any, drafter: Any = None) -> Key:
    """What was learnt of a `Target` and its drafter holds for: the two, device, dtype, threads, release.

    `weights` tells networks of one shape apart. Time does not depend on it: latency models are kept without.
    """
    parts = parts_of(drafter)
    config = {name: value for name, value in target.config.to_dict().items() if name not in _IDLE}
    return {
        "target": target.config.model_type,
        "target_config": digest(config),
        "drafters": [f"{part.name} ({_size(part):,} weights)" for part in parts],
        "weights": _sample([target.model, *(network for part in parts for network in _networks(part))]),
        "context": min(_LONGEST, target.max_context),
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def path(wanted: Key) -> Path:
    """Where the model of a key is kept."""
    return cache_folder() / "latency" / f"{wanted['target']}-{digest(_timed(wanted))}.json"


def load(wanted: Key) -> LatencyModel | None:
    """The model saved for a key; None where there is none, or none that can be used: measure anew then."""
    try:
        values = json.loads(path(wanted).read_text(encoding="utf-8"))
        model = LatencyModel.from_dict(values["model"])
        names = [part.rpartition(" (")[0] for part in wanted["drafters"]]
        return model if values["key"] == _timed(wanted) and model.covers(names) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def save(wanted: Key, model: LatencyModel) -> Path:
    """Keep a model for a key; returns its file.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = path(wanted)
    write(file, {"key": _timed(wanted), "model": model.as_dict()})
    return file


def write(file: Path, values: Any) -> None:
    """Write JSON to a file, whole or not at all. Raises ConfigError when it cannot be written."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    partial = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Others may read, or write the same, at this moment.
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".partial")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(partial, 0o644)  # others may read what lies in a drafter's folder
        os.replace(partial, file)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise ConfigError(
            f"{file} cannot be written ({why}): name another file or free the folder"
        ) from error


def obtain(wanted: Key, measure: Callable[[], LatencyModel]) -> LatencyModel:
    """The model saved for a key, or else a measured one, saved for the next time where that can be done.

    One that was cut short by a slow or busy machine is not saved.
    """
    model = load(wanted)
    if model is None:
        model = measure()
        if not model.machine.get(CUT_SHORT):
            # Where nothing can be written it holds for this run all the same.
            with suppress(ConfigError):
                save(wanted, model)
    return model


def digest(values: Any) -> str:
    """A short name of JSON values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _size(drafter: Any) -> int:
    """Weights of a drafter's own networks."""
    return sum(weight.numel() for network in _networks(drafter) for weight in network.parameters())


def _networks(drafter: Any) -> list[torch.nn.Module]:
    held = [*vars(drafter).values(), *vars(getattr(drafter, "backbone", object)).values()]
    found = (value for own in held if isinstance(value := getattr(own, "model", own), torch.nn.Module))
    return list(dict.fromkeys(found))


def _sample(networks: list[torch.nn.Module]) -> str:
    """A short name of a few values of each weight."""
    weights = (weight for network in networks for weight in network.parameters() if not weight.is_meta)
    return digest([weight.detach().reshape(-1)[:_VALUES].float().tolist() for weight in weights])


def _timed(wanted: Key) -> Key:
    return {name: value for name, value in wanted.items() if name != "weights"}
