"""What draft trees in vLLM are refused for, from a model's config and the engine's arguments."""

from types import SimpleNamespace

import pytest
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
)

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.integrations.vllm import validate
from ddtree.integrations.vllm.settings import PluginSettings


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(), Qwen2Config(), Qwen3Config(), Qwen3MoeConfig(), MistralConfig(sliding_window=None)],
    ids=lambda config: config.model_type,
)
def test_plain_attention_passes(config):
    validate.check_model("m", config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=4096), "sliding-window"),
        (Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=2), "sliding-window"),
        (Gemma2Config(), "soft-caps"),
        (GptOssConfig(), "sinks"),
        (DeepseekV3Config(), "MLA"),
        (MambaConfig(), "state other than"),
        (Qwen3NextConfig(), "linear_attention"),
        (BloomConfig(), "ALiBi"),
        (MptConfig(), "ALiBi"),
        (Gemma3Config(), "multimodal"),
        (Qwen2VLConfig(), "multimodal"),
        (T5Config(), "encoder-decoder"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_are_refused_by_what_they_have(config, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as refused:
        validate.check_model("some/model", config)
    assert "some/model" in str(refused.value) and "--drafting off" in str(refused.value)


def test_every_reason_is_named():
    with pytest.raises(UnsupportedModelError, match="sliding-window attention and soft-caps"):
        validate.check_model("m", Gemma2Config())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("pipeline_parallel_size", 2),
        ("tensor_parallel_size", 2),
        ("async_scheduling", True),
        ("enable_lora", True),
        ("kv_transfer_config", {"kv_connector": "NixlConnector"}),
        ("runner", "pooling"),
        ("scheduler_cls", "mine.Scheduler"),
        ("enable_prompt_embeds", True),
    ],
)
def test_engine_arguments_are_refused_with_their_value(name, value):
    with pytest.raises(ConfigError) as refused:
        validate.check_engine({name: value})
    assert f"{name}={value}" in str(refused.value)


def test_what_vllm_sets_by_itself_passes():
    validate.check_engine({})
    validate.check_engine({"kv_cache_dtype": "auto", "runner": "auto", "scheduler_cls": None})
    validate.check_engine({"async_scheduling": False, "enable_lora": False, "kv_transfer_config": None})
    validate.check_engine({"pipeline_parallel_size": 1, "data_parallel_size": 2})


def engine_config(**changed):
    """As vLLM makes it of the plugin's arguments."""
    given = PluginSettings(nodes=8).engine_arguments()
    return SimpleNamespace(
        speculative_config=changed.get(
            "speculative_config", SimpleNamespace(**given["speculative_config"] | changed)
        ),
        model_config=SimpleNamespace(
            logits_processors=changed.get("logits_processors", given["logits_processors"])
        ),
    )


def test_the_whole_plugin_passes():
    validate.check_plugin(engine_config(), 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative_config": None},
        {"model": "ngram"},
        {"num_speculative_tokens": 7},
        {"logits_processors": None},
        {"logits_processors": ["other:Processor"]},
    ],
)
def test_the_worker_without_a_part_of_the_plugin_is_refused(changed):
    with pytest.raises(ConfigError, match="engine_arguments"):
        validate.check_plugin(engine_config(**changed), 8)
