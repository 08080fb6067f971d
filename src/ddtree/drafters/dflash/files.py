"""Files of a drafter's folder: where it is, its JSON, its weights. Knows no layout."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.drafters.dflash.heads import Head, Markov, TreeFlash, create
from ddtree.drafters.dflash.heads import public as domino
from ddtree.drafters.dflash.network import DFlashConfig, DFlashNet
from ddtree.errors import CheckpointError, ConfigError
from ddtree.validation import first_line

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


_VOCABULARY = "draft_vocabulary.json"


def write(
    folder: str | os.PathLike[str],
    network: DFlashNet,
    *,
    draft_ids: Tensor | None = None,
    coupling: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a drafter in z-lab's layout, the one that other engines read too.

    A reduced draft vocabulary stands in a file of its own that others do not look at: they then score the whole
    vocabulary with the same network. The coupling is a further key of `dflash_config`.

    Args:
        folder: made if need be; files of these names in it are replaced.
        network: config and weights.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary.
        coupling: (beta, kappa) of noise-coupled drafting.
        dtype: of the stored weights; the network's own by default.

    Raises:
        ConfigError: the layout cannot express the network's attention.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in network.state_dict().items()
    }
    raw = _raw_config(network.config, tensors["fc.weight"].dtype)
    if draft_ids is not None:
        (path / _VOCABULARY).write_text(json.dumps(draft_ids.tolist()))
        raw["dflash_config"]["draft_vocabulary"] = _VOCABULARY
    if tuple(coupling) != (0.0, 1.0):
        raw["dflash_config"]["coupling"] = {"beta": coupling[0], "kappa": coupling[1]}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return path


def _raw_config(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    windows = {window for window in config.windows if window is not None}
    slides = [config.window(i) is not None for i in layers]
    causal = [config.is_causal(i) for i in layers]
    if len(windows) > 1 or (causal != slides and len(set(causal)) > 1):
        raise ConfigError(
            "a checkpoint has one sliding window for all layers, and all of them, none, or just the sliding ones are "
            "causal: change windows and causal"
        )
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.sample_from_anchor:
        own["sample_from_anchor"] = True
    if config.input_embedding_scale != 1.0:
        own["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        own["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping:
        own["final_logit_softcapping"] = config.final_logit_softcapping
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
        "dtype": str(dtype).removeprefix("torch."),
    }
    if causal != slides:
        raw["is_causal"] = causal[0]
    return raw


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


_MARKS = (
    "ar_approximation.",
    "markov_head.",
    "confidence_head.",
    "prefix_gru.",
    "embed_proj.",
    "logit_head.",
)


def belongs(name: str) -> bool:
    """Whether a tensor is a head's, not the backbone's."""
    return name.startswith(_MARKS)


def read(kind: str, raw: dict[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    """The head of a checkpoint whose config.json is `raw`; tensors that are not the head's are not looked at.

    Raises:
        CheckpointError: a tensor is missing or unknown, or shapes contradict each other.
    """
    found = {name: tensor for name, tensor in tensors.items() if belongs(name)}
    if kind == "domino":
        return domino(raw, found)
    if not {**raw, **(raw.get("dflash_config") or {})}.get("confidence_head_with_markov", True):
        # One that does not know the token before a slot says the same of all branches, which is of no use here.
        found = {name: tensor for name, tensor in found.items() if not name.startswith("confidence_head.")}
    head, named = markov(found) if kind == "markov" else treeflash(found)
    unknown = sorted(set(found) - set(named.values()))
    if unknown:
        raise CheckpointError(f"unknown tensors {', '.join(unknown)} of a {kind} head; {REMEDY}")
    for own, name in named.items():
        wanted = head.state_dict()[own].shape
        if found[name].shape != wanted:
            raise CheckpointError(f"tensor {name} is {list(found[name].shape)}, not {list(wanted)}; {REMEDY}")
    state = {own: found[name] for own, name in named.items()}
    if isinstance(head, TreeFlash):
        # Published ones have the gated half first.
        for name in ("gate_up.weight", "gate_up.bias"):
            up, gate = state[name].chunk(2)
            state[name] = torch.cat([gate, up])
    head.load_state_dict(state)
    return head


def markov(tensors: Mapping[str, Tensor]) -> tuple[Markov, dict[str, str]]:
    """DSpark's head, random, and for each of its tensors the published name."""
    named = {"w1.weight": "markov_head.markov_w1.weight", "w2.weight": "markov_head.markov_w2.weight"}
    _all(named.values(), tensors, "Markov")
    (vocab, rank), size = tensors[named["w1.weight"]].shape, len(tensors[named["w2.weight"]])
    confidence, weight = None, tensors.get("confidence_head.proj.weight")
    if weight is not None:
        named |= {f"confidence_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
        _all(named.values(), tensors, "Markov")
        confidence = weight.shape[1] - rank
    return Markov(size, vocab, rank, confidence), named


def treeflash(tensors: Mapping[str, Tensor]) -> tuple[TreeFlash, dict[str, str]]:
    """TreeFlash's head, random, and for each of its tensors the published name."""
    named = {
        "embed_norm.weight": "ar_approximation.norm.weight",
        "gate_up.weight": "ar_approximation.ug.weight",
        "gate_up.bias": "ar_approximation.ug.bias",
        "down.weight": "ar_approximation.d.weight",
    }
    _all(named.values(), tensors, "TreeFlash")
    hidden, inner = tensors[named["down.weight"]].shape
    return TreeFlash(hidden, inner), named


def _all(names: Any, tensors: Mapping[str, Tensor], head: str) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(f"this {head} head lacks {', '.join(missing)}; {REMEDY}")
