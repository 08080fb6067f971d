"""A drafter's folder: finds, reads, checks and writes its files, in the published names of settings and tensors."""

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
from ddtree.errors import CheckpointError, ConfigError, first_line

REMEDY = "download it again, or name another drafter"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
# Raised by safetensors and torch for a file that is cut short, altered, or not a table of tensors.
_DAMAGE = (SafetensorError, OSError, RuntimeError, EOFError, TypeError, ValueError, pickle.UnpicklingError)
# Beginnings of published tensors' names, and of ours; one may follow from another.
_RENAMED = {
    "model.": "",
    "draft_model.": "",
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
            parts = [read_file(folder / shard) for shard in sorted(set(shards.values()))]
        elif (folder / name).exists():
            parts = [read_file(folder / name)]
        else:
            continue
        return {name: tensor for part in parts for name, tensor in part.items()}
    raise CheckpointError(f"it has no weights (model.safetensors or pytorch_model.bin): {REMEDY}")


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file of tensors by name; a file of PyTorch's with one tensor has it as "embedding".

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
        return {"embedding": content} if isinstance(content, Tensor) else dict(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing: {REMEDY}") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path.name} is damaged ({first_line(error)}): {REMEDY}") from error


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
    for name, tensor in tensors.items():
        for theirs, ours in _RENAMED.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name.startswith(_IGNORED):
            continue
        mark = next((mark for mark in fused if mark in name), None)
        if mark is None or len(tensor) != sum(fused[mark].values()):
            named[name] = tensor
            continue
        for part, piece in zip(fused[mark], tensor.split(list(fused[mark].values())), strict=True):
            named[name.replace(mark, f".{part}.")] = piece
    return named


def check_tensors(tensors: dict[str, Tensor], wanted: dict[str, Tensor], owner: str) -> None:
    """Check that tensors have the names and shapes of those wanted; `owner` is what they make, as "DFlash checkpoint".

    Raises:
        CheckpointError: they have not; the message names them.
    """
    faults = [
        f"{kind} tensors {_listed(names)}"
        for kind, names in (
            ("unknown", tensors.keys() - wanted.keys()),
            ("missing", wanted.keys() - tensors.keys()),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{' and '.join(faults)}: this is no complete {owner}; {REMEDY}")
    for name, tensor in wanted.items():
        check_shape(name, tensors[name], tuple(tensor.shape))


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


def z_lab_config(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a network in z-lab's layout; `dtype` is that of its weights, as "bfloat16".

    Raises:
        ConfigError: the layout cannot express the network's attention.
    """
    windows = {window for window in config.windows if window is not None}
    slides = [config.window(i) is not None for i in range(config.num_hidden_layers)]
    causal = [config.is_causal(i) for i in range(config.num_hidden_layers)]
    if len(windows) > 1 or (causal != slides and len(set(causal)) > 1):
        raise ConfigError(
            "a checkpoint has one sliding window for all layers, and all of them, none, or just the sliding ones are "
            "causal: change windows and causal"
        )
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    for key in (
        "sample_from_anchor",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    ):
        value = getattr(config, key)
        if value and value != getattr(DFlashConfig, key):
            own[key] = value
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": own,
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "use_sliding_window": bool(windows),
        "sliding_window": min(windows, default=None),
        "dtype": dtype,
    }
    if causal != slides:
        raw["is_causal"] = causal[0]
    return raw
