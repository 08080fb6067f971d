"""Models and engines that draft trees in vLLM cannot be exact with, or were never tried with: refused at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.integrations.vllm.settings import ADMISSION, PROPOSER

_INSTEAD = "use ddtree's own engine, or plain vLLM with --drafting off"
_PLAIN_KV = ("auto", "float32", "float", "bfloat16", "float16", "half")
# Model types whose attention has learned sinks, or biases by distance, whatever their config says.
_SINKS = ("gpt_oss", "gpt-oss")
_ALIBI = ("bloom", "mpt", "jais")
_WINDOWS = ("sliding_attention", "chunked_attention")


def _one(value: Any) -> bool:
    return value == 1


def _off(value: Any) -> bool:
    return not value


# Arguments of vLLM's engine by the section of its VllmConfig: what is refused, and which values are not.
_ENGINE: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "cache_config": {
        "kv_cache_dtype": ("quantized keys and values", lambda value: str(value) in _PLAIN_KV),
        "kv_offloading_size": ("offloaded keys and values", _off),
        "kv_sharing_fast_prefill": ("shared keys and values", _off),
    },
    "parallel_config": {
        "pipeline_parallel_size": ("pipeline parallelism", _one),
        "tensor_parallel_size": ("tensor parallelism", _one),
        "decode_context_parallel_size": ("context parallelism", _one),
        "prefill_context_parallel_size": ("context parallelism", _one),
        "enable_expert_parallel": ("expert parallelism", _off),
        "nnodes": ("several machines", _one),
    },
    "scheduler_config": {
        "async_scheduling": ("asynchronous scheduling", _off),
        "scheduler_cls": ("another scheduler", lambda value: "vllm.v1.core.sched" in str(value)),
    },
    "model_config": {
        "runner": ("a model that does not generate", lambda value: value in ("auto", "generate")),
        "logprobs_mode": ("log-probabilities after processing", lambda value: str(value).startswith("raw")),
        "enable_prompt_embeds": ("prompts as embeddings", _off),
    },
    "": {
        "enable_lora": ("LoRA", _off),
        "kv_transfer_config": ("keys and values from elsewhere", _off),
        "ec_transfer_config": ("encoder outputs from elsewhere", _off),
        "watermark_config": ("watermarks", _off),
        "diffusion_config": ("diffusion", _off),
    },
}
# Names that differ there.
_FIELDS = {"kv_cache_dtype": "cache_dtype", "runner": "runner_type", "enable_lora": "lora_config"}


def check_model(name: str, config: Any) -> None:
    """Refuse a model on which trees cannot be verified in vLLM.

    Args:
        name: of the model, for the message.
        config: of Hugging Face transformers.

    Raises:
        UnsupportedModelError: names every reason.
    """
    reasons = model_reasons(config)
    if reasons:
        raise UnsupportedModelError(
            f"{name} {' and '.join(reasons)}: draft trees are not verified on it in vLLM; {_INSTEAD}"
        )


def check_engine(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM's engine that trees cannot be exact with.

    Args:
        arguments: by the names of vLLM's `EngineArgs`; missing ones have vLLM's defaults.

    Raises:
        ConfigError: names every one with its value.
    """
    reasons = [
        f"{reason} ({name}={arguments[name]})"
        for limits in _ENGINE.values()
        for name, (reason, fits) in limits.items()
        if arguments.get(name) is not None and not fits(arguments[name])
    ]
    if reasons:
        raise ConfigError(
            f"{' and '.join(reasons)}: not with draft trees in vLLM; leave it out, or {_INSTEAD}"
        )


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse what `check_engine` and `check_model` refuse, for vLLM's `VllmConfig`, with their errors."""
    arguments: dict[str, Any] = {}
    for section, limits in _ENGINE.items():
        owner = getattr(vllm_config, section) if section else vllm_config
        arguments |= {name: getattr(owner, _FIELDS.get(name, name)) for name in limits}
    check_engine(arguments)
    model = vllm_config.model_config
    check_model(str(model.model), model.hf_config)


def check_plugin(vllm_config: Any, nodes: int) -> None:
    """Refuse an engine that has the worker without the rest of the plugin.

    Without its check of requests, requests that cannot be exact would be answered; with fewer drafted tokens than a
    tree may have, vLLM's counters would fail.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        nodes: most drafted nodes of a request in a step, e.g. 32.

    Raises:
        ConfigError: a part is missing, or another one is in its place.
    """
    drafting = vllm_config.speculative_config
    if (
        drafting is None
        or drafting.model != PROPOSER
        or drafting.num_speculative_tokens < nodes
        or ADMISSION not in (vllm_config.model_config.logits_processors or ())
    ):
        raise ConfigError(
            "the engine has ddtree's worker without the rest of the plugin: give it "
            "PluginSettings.engine_arguments() as they are"
        )


def model_reasons(config: Any) -> list[str]:
    """Return why trees cannot be verified on a model, each as a verb phrase, e.g. "has attention sinks"."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    kind = str(getattr(text, "model_type", ""))
    state = sorted(kinds - {"full_attention", *_WINDOWS})
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = {
        "is multimodal": text is not config or _has(config, "vision_config", "audio_config"),
        "is an encoder-decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "has sliding-window attention": _windowed(text, kinds),
        "soft-caps its attention scores": _has(text, "attn_logit_softcapping"),
        "has attention sinks": kind in _SINKS or _has(text, "attention_sink_size", "num_attention_sinks"),
        "has latent attention (MLA)": _has(text, "kv_lora_rank"),
        f"keeps state other than keys and values ({', '.join(state) or 'recurrent'})": bool(state)
        or _has(text, "mamba_d_state", "ssm_cfg", "state_size", "linear_num_key_heads", "layers_block_type"),
        "biases attention by distance (ALiBi)": kind in _ALIBI or bool(getattr(text, "alibi", False)),
        "has positions in several dimensions (M-RoPE)": isinstance(rope, Mapping) and "mrope_section" in rope,
        "attends bidirectionally": bool(getattr(text, "use_bidirectional_attention", None)),
        "shares keys and values between layers": bool(getattr(text, "num_kv_shared_layers", 0)),
    }
    return [reason for reason, true in found.items() if true]


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, None) is not None for name in names)


def _windowed(text: Any, kinds: set[str]) -> bool:
    if kinds:
        return bool(kinds & set(_WINDOWS))
    return _has(text, "sliding_window") and getattr(text, "use_sliding_window", True) is not False
