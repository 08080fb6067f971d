"""Finds, reads and writes the files of a drafter's folder, and makes the tensors' published names ours."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.drafters.dflash.network import DFlashConfig
from ddtree.errors import CheckpointError
from ddtree.validation import first_line

REMEDY = "download it again, or name another drafter"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_PREFIXES = ("model.", "draft_model.")
_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
# Copies of the target's tensors, and maps that follow from other tensors.
_IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def locate(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a drafter: a local one, or a Hugging Face hub id's, downloaded into the hub's cache.

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
    """Return the content of a JSON file, which must be a table unless `table` is False.

    Raises:
        CheckpointError: it is missing or damaged.
    """
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
    """Return all tensors of a folder's weight files; safetensors are preferred to PyTorch's own files.

    Raises:
        CheckpointError: there are no weights, or a file is missing or damaged.
    """
    for name in (_WEIGHTS, "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise CheckpointError(f"{index.name} is damaged (no weight_map): {REMEDY}")
            tensors = {}
            for shard in sorted(set(shards.values())):
                tensors.update(_read_shard(folder / shard))
            return tensors
        if (folder / name).exists():
            return _read_shard(folder / name)
    raise CheckpointError(f"it has no weights (model.safetensors or pytorch_model.bin): {REMEDY}")


def _read_shard(path: Path) -> dict[str, Tensor]:
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


def read_mask_embedding(folder: Path, config: DFlashConfig) -> Tensor | None:
    """Return a mask embedding [H] trained apart from the vocabulary, which some checkpoints have in a file.

    Raises:
        CheckpointError: the file is damaged, or for another mask token or size.
    """
    path = folder / "mask_embedding.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        token = config.mask_token_id
        if isinstance(state, dict):
            token, state = state.get("mask_token_id", token), state["embedding"]
        embedding = state.reshape(-1)
    except (KeyError, AttributeError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path.name} is damaged ({type(error).__name__}): {REMEDY}") from error
    if token != config.mask_token_id or len(embedding) != config.hidden_size:
        raise CheckpointError(
            f"{path.name} has {len(embedding)} values for token {token}, not {config.hidden_size} for mask token "
            f"{config.mask_token_id}; {REMEDY}"
        )
    return embedding


def our_names(tensors: dict[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Return a published network's tensors by `DFlashNet`'s names; fused projections are taken apart."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        ".qkv_proj.": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        ".gate_up_proj.": {"gate_proj": inner, "up_proj": inner},
    }
    named: dict[str, Tensor] = {}
    for published, tensor in tensors.items():
        name = published
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        for theirs, ours in _RENAMED.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name.startswith(_IGNORED):
            continue
        mark = next((mark for mark in fused if mark in name), None)
        if mark is None or tensor.shape[0] != sum(fused[mark].values()):
            named[name] = tensor
            continue
        for part, piece in zip(fused[mark], tensor.split(list(fused[mark].values())), strict=True):
            named[name.replace(mark, f".{part}.")] = piece
    return named


def check_names(found: set[str], wanted: set[str], owner: str) -> None:
    """Raise CheckpointError, with the names, unless tensors are exactly those wanted; `owner` is what they make."""
    faults = [
        f"{kind} tensors {_listed(names)}"
        for kind, names in (("unknown", found - wanted), ("missing", wanted - found))
        if names
    ]
    if faults:
        raise CheckpointError(f"{' and '.join(faults)}: this is no complete {owner}; {REMEDY}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has the shape that the config asks for."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name} is {list(tensor.shape)}, not {list(shape)} as config.json says; {REMEDY}"
        )


def _listed(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:4]) + (f" and {len(first) - 4} more" if len(first) > 4 else "")


def write_folder(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a config.json and the weights; the folder is made if need be, and these files in it are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
