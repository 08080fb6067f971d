"""Drafters by name: what the `drafter` argument and option accept."""

from __future__ import annotations

import json
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ddtree.drafters import Drafter, parts_of
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.demo import NAME as DEMO
from ddtree.model.demo import resolve_drafter
from ddtree.model.target import Target

# Each kind of drafter is imported where it is asked for.
if TYPE_CHECKING:
    from ddtree.drafters.dflash.backbone import Backbone
    from ddtree.drafters.dflash.checkpoint import DFlashCheckpoint
    from ddtree.drafters.dflash.heads import DominoHead, Head
    from ddtree.drafters.ngram import Lookup

DRAFT_MODEL = "draft:"
NETWORK, TABLE = "dflash", "ngrams.safetensors"
"""The parts of a folder that `ddtree train` exports: the checkpoint's folder, and the n-gram table beside it. Heads lie
beside them, each in a folder of its own."""
NGRAMS = "ngrams"
"""The name of the table as a part of such a folder."""
SECOND_PASS = "d2sd"
"""A way to draft with the network of such a folder, named like a part."""

DrafterSpec = str | PathLike[str] | Drafter | None | list[Any] | tuple[Any, ...]


def load_drafter(spec: DrafterSpec, target: Target) -> Drafter | None:
    """Load the drafter that a name stands for.

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
    return _Loader(target).load(spec)


def folder_of(spec: DrafterSpec) -> Path | None:
    """Return the folder that a drafter's name stands for; None for a drafter without one.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not isinstance(spec, str | PathLike):
        return None
    name = fspath(spec)
    if name in ("none", "lookup") or name.startswith(DRAFT_MODEL):
        return None
    place = find(_without_second_pass(name) or name)
    return place if place.is_dir() else None


def find(name: str) -> Path:
    """Return the folder of a drafter or of a part of one, or the file of its n-gram table.

    Raises:
        CheckpointError: there is no such drafter, or it has no such part.
    """
    from ddtree.drafters.dflash.folder import locate

    text = resolve_drafter(name)
    path = Path(text).expanduser()
    if path.exists() or not path.name:
        return locate(text)
    folder = path.parent
    if not folder.is_dir():
        if text.count("/") != 2 or text.startswith((".", "/", "~")):
            return locate(text)
        folder = locate(text.rpartition("/")[0])
    place = folder / (TABLE if path.name == NGRAMS else path.name)
    if place.exists():
        return place
    if not (folder / NETWORK).is_dir() and not (folder / TABLE).exists():
        return locate(text)
    parts = sorted(part.name for part in folder.iterdir() if (part / "config.json").exists())
    parts += [NGRAMS] * (folder / TABLE).exists()
    raise CheckpointError(f"{folder} has no part {path.name}: it holds {', '.join(parts)}")


def contents(folder: Path) -> tuple[Path | None, Path | None]:
    """Return the folder of a network or head, and the file of an n-gram table, in a drafter's folder.

    None stands for a part that is not there. A table's file may be given in place of a folder.
    """
    if folder.is_file():
        return None, folder
    network = next((f for f in (folder, folder / NETWORK) if (f / "config.json").exists()), None)
    table = folder / TABLE
    return network, table if table.exists() else None


def with_head(backbone: Backbone, head: Head, coupling: tuple[float, float]) -> Drafter:
    """Return the drafter for a backbone with a head."""
    if head.kind == "domino":
        from ddtree.drafters.dflash.domino import Domino

        return Domino(backbone, cast("DominoHead", head), coupling=coupling)
    from ddtree.drafters.dflash.first_order import FirstOrder

    return FirstOrder(backbone, head, coupling=coupling)


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


def _without_second_pass(name: str) -> str | None:
    """Return FOLDER of the name "FOLDER/d2sd"; None for another name."""
    folder, _, way = name.rpartition("/")
    return folder if way == SECOND_PASS and folder and not Path(name).expanduser().exists() else None


