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

from ddtree.drafters.dflash.config_formats import HEAD_KINDS, read_coupling
from ddtree.drafters.dflash.folder import (
    REMEDY,
    check_tensors,
    read_json,
    read_tensors,
    write_folder,
)
from ddtree.drafters.dflash.heads import Head, create
from ddtree.errors import CheckpointError, ConfigError, is_whole
from ddtree.sampling.noise import PLAIN

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
        tensors = _dequantized(read_tensors(path))
        check_tensors(tensors, head.state_dict(), f"{head.kind} head")
        head.load_state_dict(tensors)
        coupling = raw.get("coupling", {"beta": PLAIN[0], "kappa": PLAIN[1]})
        if not isinstance(coupling, dict) or not {"beta", "kappa"} <= coupling.keys():
            raise CheckpointError(f"coupling {coupling!r} must have numbers beta and kappa")
        return head.eval(), _backbone(path, raw.get("backbone")), read_coupling(coupling)
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


def _backbone(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise CheckpointError("config.json names no backbone: add the folder of its DFlash checkpoint")
    found = (folder / name).resolve()
    if not (found / "config.json").exists():
        raise CheckpointError(
            f"its backbone {name} is not there ({found}): a head drafts only with its backbone"
        )
    return found


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


# Parts of the names of published heads' tensors, and the drafters that have them.
_OWNERS = {
    "prefix_gru": "Domino",
    "embed_proj": "Domino",
    "logit_head": "Domino",
    "markov": "DSpark",
    "confidence": "DSpark",
    "ar_approximation": "TreeFlash",
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
}
# For each kind of head, our names of its tensors and the published ones.
_PUBLISHED = {
    "markov": {"w1.weight": "markov_head.markov_w1.weight", "w2.weight": "markov_head.markov_w2.weight"},
    "treeflash": {
        "embed_norm.weight": "ar_approximation.norm.weight",
        "gate_up.weight": "ar_approximation.ug.weight",
        "gate_up.bias": "ar_approximation.ug.bias",
        "down.weight": "ar_approximation.d.weight",
    },
    "domino": {
        "prefix_gru.weight_ih_l0": "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0": "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight": "embed_proj.0.weight",
        "embed_proj.2.weight": "embed_proj.2.weight",
    },
}
_CONFIDENCE = {f"confidence_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
# Beginnings of the names in older Domino checkpoints.
_OLDER = {"logit_head.0.": "embed_proj.0.", "logit_head.2.": "embed_proj.2.", "logit_head.": ""}
_TITLES = {"markov": "Markov", "treeflash": "TreeFlash", "domino": "Domino"}


def owner_of(name: str) -> str | None:
    """Return the drafter whose head a published tensor belongs to, as "Domino"; None for a network's tensor."""
    return next((owner for mark, owner in _OWNERS.items() if mark in name), None)


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
    found = {_current(name): t for name, t in tensors.items() if HEAD_KINDS.get(owner_of(name) or "") == kind}
    names = dict(_PUBLISHED[kind])
    if kind == "markov" and not settings.get("confidence_head_with_markov", True):
        # One that does not know the token before a slot says the same of all branches, which is of no use here.
        found = {name: tensor for name, tensor in found.items() if name not in _CONFIDENCE.values()}
    elif kind == "markov" and _CONFIDENCE["confidence_proj.weight"] in found:
        names |= _CONFIDENCE
    if missing := [name for name in names.values() if name not in found]:
        raise CheckpointError(f"this {_TITLES[kind]} head lacks {', '.join(missing)}; {REMEDY}")
    unknown = sorted(found.keys() - names.values())
    if unknown and kind != "domino":
        raise CheckpointError(f"unknown tensors {', '.join(unknown)} of a {kind} head; {REMEDY}")
    state = {ours: found[published] for ours, published in names.items()}
    with torch.device("meta"):
        head = create(kind, **_published_config(kind, settings, state))
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


def _current(name: str) -> str:
    """Return the name that newer checkpoints have for a tensor."""
    older = next((older for older in _OLDER if name.startswith(older)), "")
    return _OLDER.get(older, "") + name.removeprefix(older)


def _published_config(kind: str, settings: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a head's config, by the shapes of its tensors, which have our names.

    Domino's `shift_label` is the backbone's (`DFlashConfig.sample_from_anchor`).
    """
    if kind == "markov":
        vocab, rank = tensors["w1.weight"].shape
        config = {"size": len(tensors["w2.weight"]), "vocab_size": vocab, "rank": rank}
        if "confidence_proj.weight" in tensors:
            config["confidence"] = tensors["confidence_proj.weight"].shape[1] - rank
        return config
    if kind == "treeflash":
        hidden, inner = tensors["down.weight"].shape
        return {"hidden_size": hidden, "intermediate_size": inner}
    gru_hidden, hidden = (tensors[f"prefix_gru.weight_{part}_l0"].shape[1] for part in ("hh", "ih"))
    size, rank = tensors["embed_proj.2.weight"].shape
    pure = settings.get("pure_draft_prefix_len", 0)
    if not is_whole(pure) or pure < 0:
        raise CheckpointError(f"pure_draft_prefix_len={pure!r} must be a whole number from 0 up")
    for key, width in (("gru_hidden_dim", gru_hidden), ("emb_dim", rank)):
        if settings.get(key, width) != width:
            raise CheckpointError(
                f"{key}={settings[key]!r}, but the Domino head's tensors are made for {width}"
            )
    return {
        "hidden_size": hidden,
        "size": size,
        "gru_hidden": gru_hidden,
        "rank": rank,
        "pure_prefix": pure,
    }
