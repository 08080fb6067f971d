"""Tiny random models of every causal-LM family of the installed transformers, whose logits look far back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 64
WINDOW = 12
WIDE = 4096
"""A window that no text of the sweep fills; a model built with it shows whether the narrow one is felt."""
LENGTH = 130
FAR = 40
"""How many tokens back the token lies whose change must be felt."""
FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Name of the model class by `model_type`."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "decoder_vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "num_centroids": 8,
    "unpadded_vocab_size": VOCAB, "n_positions": 512, "max_position_embeddings": 512, "n_ctx": 512,
    "max_seq_len": 512, "max_target_positions": 512, "context_length": 512, "model_max_length": 512,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embedding_size": 32, "attention_hidden_size": 32, "emb_dim": 32,
    "word_embed_proj_dim": 32, "embedding_dim": 32, "input_embedding_size": 32, "output_embedding_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "dff": 48, "dim_ff": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "shared_experts_intermediate_size": 32, "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 32, "dense_intermediate_size": 48, "feed_forward_size": 48, "d_inner": 48,
    "moe_shared_expert_intermediate_size": 32, "n_inner": 48,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "attention_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 8, "kv_channels": 8, "swa_head_dim": 8, "global_head_dim": 8, "dim_head": 8, "d_head": 8,
    "rotary_dim": 4, "attention_head_dim": 8, "attention_head_size": 8, "swa_v_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": WINDOW, "o_lora_rank": 16,
    "o_groups": 2, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "zero_expert_num": 2, "n_groups": 1, "first_k_dense_replace": 1,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "mamba_headdim": 8, "n_mamba_heads": 2, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_ngroups": 1,
    "mamba_dt_rank": 8, "ssm_state_size": 16, "state_size": 16, "time_step_rank": 8, "mamba_chunk_size": 16,
    "chunk_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "lru_width": 32,
    "attention_window_size": WINDOW, "window_size": WINDOW, "local_attention": 2 * WINDOW,
    "attention_chunk_size": WINDOW, "keep_window_size": WINDOW, "local_attention_window_len": WINDOW,
    "sliding_window_size": WINDOW, "num_mem_blocks": 1, "adapter_rank": 8, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "max_source_positions": 64, "num_mel_bins": 8, "router_hidden_size": 16,
    "max_window_layers": 2, "image_size": 28, "patch_size": 14, "num_nextn_predict_layers": 0, "projection_dim": 32,
    "original_max_position_embeddings": 256, "block_multiple_of": 8, "dim_model_base": 32, "ple_embed_dim": 8,
    "hc_lowrank": 8, "ngram_vocab_size_base": 97, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 2,
    "rel_extent": 64, "d_rel": 8, "gated_norm_rank": 8, "loop_gate_rank": 8, "query_pre_attn_scalar": 8,
}  # fmt: skip
"""Value of each field of a config, where the family has it."""

_MIXED = ["sliding_attention", "full_attention"] * 2
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
        "encoder_hash_byte_group_vocab": 97,
    },
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "start": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2, "num_hidden_layers": 4},
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 2,
    },
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots1": {
        **_HEADS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": _MIXED,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _MIXED,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {**_HEADS, "moe_topk": 2},
    "granitemoehybrid": {"start": {"layer_types": ["mamba", "attention"] * 16}},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "laguna": {"layer_types": _MIXED},
    "lfm2_moe": {"start": {"layer_types": ["conv", "full_attention"] * 16}},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": {"layer_types": _MIXED},
    "ministral": {**_HEADS, "start": {"layer_types": _MIXED * 8}},
    "nemotron": _HEADS,
    "qwen4_exp_text": _INDEXED,
    "qwen4_exp": {"text_config": _INDEXED},
    "reformer": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (8, 24), "hidden_size": 32},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 8},
    "xlstm": {"chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single families need besides: fields by model type, `start` for the default config."""

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_blocks",
)  # fmt: skip
_WINDOWS = (
    "sliding_window", "attention_window_size", "window_size", "local_attention", "attention_chunk_size",
    "keep_window_size", "local_attention_window_len", "sliding_window_size", "index_topk",
)  # fmt: skip
_MOST_LAYERS = 8


@dataclass
class Tiny:
    """A model of a family, and what is known about the reach of its logits.

    Attributes:
        model: in float32, ready to run.
        far: largest change of the last token's logits, in standard deviations, after a token 40 back was changed.
        window_felt: likewise after all windows were opened; None for a family without windows.
    """

    model: Any
    far: float
    window_felt: float | None


def build(family: str, seed: int = 0, **changes: Any) -> Tiny:
    """Build the tiny model of a family; its weights are scaled up until a token 40 back is felt.

    Args:
        family: a `model_type`.
        seed: of the weights.
        changes: fields of the config.
    """
    overrides = {**_OVERRIDES.get(family, {}), **changes}
    config = tiny_config(family, overrides)
    for scale in (1.0, 2.0, 4.0):
        model = _model(config, seed, scale)
        far = influence(model)
        if far > 0.05:
            break
    return Tiny(model, far, _window_felt(family, overrides, model))


