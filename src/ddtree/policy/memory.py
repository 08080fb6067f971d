"""What was learnt of a drafter's acceptance, kept as JSON: in the user's cache, or with the drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ddtree.errors import ConfigError
from ddtree.policy import store
from ddtree.policy.acceptance import Acceptance

FILE = "acceptance.json"
"""Its name in a drafter's folder."""
_FORMAT = 1


def load(file: Path) -> dict[str, Acceptance]:
    """Acceptance by arm.

    Raises:
        ConfigError: the file is damaged, or of another format.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ConfigError(f"{file} has format {values['format']!r}, not {_FORMAT}: delete it")
        return {str(arm): Acceptance.from_list(rows) for arm, rows in values["arms"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{file} holds no acceptance counts: delete it") from error


def save(file: Path, acceptance: Mapping[str, Acceptance]) -> None:
    """Add what was learnt of each arm to what a file holds. Raises ConfigError when it cannot be written."""
    try:
        kept = load(file)
    except (OSError, ConfigError):
        kept = {}
    for arm, own in acceptance.items():
        if arm in kept:
            kept[arm].add(own)
        else:
            kept[arm] = own
    arms = {arm: own.as_list() for arm, own in kept.items() if own.seen}
    store.write(file, {"format": _FORMAT, "arms": arms})


def cached(wanted: store.Key) -> Path:
    """The file of a pair in the user's cache; acceptance does not depend on the machine."""
    pair = {name: wanted[name] for name in ("target", "target_config", "drafters", "weights")}
    return store.cache_folder() / "acceptance" / f"{wanted['target']}-{store.digest(pair)}.json"


def recall(wanted: store.Key, folder: Path | None) -> dict[str, Acceptance]:
    """What this user's runs have learnt of a pair, else what came with the drafter; damaged files are passed over."""
    for file in (cached(wanted), folder / FILE if folder else None):
        if file is not None:
            try:
                return load(file)
            except (OSError, ConfigError):
                continue
    return {}
