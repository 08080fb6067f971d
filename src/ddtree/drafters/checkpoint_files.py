"""Files of a drafter's folder: where it is, its JSON, its weights. Knows no layout."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ddtree.errors import CheckpointError

REMEDY = "download it again, or name another drafter"


def locate(name: str | os.PathLike[str]) -> Path:
    """The folder of a drafter: a local one, or a Hugging Face hub id's, downloaded into the hub's cache.

    Raises:
        CheckpointError: there is no such folder, and the hub does not give it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    text = os.fspath(name)
    if folder.exists():
        raise CheckpointError(f"{text} is a file: name the drafter's folder, or a Hugging Face hub id")
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise CheckpointError(f"{text} does not exist: name the drafter's folder, or a Hugging Face hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except Exception as error:
        raise CheckpointError(
            f"{text} is no local folder, and the Hugging Face hub does not give it ({first_line(error)}): name the "
            "drafter's folder"
        ) from error


def read_json(path: Path, table: bool = True) -> Any:
    """The content of a JSON file, a table unless told otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing: {REMEDY}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is damaged ({error}): {REMEDY}") from error
    if table and not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is damaged (no table of settings): {REMEDY}")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files, safetensors before PyTorch's own."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise CheckpointError(f"{index.name} is damaged (no weight_map): {REMEDY}")
            return {
                k: v for shard in sorted(set(shards.values())) for k, v in _weights(folder / shard).items()
            }
        if (folder / f"{stem}.{suffix}").exists():
            return _weights(folder / f"{stem}.{suffix}")
    raise CheckpointError(f"it has no weights (model.safetensors or pytorch_model.bin): {REMEDY}")


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing: {REMEDY}") from error
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        EOFError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(f"{path.name} is damaged ({first_line(error)}): {REMEDY}") from error


def first_line(error: Exception) -> str:
    """The gist of an exception: its first line, or its type when it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
