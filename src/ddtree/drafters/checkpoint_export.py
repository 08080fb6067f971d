"""Writing a DFlash drafter in z-lab's layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.drafters.dflash_net import DFlashConfig, DFlashNet
from ddtree.errors import ConfigError

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
