"""Keeps measured latency and learnt acceptance as readable JSON in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters import parts_of
from ddtree.errors import ConfigError
from ddtree.policy.acceptance import Acceptance
from ddtree.policy.controller import Policy
from ddtree.policy.latency import CUT_SHORT, LatencyTable
from ddtree.storage import cache_folder, write_json

Key = dict[str, Any]
"""Names a pair and a machine, in plain JSON values."""

ACCEPTANCE_FILE = "acceptance.json"
"""Its name in a drafter's folder."""
_ACCEPTANCE_FORMAT = 1
# Tokens of context; the time of longer ones is extrapolated. Reasoned: half measures no slope that attention shows;
# double measures contexts anew that differ by nothing that counts.
_LONGEST = 512
# Values of each weight, which tell networks of one shape apart. Reasoned: half would do too; double reads more.
_VALUES = 16
IDLE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})
"""Parts of a configuration that no forward pass depends on."""
_DAMAGED = (ConfigError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def key(target: Any, drafter: Any = None) -> Key:
    """Return the key of a `Target` with its drafter: the two, device, dtype, threads, release.

    `weights` tells networks of one shape apart. Time does not depend on it, so latency is kept without.
    """
    networks = {part.name: _networks(part) for part in parts_of(drafter)}
    sizes = {name: sum(w.numel() for net in own for w in net.parameters()) for name, own in networks.items()}
    every = [target.model, *(network for own in networks.values() for network in own)]
    weights = [weight for network in every for weight in network.parameters() if not weight.is_meta]
    config = {name: value for name, value in target.config.to_dict().items() if name not in IDLE}
    return {
        "target": target.config.model_type,
        "target_config": digest(config),
        "drafters": [f"{name} ({size:,} weights)" for name, size in sizes.items()],
        "weights": digest([_values(weight) for weight in weights]),
        "context": min(_LONGEST, target.max_context),
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "packed": target.packs,
        "compiled": target.compiles,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def latency_file(wanted: Key) -> Path:
    """Return the file of a key's latency table."""
    return cache_folder() / "latency" / f"{wanted['target']}-{digest(_timed(wanted))}.json"


def load(wanted: Key) -> LatencyTable | None:
    """Return the latency table saved for a key; None where there is none that can be used, so measure anew then."""
    try:
        values = json.loads(latency_file(wanted).read_text(encoding="utf-8"))
        table = LatencyTable.from_dict(values["model"])
        names = {part.rpartition(" (")[0] for part in wanted["drafters"]}
        return table if values["key"] == _timed(wanted) and names.issubset(table.draft_points) else None
    except (OSError, *_DAMAGED):
        return None


def save(wanted: Key, table: LatencyTable) -> Path:
    """Keep a latency table for a key; return its file. Raises ConfigError when it cannot be written."""
    file = latency_file(wanted)
    write_json(file, {"key": _timed(wanted), "model": table.as_dict()})
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
    return cache_folder() / "acceptance" / f"{wanted['target']}-{digest(pair)}.json"


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
            raise ConfigError(f"format {values['format']!r}, not {_ACCEPTANCE_FORMAT}")
        return {str(arm): Acceptance.from_list(rows) for arm, rows in values["arms"].items()}
    except _DAMAGED as error:
        raise ConfigError(f"{file} holds no acceptance counts ({error}): delete it") from error


def save_acceptance(file: Path, learnt: Mapping[str, Acceptance]) -> None:
    """Add what was learnt of each arm to what a file holds. Raises ConfigError when it cannot be written."""
    kept: dict[str, Acceptance] = {}
    with suppress(OSError, ConfigError):
        kept = load_acceptance(file)
    for arm in kept.keys() & learnt.keys():
        kept[arm].add(learnt[arm])
    arms = {arm: own.as_list() for arm, own in {**learnt, **kept}.items() if own.seen}
    write_json(file, {"format": _ACCEPTANCE_FORMAT, "arms": arms})


def recall_acceptance(wanted: Key, folder: Path | None) -> dict[str, Acceptance]:
    """Return what this user's runs have learnt of a pair, else what came with the drafter; skip damaged files."""
    for file in (acceptance_file(wanted), *([folder / ACCEPTANCE_FILE] if folder else [])):
        with suppress(OSError, ConfigError):
            return load_acceptance(file)
    return {}


def remember(policy: Policy, target: Any, drafter: Any) -> None:
    """Keep the acceptance that a policy has learnt of a pair for later runs, where it can be written."""
    with suppress(ConfigError):
        save_acceptance(acceptance_file(key(target, drafter)), policy.acceptance)


def device_name(device: torch.device) -> str:
    """Return the name of a processor or an accelerator, as its maker writes it where that can be found."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if named := re.search(r"^model name\s*:\s*(.+)", listed, re.MULTILINE):
            processor = named[1].strip()
    return processor if device.type == "cpu" else f"{device.type} of {processor}"


def _networks(drafter: Any) -> list[torch.nn.Module]:
    """Return the networks of a drafter, those of its backbone included."""
    held = [*vars(drafter).values(), *vars(getattr(drafter, "backbone", object)).values()]
    found = (value for own in held if isinstance(value := getattr(own, "model", own), torch.nn.Module))
    return list(dict.fromkeys(found))


def _values(weight: torch.Tensor) -> Any:
    """Return the first values of a weight; its size and kind where it holds none that can be read (quantized ones)."""
    try:
        return weight.detach().reshape(-1)[:_VALUES].float().tolist()
    except Exception:
        return [type(weight).__name__, *weight.shape]


def digest(values: Any) -> str:
    """Return a short name of JSON values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _timed(wanted: Key) -> Key:
    return {name: value for name, value in wanted.items() if name != "weights"}
