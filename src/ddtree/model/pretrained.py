"""Causal language models from a folder or the Hugging Face hub, with every failure named in one line."""

from __future__ import annotations

import json
import pickle
import re
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ddtree.errors import CheckpointError, ConfigError, DDTreeError, UnsupportedModelError, first_line
from ddtree.model.demo import resolve

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
_LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, EOFError, SafetensorError,
    pickle.UnpicklingError,
)  # fmt: skip


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device asked for ("cuda:0", for example); by default CUDA, else Apple's GPU, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    available = [kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()] + ["cpu"]
    if name is None:
        return torch.device(available[0])
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {name!r}: choose {', '.join(available)}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in available or (device.index or 0) >= count:
        raise ConfigError(f"device {str(name)!r} is not available here: choose {', '.join(available)}")
    return device


def choose_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype asked for; None, which means the checkpoint's own, for None and "auto".

    Raises:
        ConfigError: models are not run in that dtype.
    """
    if name is None or name == "auto":
        return None
    dtype = _DTYPES.get(name) if isinstance(name, str) else name
    if dtype not in _DTYPES.values():
        raise ConfigError(f"unknown dtype {str(name)!r}: choose auto, {', '.join(_DTYPES)}")
    return dtype


def locate(name: str | PathLike[str]) -> str:
    """Return what transformers shall load: the folder of `demo`, a local folder, or a hub id.

    Raises:
        CheckpointError: it can be neither a folder nor a hub id, or the demo target cannot be fetched.
        ConfigError: it is no name.
    """
    if not isinstance(name, str | PathLike) or not fspath(name):
        raise ConfigError(
            f"{name!r} names no model: give demo, a checkpoint's folder, a Hugging Face hub id, or a loaded model"
        )
    text = resolve(fspath(name))
    folder = Path(text).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.exists() or not _HUB_ID.fullmatch(text):
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{text} {what}: name a checkpoint's folder, or a Hugging Face hub id")
    return text


def read_config(name: str | PathLike[str], place: str | None = None) -> Any:
    """Return the config of a causal LM.

    Args:
        name: "demo", a folder, or a hub id.
        place: what `locate` returned for the name, where that is known.

    Raises:
        CheckpointError: it cannot be read, or is a drafter's.
        UnsupportedModelError: the model is of another kind.
    """
    place = place or locate(name)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise _unreadable(name, place, error) from error
    architectures = getattr(config, "architectures", None) or []
    if any("DFlash" in kind for kind in architectures) or getattr(config, "dflash_config", None):
        raise CheckpointError(
            f'{name} is a DFlash drafter, not a target: name the target, and this with drafter="{name}"'
        )
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{name} is no causal language model ({config.model_type}): name one")
    return config


def read_tokenizer(name: str | PathLike[str], place: str | None = None) -> Any:
    """Return the tokenizer beside a model; None where a local folder has no tokenizer files.

    Args:
        name: "demo", a folder, or a hub id.
        place: what `locate` returned for the name, where that is known.

    Raises:
        CheckpointError: it cannot be read.
    """
    place = place or locate(name)
    if Path(place).is_dir() and not any((Path(place) / file).exists() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            f"the tokenizer of {name} cannot be loaded ({first_line(error)}): {_remedy(error)}"
        ) from error


def load_causal_lm(
    name: str | PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Load a causal LM; return it on its device, and its tokenizer (None where there is none).

    Args:
        name: "demo", a folder, or a hub id.
        device: by default CUDA, else Apple's GPU, else the CPU.
        dtype: the checkpoint's own by default.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit into memory.
        UnsupportedModelError: it is no causal LM.
        ConfigError: unknown device or dtype.
    """
    device, dtype = choose_device(device), choose_dtype(dtype)
    place = locate(name)
    read_config(name, place)
    tokenizer = read_tokenizer(name, place)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            raise CheckpointError(
                f"{name} is incomplete: {len(missing)} tensors are missing ({missing[0]}, ...): download it again"
            )
        return model.to(device).eval(), tokenizer
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{name} does not fit into the memory of {device}: take a smaller model, a smaller dtype or another device"
        ) from error
    except DDTreeError:
        raise
    except _LOADING_ERRORS as error:
        raise _unreadable(name, place, error) from error


def check_causal_lm(model: Any) -> None:
    """Raise UnsupportedModelError unless a module is a transformers model with a language-model head."""
    name = type(model).__name__
    if not all(hasattr(model, part) for part in ("config", "get_output_embeddings", "get_input_embeddings")):
        raise UnsupportedModelError(f"{name} is no transformers model: load one with AutoModelForCausalLM")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head: load it with AutoModelForCausalLM, not AutoModel"
        )


def _unreadable(name: str | PathLike[str], place: str, error: BaseException) -> CheckpointError:
    """Return the error that says in one line why transformers could not load what is at a place, and what to do."""
    folder = Path(place)
    if not folder.is_dir():
        return CheckpointError(
            f"{name} is no local folder, and the Hugging Face hub does not give it ({first_line(error)}): "
            "check the name and the connection, or name a local folder"
        )
    if (folder / "adapter_config.json").exists():
        return CheckpointError(
            f"{name} is an adapter, of {_adapted(folder)}, and no model: load that model and the adapter with peft, "
            "merge them (merge_and_unload), and give the result to ddtree.load, or save it and name its folder"
        )
    if not (folder / "config.json").exists():
        return CheckpointError(f"{name} has no config.json: name the folder of a complete checkpoint")
    return CheckpointError(f"{name} cannot be loaded ({first_line(error)}): {_remedy(error)}")


def _adapted(folder: Path) -> str:
    """Return the name of the model that a folder's adapter belongs to."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return str(base["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "a model that its adapter_config.json does not name"


def _remedy(error: BaseException) -> str:
    """Return what to do about an error of transformers while it reads a checkpoint."""
    message = str(error)
    if "trust_remote_code" in message:
        return (
            "ddtree runs no code of checkpoints; load it with transformers, and give the model to ddtree.load"
        )
    if isinstance(error, ImportError) or "pip install" in message:
        return "install what is missing, or load it with transformers, and give the model to ddtree.load"
    if "dtype" in message:
        return "its weights are of a kind that cannot be read here; name another checkpoint"
    return "download it again, or name another"
