"""Keeps measured latency and learnt acceptance as readable JSON in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters import parts_of
from ddtree.errors import ConfigError
from ddtree.model.demo import cache_folder
from ddtree.policy.acceptance import Acceptance
from ddtree.policy.controller import Policy
from ddtree.policy.latency import CUT_SHORT, LatencyTable

Key = dict[str, Any]
"""Names a pair and a machine, in plain JSON values."""

ACCEPTANCE_FILE = "acceptance.json"
"""Its name in a drafter's folder."""
_ACCEPTANCE_FORMAT = 1
_LONGEST = 512  # tokens of context; the time of longer ones is extrapolated
_VALUES = 16  # of each weight, which tell networks of one shape apart
# Parts of a configuration that no forward pass depends on.
_IDLE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def key(target: Any, drafter: Any = None) -> Key:
    """Return the key of a `Target` with its drafter: the two, device, dtype, threads, release.

    `weights` tells networks of one shape apart. Time does not depend on it, so latency is kept without.
    """
    networks = [(part, _networks(part)) for part in parts_of(drafter)]
    sizes = [sum(weight.numel() for network in own for weight in network.parameters()) for _, own in networks]
    config = {name: value for name, value in target.config.to_dict().items() if name not in _IDLE}
    return {
        "target": target.config.model_type,
        "target_config": _digest(config),
        "drafters": [
            f"{part.name} ({size:,} weights)" for (part, _), size in zip(networks, sizes, strict=True)
        ],
        "weights": _sample([target.model, *(network for _, own in networks for network in own)]),
        "context": min(_LONGEST, target.max_context),
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def latency_file(wanted: Key) -> Path:
    """Return the file of a key's latency table."""
    return cache_folder() / "latency" / f"{wanted['target']}-{_digest(_timed(wanted))}.json"


def load(wanted: Key) -> LatencyTable | None:
    """Return the latency table saved for a key; None where there is none that can be used, so measure anew then."""
    try:
        values = json.loads(latency_file(wanted).read_text(encoding="utf-8"))
        table = LatencyTable.from_dict(values["model"])
        names = {part.rpartition(" (")[0] for part in wanted["drafters"]}
        return table if values["key"] == _timed(wanted) and names.issubset(table.draft_points) else None
    except (*_DAMAGED, ConfigError):
        return None


def save(wanted: Key, table: LatencyTable) -> Path:
    """Keep a latency table for a key; return its file. Raises ConfigError when it cannot be written."""
    file = latency_file(wanted)
    write(file, {"key": _timed(wanted), "model": table.as_dict()})
    return file


def obtain(wanted: Key, measure: Callable[[], LatencyTable]) -> LatencyTable:
    """Return the latency table saved for a key, or else a measured one, saved for the next time where possible.

    One that was cut short by a slow or busy machine is not saved.
    """
    if (table := load(wanted)) is None:
        table = measure()
        if not table.machine.get(CUT_SHORT):
            # Where nothing can be written it holds for this run all the same.
            with suppress(ConfigError):
                save(wanted, table)
    return table


def acceptance_file(wanted: Key) -> Path:
    """Return the file of a pair's acceptance in the user's cache; it does not depend on the machine."""
    pair = {name: wanted[name] for name in ("target", "target_config", "drafters", "weights")}
    return cache_folder() / "acceptance" / f"{wanted['target']}-{_digest(pair)}.json"


def load_acceptance(file: Path) -> dict[str, Acceptance]:
    """Return acceptance by arm.

    Raises:
        ConfigError: the file is damaged, or of another format.
        OSError: it cannot be read.
    """
    text = file.read_bytes()
    try:
        values = json.loads(text)
        if values["format"] != _ACCEPTANCE_FORMAT:
            raise ConfigError(f"{file} has format {values['format']!r}, not {_ACCEPTANCE_FORMAT}: delete it")
        return {str(arm): Acceptance.from_list(rows) for arm, rows in values["arms"].items()}
    except _DAMAGED as error:
        raise ConfigError(f"{file} holds no acceptance counts: delete it") from error


def save_acceptance(file: Path, learnt: Mapping[str, Acceptance]) -> None:
    """Add what was learnt of each arm to what a file holds. Raises ConfigError when it cannot be written."""
    kept: dict[str, Acceptance] = {}
    with suppress(OSError, ConfigError):
        kept = load_acceptance(file)
    for arm, own in learnt.items():
        if arm in kept:
            kept[arm].add(own)
        else:
            kept[arm] = own
    arms = {arm: own.as_list() for arm, own in kept.items() if own.seen}
    write(file, {"format": _ACCEPTANCE_FORMAT, "arms": arms})


def recall_acceptance(wanted: Key, folder: Path | None) -> dict[str, Acceptance]:
    """Return what this user's runs have learnt of a pair, else what came with the drafter; skip damaged files."""
    for file in (acceptance_file(wanted), folder / ACCEPTANCE_FILE if folder else None):
        if file is not None:
            with suppress(OSError, ConfigError):
                return load_acceptance(file)
    return {}


def remember(policy: Policy, target: Any, drafter: Any) -> None:
    """Keep the acceptance that a policy has learnt of a pair for later runs, where it can be written."""
    with suppress(ConfigError):
        save_acceptance(acceptance_file(key(target, drafter)), policy.acceptance)


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


def device_name(device: torch.device) -> str:
    """Return the name of a processor or an accelerator, as its maker writes it where that can be found."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            fields = (line.partition(":") for line in lines)
            processor = next(value.strip() for key, _, value in fields if key.strip() == "model name")
    except (OSError, StopIteration):
        processor = platform.processor()
    processor = processor or platform.machine()
    return processor if device.type == "cpu" else f"{device.type} of {processor}"


def _networks(drafter: Any) -> list[torch.nn.Module]:
    held = [*vars(drafter).values(), *vars(getattr(drafter, "backbone", object)).values()]
    found = (value for own in held if isinstance(value := getattr(own, "model", own), torch.nn.Module))
    return list(dict.fromkeys(found))


def _sample(networks: list[torch.nn.Module]) -> str:
    """Return a short name of a few values of each weight."""
    weights = (weight for network in networks for weight in network.parameters() if not weight.is_meta)
    return _digest([weight.detach().reshape(-1)[:_VALUES].float().tolist() for weight in weights])


def _digest(values: Any) -> str:
    """Return a short name of JSON values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _timed(wanted: Key) -> Key:
    return {name: value for name, value in wanted.items() if name != "weights"}