def tiny_config(family: str, overrides: dict[str, Any], wide: bool = False) -> Any:
    """Return the tiny config of a family, made of the fields that its default config has."""
    config_class = CONFIG_MAPPING[family]
    start = overrides.get("start", {})
    if getattr(config_class, "use_sliding_window", None) is False:
        start = {"use_sliding_window": True, "sliding_window": WINDOW, **start}
    default = config_class(**start)
    return config_class(**{**start, **_shrunk(default, overrides, wide)})


def influence(model: Any, back: int = FAR) -> float:
    """Return how far the logits of the last token move when one `back` tokens before is changed."""
    text = torch.randint(2, VOCAB - 4, (1, back + 20), generator=torch.Generator().manual_seed(5))
    other = text.clone()
    other[0, -1 - back] = (other[0, -1 - back] + 7) % (VOCAB - 4)
    one, two = last_logits(model, text), last_logits(model, other)
    return float((one - two).abs().max() / one.std())


@torch.inference_mode()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits [V] of the last token of ids [1, n], by one whole forward without a cache."""
    return model(input_ids=ids, use_cache=False).logits[0, -1].float()


def _model(config: Any, seed: int, scale: float) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith(("A_log", "conv1d.weight")):
                # Families differ in how small they start; a column of 32 wants weights of about 0.2.
                wanted = scale * (0.7 if "embed" in name or "wte" in name else 0.25)
                spread = float(parameter.std())
                parameter.copy_(
                    parameter * (wanted / spread) if spread > 1e-6 else torch.randn_like(parameter) * wanted
                )
            elif not bool(torch.isfinite(parameter).all()):
                parameter.zero_()
    # No end, nothing forced or suppressed: what a family's own generation config asks for is another test's concern.
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def _window_felt(family: str, overrides: dict[str, Any], model: Any) -> float | None:
    config = tiny_config(family, overrides, wide=True)
    if str(config.to_dict()) == str(tiny_config(family, overrides).to_dict()):
        return None
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if {k: v.shape for k, v in wide.state_dict().items()} != {
        k: v.shape for k, v in model.state_dict().items()
    }:
        return None  # the window is a size of some weight
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(2, VOCAB - 4, (1, 60), generator=torch.Generator().manual_seed(6))
    one, two = last_logits(model, ids), last_logits(wide, ids)
    return float((one - two).abs().max() / one.std())


def _shrunk(default: Any, overrides: dict[str, Any], wide: bool) -> dict[str, Any]:
    fixed = {k for k in dir(type(default)) if isinstance(getattr(type(default), k), property)}
    fields = {k: v for k, v in vars(default).items() if not k.startswith("_")}
    fields |= {
        k: getattr(default, k, None) for k in default.attribute_map if getattr(default, k, None) is not None
    }
    fields = {k: v for k, v in fields.items() if default.attribute_map.get(k, k) not in fixed}
    nested = {k: v for k, v in fields.items() if hasattr(v, "to_dict")}
    changes: dict[str, Any] = {
        name: {**value.to_dict(), "per_layer_config": None, **_shrunk(value, overrides.get(name, {}), wide)}
        for name, value in nested.items()
    }
    for part in nested:
        changes[part].pop("per_layer_config")
    changes |= {name: value for name, value in _SIZES.items() if fields.get(name) is not None}
    changes |= {name: WINDOW for name in ("sliding_window",) if name in fields}
    changes |= _layers(default, fields)
    if fields.get("num_key_value_heads") is not None:
        heads, groups = fields.get("num_attention_heads"), fields["num_key_value_heads"]
        changes["num_key_value_heads"] = 4 if heads == groups else min(groups, 2)
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and value >= VOCAB and "token_i" in name:
            changes[name] = VOCAB - 1
    if "is_decoder" in fields:
        changes["is_decoder"] = True
    if default.get_text_config is not None and "vocab_size" in changes:
        changes |= {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    changes |= {k: v for k, v in overrides.items() if k != "start" and k not in nested}
    if wide:
        changes |= {name: WIDE for name in _WINDOWS if changes.get(name)}
    return changes


def _layers(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Keep one layer of each kind, and at least four, of the per-layer lists of a config."""
    count = fields.get("num_hidden_layers") or next((fields[n] for n in _LAYERS if fields.get(n)), None)
    lists = {k: v for k, v in fields.items() if isinstance(v, list | tuple) and count and len(v) == count}
    if not lists:
        return {name: 4 for name in _LAYERS if fields.get(name)}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:_MOST_LAYERS]
    kept = [kinds[i % len(kinds)] for i in range(max(4, len(kinds)))]
    changes: dict[str, Any] = {name: [kind[i] for kind in kept] for i, name in enumerate(lists)}
    return changes | {name: len(kept) for name in _LAYERS if fields.get(name)}
