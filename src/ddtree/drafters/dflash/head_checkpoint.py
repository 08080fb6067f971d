"""Heads on disk: our own folders, read and written, and the heads inside published checkpoints.

A head of ours lies in a folder beside its backbone's, with a config.json that names the backbone. Published drafters
hold head and network in one file: `read_published` takes the head out of it and makes its tensors' names ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters.dflash.config_formats import read_coupling
from ddtree.drafters.dflash.heads import Head, create
from ddtree.drafters.dflash.weight_files import (
    REMEDY,
    check_names,
    check_shape,
    read_json,
    read_tensors,
    write_folder,
)
from ddtree.errors import CheckpointError, ConfigError
from ddtree.sampling.noise import PLAIN
from ddtree.validation import is_whole

ARCHITECTURE = "DDTreeHead"
_SCALE = ".scale"


def write_head(
    folder: str | os.PathLike[str],
    head: Head,
    backbone: str = "../dflash",
    coupling: tuple[float, float] = PLAIN,
    dtype: torch.dtype | str = torch.bfloat16,
) -> Path:
    """Write a head.

    Args:
        folder: made if need be; files of these names in it are replaced.
        head: its config and weights.
        backbone: folder of the DFlash checkpoint that it was trained on, relative to this one.
        coupling: (beta, kappa) of noise-coupled drafting with this head.
        dtype: of the stored weights. "int8" keeps matrices in a byte a weight and a scale a row: half the size
            again, with an error of up to 1/254 of a row's largest weight.

    Raises:
        ConfigError: `dtype` is neither a torch dtype nor "int8".
    """
    if dtype != "int8" and not isinstance(dtype, torch.dtype):
        raise ConfigError(f'dtype={dtype!r} must be a torch dtype or "int8"')
    tensors: dict[str, Tensor] = {}
    for name, value in head.state_dict().items():
        tensor = value.detach().to("cpu", torch.float32)
        if dtype == "int8" and tensor.dim() == 2:
            scale = tensor.abs().amax(dim=1) / 127
            tensors[name] = (tensor / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8)
            tensors[name + _SCALE] = scale
        else:
            kept = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
            tensors[name] = tensor.to(kept).contiguous()
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "head": {"kind": head.kind, **head.config()},
        "backbone": backbone,
        "coupling": {"beta": coupling[0], "kappa": coupling[1]},
        "dtype": str(dtype).removeprefix("torch."),
    }
    write_folder(Path(folder), raw, tensors)
    return Path(folder)


def is_head(folder: Path) -> bool:
    """Return whether a folder holds a head of ours, by its config.json."""
    try:
        return ARCHITECTURE in (read_json(folder / "config.json").get("architectures") or [])
    except (CheckpointError, TypeError):
        return False


def read_head(folder: str | os.PathLike[str]) -> tuple[Head, Path, tuple[float, float]]:
    """Return the head in a folder, in float32; the folder of its backbone; its (beta, kappa).

    Raises:
        CheckpointError: files are missing or damaged, the kind is unknown, tensors do not belong to it, or there is
            no backbone; the message names the folder and the part.
    """
    path = Path(folder)
    try:
        raw = read_json(path / "config.json")
        settings = raw.get("head")
        if ARCHITECTURE not in (raw.get("architectures") or []) or not isinstance(settings, dict):
            raise CheckpointError(f"config.json is no {ARCHITECTURE}'s: name the folder of a head")
        settings = dict(settings)
        head = create(str(settings.pop("kind", "")), **settings)
        _load(head, _dequantized(read_tensors(path)))
        return head.eval(), _backbone(path, raw.get("backbone")), _coupling(raw.get("coupling"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__


def _dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE):
            continue
        value = tensor.float()
        if tensor.dtype == torch.int8:
            scale = tensors.get(name + _SCALE)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise CheckpointError(
                    f"tensor {name} is int8, but its scales {name}{_SCALE} are not there: {REMEDY}"
                )
            value = value * scale.float()[:, None]
        found[name] = value
    return found


def _load(head: Head, tensors: dict[str, Tensor]) -> None:
    wanted = head.state_dict()
    check_names(set(tensors), set(wanted), f"{head.kind} head")
    for name, tensor in wanted.items():
        check_shape(name, tensors[name], tuple(tensor.shape))
    head.load_state_dict(tensors)


def _backbone(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise CheckpointError("config.json names no backbone: add the folder of its DFlash checkpoint")
    found = (folder / name).resolve()
    if not (found / "config.json").exists():
        raise CheckpointError(
            f"its backbone {name} is not there ({found}): a head drafts only with its backbone"
        )
    return found


def _coupling(table: Any) -> tuple[float, float]:
    if table is None:
        return PLAIN
    if not isinstance(table, dict) or not {"beta", "kappa"} <= table.keys():
        raise CheckpointError(f"coupling {table!r} must have numbers beta and kappa")
    return read_coupling(table)


def incompatibilities(head: Head, hidden_size: int, size: int, vocab_size: int) -> list[str]:
    """Return every reason why a head does not fit a backbone of H and Vd, and its target's V; empty when it does."""
    settings, found = head.config(), []
    for name, theirs, what in (
        ("hidden_size", hidden_size, "the backbone's hidden size"),
        ("confidence", hidden_size, "the backbone's hidden size"),
        ("size", size, "the draft vocabulary's size"),
        ("vocab_size", vocab_size, "the target's vocabulary size"),
    ):
        own = settings.get(name)
        if own is not None and own != theirs:
            found.append(f"{name} {own} is not {what} {theirs}")
    return found