class _Loader:
    """Loads drafters for one target. Those of one list share the weights of checkpoints that they have in common."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._checkpoints: dict[Path, DFlashCheckpoint] = {}

    def load(self, spec: DrafterSpec) -> Drafter | None:
        """Load what `load_drafter` accepts."""
        if spec is None or spec == "none":
            return None
        if isinstance(spec, list | tuple):
            return self._merged(spec)
        if not isinstance(spec, str | PathLike):
            if all(hasattr(spec, name) for name in ("add_row", "drop_row", "observe", "draft")):
                return spec
            raise ConfigError(
                f"drafter={spec!r} is not a drafter: give lookup, draft:MODEL, none, a folder, a hub id, or a Drafter"
            )
        name = fspath(spec)
        if name == "lookup":
            return self._lookup(None)
        if name.startswith(DRAFT_MODEL):
            return self._draft_model(name.removeprefix(DRAFT_MODEL))
        if folder := _without_second_pass(name):
            return self._two_passes(folder)
        return self._from_folder(name)

    def _merged(self, specs: list[Any] | tuple[Any, ...]) -> Drafter:
        from ddtree.drafters.merged import Merged

        if "auto" in [part for part in specs if isinstance(part, str)]:
            raise ConfigError(
                f"drafter={list(specs)!r} cannot hold auto, which chooses by itself: give it alone, or name each "
                "drafter"
            )
        parts = [self.load(part) for part in specs]
        if not parts or None in parts:
            raise ConfigError(
                f"drafter={list(specs)!r} must hold drafters to merge: give at least one, and no none"
            )
        flat = [inner for part in parts for inner in parts_of(part)]
        return flat[0] if len(flat) == 1 else Merged(flat)

    def _lookup(self, file: Path | None) -> Lookup:
        from ddtree.drafters.ngram import Lookup
        from ddtree.drafters.ngram_table import NgramTable

        table = None if file is None else NgramTable.load(file)
        return Lookup(table, vocab_size=self._target.vocab_size, device=self._target.device)

    def _draft_model(self, name: str) -> Drafter:
        from ddtree.drafters.draft_model import DraftModel
        from ddtree.model.pretrained import load_causal_lm

        if not name:
            raise ConfigError("drafter='draft:' names no model: write draft:FOLDER or draft:HUB_ID")
        model, tokenizer = load_causal_lm(name, self._target.device, self._target.dtype)
        return DraftModel(Target(model, tokenizer, pack=self._target.packs), self._target)

    def _two_passes(self, folder: str) -> Drafter:
        from ddtree.drafters.dflash.checkpoint import backbone_of
        from ddtree.drafters.dflash.d2sd import D2SD
        from ddtree.drafters.dflash.head_checkpoint import is_head

        network, _ = contents(find(folder))
        if network is None or is_head(network):
            raise CheckpointError(
                f"{folder}/{SECOND_PASS} needs a network, and {folder} holds none: name another folder"
            )
        found = self._checkpoint(network)
        return D2SD(backbone_of(found, self._target), coupling=found.layout.coupling)

    def _from_folder(self, name: str) -> Drafter:
        network, table = contents(find(name))
        drafter = None if network is None else self._network(name, network)
        lookup = None if table is None and name != DEMO else self._lookup(table)
        if drafter is not None and lookup is not None:
            from ddtree.drafters.merged import Mixed

            return Mixed(drafter, lookup)
        found = drafter or lookup
        if found is None:
            raise CheckpointError(
                f"{name} holds no drafter (neither config.json nor {NETWORK}/ nor {TABLE}): name a drafter's folder"
            )
        return found

    def _network(self, name: str, folder: Path) -> Drafter:
        """Load a checkpoint, with its head where it has one, or a head that lies beside its backbone."""
        from ddtree.drafters.dflash import DFlash
        from ddtree.drafters.dflash.checkpoint import backbone_of, read_part

        refuse_language_model(name, folder)
        found = read_part(folder, self._checkpoint)
        backbone, coupling = backbone_of(found, self._target), found.layout.coupling
        if found.correction is None:
            return DFlash(backbone, coupling=coupling)
        return with_head(backbone, found.correction, coupling)

    def _checkpoint(self, folder: Path) -> DFlashCheckpoint:
        from ddtree.drafters.dflash import checkpoint

        key = folder.resolve()
        if key not in self._checkpoints:
            self._checkpoints[key] = checkpoint.read(folder, heads=True)
            checkpoint.check(self._checkpoints[key], self._target)
        return self._checkpoints[key]
