"""A head on disk: config.json and model.safetensors, in a folder beside its backbone's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.drafters.checkpoint_files import REMEDY, read_json, read_tensors
from ddtree.drafters.heads import Head
from ddtree.drafters.heads.registry import create
from ddtree.errors import CheckpointError, ConfigError

ARCHITECTURE = "DDTreeHead"
_SCALE = ".scale"
PLAIN = (0.0, 1.0)


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
        backbone: folder of the DFlash checkpoint that it stands on, relative to this one.
        coupling: (beta, kappa) of noise-coupled drafting with this head.
        dtype: of the stored weights. "int8" keeps matrices in a byte a weight and a scale a row: half the size
            again, with an error of up to 1/254 of a row's largest weight.

    Raises:
        ConfigError: `dtype` is neither a torch dtype nor "int8".
    """
    if dtype != "int8" and not isinstance(dtype, torch.dtype):
        raise ConfigError(f'dtype={dtype!r} must be a torch dtype or "int8"')
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
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
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return path


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, by its config.json."""
    try:
        return ARCHITECTURE in (read_json(folder / "config.json").get("architectures") or [])
    except (CheckpointError, TypeError):
        return False


def read_head(folder: str | os.PathLike[str]) -> tuple[Head, Path, tuple[float, float]]:
    """The head in a folder, in float32; the folder of its backbone; its (beta, kappa).

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
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    faults = []
    if unknown := sorted(set(tensors) - set(wanted)):
        faults.append(f"unknown tensors {', '.join(unknown)}")
    if missing := sorted(set(wanted) - set(tensors)):
        faults.append(f"missing tensors {', '.join(missing)}")
    if faults:
        raise CheckpointError(f"{' and '.join(faults)}: this is no complete {head.kind} head; {REMEDY}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} is {list(tensors[name].shape)}, not {list(shape)} as config.json says; {REMEDY}"
            )
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


def _coupling(raw: Any) -> tuple[float, float]:
    if raw is None:
        return PLAIN
    try:
        beta, kappa = float(raw["beta"]), float(raw["kappa"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"coupling {raw!r} must have numbers beta and kappa") from error
    if not beta >= 0 or not kappa > 0:
        raise CheckpointError(f"coupling {raw!r} must have beta from 0 up and kappa above 0")
    return beta, kappa


def misfits(head: Head, hidden_size: int, size: int, vocab_size: int) -> list[str]:
    """Every reason why a head does not fit a backbone of hidden size H and Vd draft tokens, and its target's V."""
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