# Beginnings of the names of published heads' tensors.
_MARKS = (
    "ar_approximation.",
    "markov_head.",
    "confidence_head.",
    "prefix_gru.",
    "embed_proj.",
    "logit_head.",
)
# Our names of the tensors and the published ones.
_MARKOV = {"w1.weight": "markov_head.markov_w1.weight", "w2.weight": "markov_head.markov_w2.weight"}
_CONFIDENCE = {f"confidence_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
_TREEFLASH = {
    "embed_norm.weight": "ar_approximation.norm.weight",
    "gate_up.weight": "ar_approximation.ug.weight",
    "gate_up.bias": "ar_approximation.ug.bias",
    "down.weight": "ar_approximation.d.weight",
}
_DOMINO = {
    name: name
    for name in (
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    )
}


def is_head_tensor(name: str) -> bool:
    """Return whether a published drafter's tensor is its head's, not the network's."""
    return name.startswith(_MARKS)


def read_published(kind: str, raw: dict[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    """Return the head of a published checkpoint.

    Args:
        kind: of the head, as `Layout.correction` says.
        raw: the checkpoint's config.json; settings may be in its `dflash_config`.
        tensors: the checkpoint's; those that are not the head's are not looked at.

    Raises:
        CheckpointError: a tensor is missing or unknown, or shapes and settings contradict each other.
    """
    settings = {**raw, **(raw.get("dflash_config") or {})}
    found = {name: tensor for name, tensor in tensors.items() if is_head_tensor(name)}
    config, names = {"markov": _markov, "treeflash": _treeflash, "domino": _domino}[kind](settings, found)
    unknown = sorted(set(found) - set(names.values()))
    if unknown:
        raise CheckpointError(f"unknown tensors {', '.join(unknown)} of a {kind} head; {REMEDY}")
    with torch.device("meta"):
        head = create(kind, **config)
    state = {ours: found[published] for ours, published in names.items()}
    for ours, tensor in head.state_dict().items():
        if state[ours].shape != tensor.shape:
            raise CheckpointError(
                f"tensor {names[ours]} is {list(state[ours].shape)}, not {list(tensor.shape)} as the {kind} head's "
                f"others say; {REMEDY}"
            )
    if kind == "treeflash":
        # Published ones have the gated half last.
        for name in ("gate_up.weight", "gate_up.bias"):
            up, gate = state[name].chunk(2)
            state[name] = torch.cat([gate, up])
    head.load_state_dict(state, assign=True)
    return head


def _markov(settings: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of DSpark's head, and the published names of its tensors by ours."""
    names, confidence = dict(_MARKOV), None
    _check_complete(names, tensors, "Markov")
    (vocab, rank), size = tensors[names["w1.weight"]].shape, len(tensors[names["w2.weight"]])
    if not settings.get("confidence_head_with_markov", True):
        # One that does not know the token before a slot says the same of all branches, which is of no use here.
        for published in _CONFIDENCE.values():
            tensors.pop(published, None)
    elif _CONFIDENCE["confidence_proj.weight"] in tensors:
        names |= _CONFIDENCE
        _check_complete(names, tensors, "Markov")
        confidence = tensors[names["confidence_proj.weight"]].shape[1] - rank
    return {"size": size, "vocab_size": vocab, "rank": rank, "confidence": confidence}, names


def _treeflash(settings: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of TreeFlash's head, and the published names of its tensors by ours."""
    _check_complete(_TREEFLASH, tensors, "TreeFlash")
    hidden, inner = tensors[_TREEFLASH["down.weight"]].shape
    return {"hidden_size": hidden, "intermediate_size": inner}, _TREEFLASH


def _domino(settings: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of Domino's head (`projector_type` "domino" or "causal_v5"), and its tensors' names.

    Older checkpoints have "logit_head." before the names, or in place of "embed_proj.". `shift_label` is the
    backbone's (`DFlashConfig.sample_from_anchor`).
    """
    for published in list(tensors):
        tensor, name = tensors.pop(published), published.removeprefix("logit_head.")
        name = f"embed_proj.{name}" if name in ("0.weight", "2.weight") else name
        if name in _DOMINO:
            tensors[name] = tensor
    _check_complete(_DOMINO, tensors, "Domino")
    gru_hidden, hidden_size = (tensors[f"prefix_gru.weight_{part}_l0"].shape[1] for part in ("hh", "ih"))
    size, rank = tensors["embed_proj.2.weight"].shape
    pure = settings.get("pure_draft_prefix_len", 0)
    if not is_whole(pure) or pure < 0:
        raise CheckpointError(f"pure_draft_prefix_len={pure!r} must be a whole number from 0 up")
    for key, width in (("gru_hidden_dim", gru_hidden), ("emb_dim", rank)):
        if settings.get(key, width) != width:
            raise CheckpointError(
                f"{key}={settings[key]!r}, but the Domino head's tensors are made for {width}"
            )
    config = {"hidden_size": hidden_size, "size": size, "gru_hidden": gru_hidden, "rank": rank}
    return {**config, "pure_prefix": pure}, _DOMINO


def _check_complete(names: dict[str, str], tensors: Mapping[str, Tensor], head: str) -> None:
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise CheckpointError(f"this {head} head lacks {', '.join(missing)}; {REMEDY}")
