"""What draft trees in vLLM cannot be exact with, or were never tried with: named before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.integrations.vllm.settings import ADMISSION, PROPOSER

INSTEAD = "use ddtree's own engine, or plain vLLM with --drafting off"
_PLAIN_KV = ("auto", "float32", "float", "bfloat16", "float16", "half")
# Model types whose attention has learned sinks, or biases by distance, whatever their config says.
_SINKS = ("gpt_oss", "gpt-oss")
_ALIBI = ("bloom", "mpt", "jais")
_WINDOWS = ("sliding_attention", "chunked_attention")


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
            f"{name} {' and '.join(reasons)}: draft trees are not verified on it in vLLM; {INSTEAD}"
        )


def check_engine(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM's engine that trees cannot be exact with.

    Args:
        arguments: by the names of vLLM's `EngineArgs`; those that are missing are as vLLM sets them.

    Raises:
        ConfigError: names every one with its value.
    """
    reasons = engine_reasons(arguments)
    if reasons:
        raise ConfigError(
            f"{' and '.join(reasons)}: not with draft trees in vLLM; leave it out, or {INSTEAD}"
        )


def check_plugin(vllm_config: Any, nodes: int) -> None:
    """Refuse an engine that has the worker without the rest of the plugin.

    Without its check of requests, what cannot be exact would be answered; with fewer drafted tokens than a tree may
    have, vLLM's counters would fail.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        nodes: most drafted nodes of a request in a step.

    Raises:
        ConfigError: a part is missing, or another stands in its place.
    """
    drafting = vllm_config.speculative_config
    if (
        drafting is None
        or drafting.model != PROPOSER
        or drafting.num_speculative_tokens < nodes
        or ADMISSION not in (vllm_config.model_config.logits_processors or ())
    ):
        raise ConfigError(
            "the engine has ddtree's worker without the rest of the plugin: give it Settings.engine_arguments() as "
            "they are"
        )


def check_vllm_config(vllm_config: Any) -> None:
    """`check_engine` and `check_model` for a config that vLLM has made of its arguments.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        ConfigError, UnsupportedModelError: as they do.
    """
    check_engine(engine_arguments(vllm_config))
    model = vllm_config.model_config
    check_model(str(model.model), model.hf_config)


def model_reasons(config: Any) -> list[str]:
    """What stands against a model, each as the rest of a sentence that begins with its name."""
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


def engine_reasons(arguments: Mapping[str, Any]) -> list[str]:
    """The engine's arguments that stand against trees, with their values."""
    return [
        f"{reason} ({name}={arguments[name]})"
        for name, (reason, fits) in _ENGINE.items()
        if arguments.get(name) is not None and not fits(arguments[name])
    ]


def engine_arguments(vllm_config: Any) -> dict[str, Any]:
    """The arguments that `engine_reasons` looks at, out of a `VllmConfig`."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return {
        "kv_cache_dtype": cache.cache_dtype,
        "kv_offloading_size": cache.kv_offloading_size,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "nnodes": parallel.nnodes,
        "async_scheduling": scheduler.async_scheduling,
        "scheduler_cls": scheduler.scheduler_cls,
        "runner": model.runner_type,
        "logprobs_mode": model.logprobs_mode,
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "enable_lora": vllm_config.lora_config is not None,
        "kv_transfer_config": vllm_config.kv_transfer_config,
        "ec_transfer_config": vllm_config.ec_transfer_config,
        "watermark_config": vllm_config.watermark_config,
        "diffusion_config": vllm_config.diffusion_config,
    }


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, None) is not None for name in names)


def _windowed(text: Any, kinds: set[str]) -> bool:
    if kinds:
        return bool(kinds & set(_WINDOWS))
    return _has(text, "sliding_window") and getattr(text, "use_sliding_window", True) is not False


def _one(value: Any) -> bool:
    return value == 1


def _off(value: Any) -> bool:
    return not value


_Fits = Callable[[Any], bool]
_ENGINE: dict[str, tuple[str, _Fits]] = {
    "kv_cache_dtype": ("quantized keys and values", lambda value: str(value) in _PLAIN_KV),
    "kv_offloading_size": ("offloaded keys and values", _off),
    "kv_sharing_fast_prefill": ("shared keys and values", _off),
    "kv_transfer_config": ("keys and values from elsewhere", _off),
    "ec_transfer_config": ("encoder outputs from elsewhere", _off),
    "pipeline_parallel_size": ("pipeline parallelism", _one),
    "tensor_parallel_size": ("tensor parallelism", _one),
    "decode_context_parallel_size": ("context parallelism", _one),
    "prefill_context_parallel_size": ("context parallelism", _one),
    "enable_expert_parallel": ("expert parallelism", _off),
    "nnodes": ("several machines", _one),
    "async_scheduling": ("asynchronous scheduling", _off),
    "scheduler_cls": ("another scheduler", lambda value: value is None or "vllm.v1.core.sched" in str(value)),
    "runner": ("a model that does not generate", lambda value: value in ("auto", "generate")),
    "logprobs_mode": ("log-probabilities after processing", lambda value: str(value).startswith("raw")),
    "enable_prompt_embeds": ("prompts as embeddings", _off),
    "enable_lora": ("LoRA", _off),
    "watermark_config": ("watermarks", _off),
    "diffusion_config": ("diffusion", _off),
}
