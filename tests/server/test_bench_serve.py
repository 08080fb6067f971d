"""`ddtree bench serve` against a real server with a tiny model."""

import json

import pytest

import ddtree
import fakes
import talker
from ddtree.cli import main
from ddtree.server.limits import Limits
from ddtree.server.worker import Service


@pytest.fixture(scope="module")
def address():
    loaded = ddtree.load(
        talker.model(max_position_embeddings=1024), "lookup", tokenizer=talker.tokenizer(), max_rows=4,
        prefix_bytes=2**24,
    )  # fmt: skip
    service = Service(loaded, name="tiny", limits=Limits(max_waiting=16))
    service.start()
    assert service.wait_ready(60)
    with loaded, fakes.served(service) as address:
        yield address


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = (["abcabcabcabc"], ["hello there", "and again"], ["To be, or not to be"])
    records = [{"id": f"p{i}", "task": "chat", "turns": of_one} for i, of_one in enumerate(turns)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def bench(address, prompts, capsys):
    """Run the command; gives exit code, standard output and standard error."""

    def call(*more, url=address):
        arguments = ["--url", url, "--prompts", prompts, "-n", "12", "--ignore-eos", *more]
        try:
            code = main(["bench", "serve", *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


def test_ways_of_drafting_are_compared_in_one_run(bench, tmp_path):
    out = tmp_path / "out.json"
    code, told, err = bench(
        "--drafting", "off", "tree:8", "--concurrency", "1", "2", "--turns", "2", "--out", str(out),
        "--ttft-limit", "60000",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out.read_text())
    assert found["server"]["model"] == "tiny" and found["server"]["version"] == ddtree.__version__
    figures = {(one["load"], one["drafting"]): one for one in found["figures"]}
    assert len(figures) == 4
    for (load, drafting), one in figures.items():
        # 4 conversations for each at once, 2 turns; every third one has two messages.
        conversations = 4 if load == "1 at once" else 8
        assert one["requests"] == 2 * (conversations + (conversations + 1) // 3)
        assert one["failed"] == 0 and one["output_tokens"] == 12 * one["requests"]
        assert one["same_text"] == [one["requests"]] * 2
        assert one["goodput"] == pytest.approx(one["requests"] / one["seconds"])
        assert 0 < one["ttft"]["p50"] <= one["latency"]["p99"]
        assert (one["acceptance"]["drafts"] > 0) == (drafting != "off")
        assert one["itl_token"]["mean"] <= one["itl_chunk"]["mean"]
    rows = [line for line in told.splitlines() if line.startswith(("1 at once, ", "2 at once, "))]
    assert len(rows) == 4 and "over off" in told and "came from the server's prefix cache" in told
    first = found["blocks"][0]["answers"][0]
    assert first["timings"]["predicted_n"] == 12 and first["chunks"][-1][1] == 12


def test_fresh_conversations_find_nothing_in_the_prefix_cache(bench, tmp_path):
    out = tmp_path / "out.json"
    code, told, err = bench("--rate", "50", "--fresh", "--turns", "2", "--messages", "1", "--out", str(out))
    assert code == 0, err
    (one,) = json.loads(out.read_text())["figures"]
    assert one["requests"] == 6 and one["load"] == "50 a second"
    # What the template begins with, and a bracket.
    assert one["cached_tokens"] <= 6 * 5
    assert "same text" not in told and "as served" in told


def test_the_second_turn_of_a_chat_with_and_without_its_prefix(bench, tmp_path):
    out = tmp_path / "out.json"
    code, told, err = bench("--history", "300", "--turns", "2", "--out", str(out))
    assert code == 0, err
    chats = json.loads(out.read_text())["history"]["chats"]
    assert len(chats) == 2 and "second turn, its chat known" in told
    for chat in chats:
        assert abs(chat["first"]["prompt_tokens"] - 300) <= 6
        assert chat["known"]["prompt_tokens"] == chat["new"]["prompt_tokens"]
        assert chat["known"]["cached_tokens"] >= 294 and chat["new"]["cached_tokens"] <= 5


def test_completions_too(bench):
    code, told, err = bench("--endpoint", "completions", "--percentiles")
    assert code == 0, err
    assert "LATENCY: whole answer" in told


def test_failures_are_counted_and_told(bench, tmp_path):
    path = tmp_path / "long.jsonl"
    turns = (["hello"], ["long " * 400])
    path.write_text(
        "".join(json.dumps({"id": i, "task": "a", "turns": one}) + "\n" for i, one in enumerate(turns))
    )
    code, told, _ = bench("--prompts", str(path), "--requests", "2")
    assert code == 1 and "Failed: 400: the prompt has 2003 tokens" in told
    (row,) = [line.split() for line in told.splitlines() if line.startswith("1 at once, ")]
    assert row[5:7] == ["2", "1"]


def test_what_cannot_be_measured_is_told_in_one_line(bench, tmp_path):
    for options, words in [
        (["--drafting", "warp"], "--drafting 'warp'"),
        (["--drafting", "tree@nobody"], "nobody"),
        (["--concurrency", "0"], "concurrency 0"),
        (["--rate", "-1"], "rate -1"),
        (["--history", "0"], "--history 0"),
        (["--model", "other"], "other"),
        (["--out", str(tmp_path / "no" / "out.json")], "--out"),
        (["--extra", "[]"], "--extra"),
        (["--extra", "{"], "--extra"),
    ]:
        code, _, told = bench(*options)
        assert code == 2 and words in told and told.count("\n") == 1, (options, told)
    code, _, told = bench(url="http://127.0.0.1:9")
    assert code == 2 and "is it running" in told
    code, _, told = bench(url="not an address")
    assert code == 2 and "not an address" in told
