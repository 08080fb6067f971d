"""Drafters by name: what the `drafter` argument and option accept."""

from __future__ import annotations

import json
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ddtree.drafters import Drafter, parts_of
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.checkpoint import DFlashCheckpoint, locate
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.drafter import DFlash, backbone_of
from ddtree.drafters.dflash.files import is_head, misfits, read_head
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.heads import Domino as DominoHead
from ddtree.drafters.dflash.heads import Head
from ddtree.drafters.draft_model import DraftModel
from ddtree.drafters.merged import Merged
from ddtree.drafters.mixed import Continuity
from ddtree.drafters.ngram import Lookup
from ddtree.drafters.ngram_table import NgramTable
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.demo import NAME as DEMO
from ddtree.model.demo import resolve_drafter
from ddtree.model.pretrained import load_causal_lm
from ddtree.model.target import Target

DRAFT_MODEL = "draft:"
NETWORK, TABLE = "dflash", "ngrams.safetensors"
"""What `ddtree train` puts into a drafter's folder: the checkpoint's folder and the n-gram table beside it. Heads lie
beside them, each in a folder of its own."""
NGRAMS = "ngrams"
"""How the table is called as a part of such a folder."""
SECOND_PASS = "d2sd"
"""A way to draft with the network of such a folder, named like a part."""

DrafterSpec = str | PathLike[str] | Drafter | None | list[Any] | tuple[Any, ...]


def load_drafter(spec: DrafterSpec, target: Target) -> Drafter | None:
    """The drafter that a name stands for.

    Args:
        spec: "none" (or None); "lookup", n-grams of the row's own text; "demo", the drafter that ships for the demo
            target; "draft:NAME", a causal LM with the target's vocabulary; a folder or hub id of a checkpoint
            (DFlash's or a successor's with a head known here) or of what `ddtree train` exports (network and n-gram
            table, mixed); one part of that, after a slash ("demo/treeflash": that head alone on its network,
            "demo/dflash": the network alone, "demo/d2sd": the network in two passes, "demo/ngrams": the table
            alone); a `Drafter`; or a list of these, merged into one tree under one budget.
        target: the model to draft for.

    Raises:
        CheckpointError: it cannot be read or does not fit the target; the message says why.
        ConfigError: it is nothing of the above.
    """
    return _load(spec, target, {})


def _load(spec: DrafterSpec, target: Target, read: dict[Path, DFlashCheckpoint]) -> Drafter | None:
    """As `load_drafter`; checkpoints that were read for other parts of a list are in `read`: they share weights."""
    if spec is None or spec == "none":
        return None
    if isinstance(spec, list | tuple):
        if any(isinstance(part, str) and part == "auto" for part in spec):
            raise ConfigError(
                f"drafter={list(spec)!r} cannot hold auto, which chooses by itself: give it alone, or name each drafter"
            )
        parts = [_load(part, target, read) for part in spec]
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
    return _from_folder(name, target, read)


def folder_of(spec: DrafterSpec) -> Path | None:
    """The folder that a drafter's name stands for; None for one that has none. Raises CheckpointError."""
    if not isinstance(spec, str | PathLike):
        return None
    name = fspath(spec)
    if name in ("none", "lookup") or name.startswith(DRAFT_MODEL):
        return None
    place = find(_second_pass(name) or name)
    return place if place.is_dir() else None


def find(name: str) -> Path:
    """The folder of a drafter or of a part of one, or the file of its n-gram table. Raises CheckpointError."""
    text = resolve_drafter(name)
    path = Path(text).expanduser()
    if path.exists() or not path.name:
        return locate(text)
    whole = path.parent
    if not whole.is_dir():
        if text.count("/") != 2 or text.startswith((".", "/", "~")):
            return locate(text)
        whole = locate(text.rpartition("/")[0])
    place = whole / (TABLE if path.name == NGRAMS else path.name)
    if place.exists():
        return place
    if not (whole / NETWORK).is_dir() and not (whole / TABLE).exists():
        return locate(text)
    parts = sorted(part.name for part in whole.iterdir() if (part / "config.json").exists())
    parts += [NGRAMS] * (whole / TABLE).exists()
    raise CheckpointError(f"{whole} has no part {path.name}: it holds {', '.join(parts)}")


