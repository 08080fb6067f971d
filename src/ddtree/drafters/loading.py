"""Drafters by name: what the `drafter` argument and option accept."""

from __future__ import annotations

import json
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ddtree.demo import NAME as DEMO
from ddtree.demo import resolve_drafter
from ddtree.drafters import Drafter, parts_of
from ddtree.drafters import dflash as dflash_drafter
from ddtree.drafters.checkpoint import locate
from ddtree.drafters.draft_model import DraftModel
from ddtree.drafters.lookup import Lookup
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngrams import NgramTable
from ddtree.errors import CheckpointError, ConfigError
from ddtree.pretrained import load_causal_lm
from ddtree.target import Target

DRAFT_MODEL = "draft:"
NETWORK, TABLE = "dflash", "ngrams.safetensors"
"""What `ddtree train` puts into a drafter's folder: the checkpoint's folder and the n-gram table beside it."""

DrafterSpec = str | PathLike[str] | Drafter | None | list[Any] | tuple[Any, ...]


def load_drafter(spec: DrafterSpec, target: Target) -> Drafter | None:
    """The drafter that a name stands for.

    Args:
        spec: "none" (or None); "lookup", n-grams of the row's own text; "demo", the drafter that ships for the demo
            target; "draft:NAME", a causal LM with the target's vocabulary; a folder or hub id of a DFlash checkpoint
            or of what `ddtree train` exports (network and n-gram table, merged); a `Drafter`; or a list of these,
            merged into one tree under one budget.
        target: the model to draft for.

    Raises:
        CheckpointError: it cannot be read or does not fit the target; the message says why.
        ConfigError: it is nothing of the above.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, list | tuple):
        if any(isinstance(part, str) and part == "auto" for part in spec):
            raise ConfigError(
                f"drafter={list(spec)!r} cannot hold auto, which chooses by itself: give it alone, or name each drafter"
            )
        parts = [load_drafter(part, target) for part in spec]
        if not parts or None in parts:
            raise ConfigError(
                f"drafter={list(spec)!r} must hold drafters to merge: give at least one, and no none"
            )
        flat = [inner for part in parts for inner in parts_of(part)]
        return flat[0] if len(flat) == 1 else Merged(flat)
    if not isinstance(spec, str | PathLike):
        if all(hasattr(spec, name) for name in ("add_row", "drop_row", "observe", "draft")):
            return spec
        raise ConfigError(
            f"drafter={spec!r} is not a drafter: give lookup, draft:MODEL, none, a folder, a hub id, or a Drafter"
        )
    name = fspath(spec)
    if name == "lookup":
        return Lookup(vocab_size=target.vocab_size, device=target.device)
    if name.startswith(DRAFT_MODEL):
        return _draft_model(name.removeprefix(DRAFT_MODEL), target)
    return _from_folder(name, target)


def folder_of(spec: DrafterSpec) -> Path | None:
    """The folder that a drafter's name stands for; None for one that has none. Raises CheckpointError."""
    if not isinstance(spec, str | PathLike):
        return None
    name = fspath(spec)
    if name in ("none", "lookup") or name.startswith(DRAFT_MODEL):
        return None
    return locate(resolve_drafter(name))


def _draft_model(name: str, target: Target) -> Drafter:
    if not name:
        raise ConfigError("drafter='draft:' names no model: write draft:FOLDER or draft:HUB_ID")
    model, tokenizer = load_causal_lm(name, target.device, target.dtype)
    return DraftModel(Target(model, tokenizer), target)


def _from_folder(name: str, target: Target) -> Drafter:
    folder = locate(resolve_drafter(name))
    network, table = contents(folder)
    found: list[Drafter] = []
    if network is not None:
        refuse_language_model(name, network)
        found.append(dflash_drafter.load(network, target))
    if table is not None:
        grams = NgramTable.load(table)
        found.append(Lookup(grams, vocab_size=target.vocab_size, device=target.device))
    if not found:
        raise CheckpointError(
            f"{name} holds no drafter (neither config.json nor {NETWORK}/ nor {TABLE}): name a drafter's folder"
        )
    if name == DEMO and table is None:
        found.append(Lookup(vocab_size=target.vocab_size, device=target.device))
    return found[0] if len(found) == 1 else Merged(found)


def contents(folder: Path) -> tuple[Path | None, Path | None]:
    """The network's folder and the n-gram table's file in a drafter's folder, None for what is not there."""
    network = next((f for f in (folder, folder / NETWORK) if (f / "config.json").exists()), None)
    table = folder / TABLE
    return network, table if table.exists() else None


def refuse_language_model(name: str, folder: Path) -> None:
    """Raise CheckpointError when a folder holds a language model, which drafts under another name."""
    try:
        kinds = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return
    if any(str(kind).endswith("ForCausalLM") and "DFlash" not in str(kind) for kind in kinds):
        raise CheckpointError(
            f'{name} is a language model ({kinds[0]}), not a DFlash drafter: write drafter="{DRAFT_MODEL}{name}" to '
            "draft with it"
        )