def _draft_model(name: str, target: Target) -> Drafter:
    if not name:
        raise ConfigError("drafter='draft:' names no model: write draft:FOLDER or draft:HUB_ID")
    model, tokenizer = load_causal_lm(name, target.device, target.dtype)
    return DraftModel(Target(model, tokenizer), target)


def _from_folder(name: str, target: Target, read: dict[Path, DFlashCheckpoint]) -> Drafter:
    if whole := _second_pass(name):
        return _twice(whole, target, read)
    place = find(name)
    network, table = contents(place)
    drafter: Drafter | None = None
    grams: Lookup | None = None
    if network is not None:
        refuse_language_model(name, network)
        drafter = _on_head(network, target, read) if is_head(network) else _network(network, target, read)
    if table is not None:
        grams = Lookup(NgramTable.load(table), vocab_size=target.vocab_size, device=target.device)
    elif name == DEMO:
        grams = Lookup(vocab_size=target.vocab_size, device=target.device)
    if drafter is not None and grams is not None:
        return Continuity(drafter, grams)
    found = drafter or grams
    if found is None:
        raise CheckpointError(
            f"{name} holds no drafter (neither config.json nor {NETWORK}/ nor {TABLE}): name a drafter's folder"
        )
    return found


def _second_pass(name: str) -> str | None:
    """The folder's name in that of its network in two passes; None for another name."""
    whole, _, way = name.rpartition("/")
    return whole if way == SECOND_PASS and whole and not Path(name).expanduser().exists() else None


def _twice(whole: str, target: Target, read: dict[Path, DFlashCheckpoint]) -> Drafter:
    network, _ = contents(find(whole))
    if network is None or is_head(network):
        raise CheckpointError(
            f"{whole}/{SECOND_PASS} needs a network, and {whole} holds none: name another folder"
        )
    found = _checkpoint(network, target, read)
    return D2SD(backbone_of(found, target), coupling=found.layout.coupling)


def _network(folder: Path, target: Target, read: dict[Path, DFlashCheckpoint]) -> Drafter:
    """The drafter of a checkpoint, by itself or with the head that is part of it."""
    found = _checkpoint(folder, target, read)
    backbone, coupling = backbone_of(found, target), found.layout.coupling
    if found.correction is None:
        return DFlash(backbone, coupling=coupling)
    return with_head(backbone, found.correction, coupling)


def _on_head(folder: Path, target: Target, read: dict[Path, DFlashCheckpoint]) -> Drafter:
    """The drafter of a head that lies beside its backbone."""
    head, backbone, coupling = read_head(folder)
    found = _checkpoint(backbone, target, read)
    if wrong := misfits(head, *sizes(found)):
        raise CheckpointError(
            f"{folder} does not fit its backbone {backbone}: {'; '.join(wrong)}. Name a head trained on this backbone"
        )
    return with_head(backbone_of(found, target), head, coupling)


def _checkpoint(folder: Path, target: Target, read: dict[Path, DFlashCheckpoint]) -> DFlashCheckpoint:
    key = folder.resolve()
    if key not in read:
        read[key] = checkpoint.read(folder, heads=True)
        checkpoint.check(read[key], target)
    return read[key]


def sizes(found: DFlashCheckpoint) -> tuple[int, int, int]:
    """What a head on a backbone must fit: hidden size, tokens of the draft vocabulary, of the target's."""
    vocab = found.config.vocab_size
    return found.config.hidden_size, vocab if found.draft_ids is None else len(found.draft_ids), vocab


def with_head(backbone: Backbone, head: Head, coupling: tuple[float, float]) -> Drafter:
    """The drafter that a kind of head drafts with."""
    if isinstance(head, DominoHead):
        return Domino(backbone, head, coupling=coupling)
    return FirstOrder(backbone, head, coupling=coupling)


def contents(folder: Path) -> tuple[Path | None, Path | None]:
    """The folder of the network or head and the n-gram table's file in a drafter's folder, None for what is not there.

    A table's file may be given in place of a folder.
    """
    if folder.is_file():
        return None, folder
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
