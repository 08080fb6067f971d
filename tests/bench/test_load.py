"""The load client: blocks and arithmetic without a server, and `ddtree bench serve` against a real one."""

import asyncio
import json

import pytest

import ddtree
import fakes
import talker
from ddtree.bench.load import LoadPlan, TimedReply, drafting_fields, load_table, sse_events
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.cli import main
from ddtree.errors import ConfigError
from ddtree.server.config import ServerLimits
from ddtree.server.engine_thread import EngineThread

PROMPTS = [BenchPrompt(str(i), "chat", ("hello",)) for i in range(10)]


def reply(mode, block=0, tokens=5, latency=1.0, sent=0.0, text="x", error=None, name="a", cached=0):
    return TimedReply(block, mode, name, sent, text, tokens, 10, cached, 0.5, latency, error)


def test_tpot_leaves_the_first_token_out_and_is_not_guessed():
    assert reply("off", tokens=6, latency=2.0).tpot == pytest.approx(0.3)
    assert reply("off", tokens=1).tpot is None
    assert TimedReply(0, "off", "a", 0.0, tokens=6, latency=2.0).tpot is None


def test_a_chunk_with_text_sets_the_time_to_the_first_token_once():
    one = TimedReply(0, "off", "a", 0.0)
    deltas = {"role": "assistant"}, {"reasoning": "so"}, {"content": " it is"}
    for latency, delta in zip((0.1, 0.2, 0.3), deltas, strict=True):
        one.latency = latency
        one.add({"choices": [{"delta": delta}]})
    one.add({"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 7}})
    assert (one.ttft, one.text, one.tokens, one.prompt_tokens) == (0.2, "so it is", 4, 7)


@pytest.mark.parametrize(("concurrency", "sizes"), [(1, [1] * 10), (2, [10]), (4, [16])])
def test_blocks_hold_every_prompt_and_the_modes_take_turns_at_being_first(concurrency, sizes):
    modes = ("off", "tree", "auto")
    steps = list(LoadPlan(PROMPTS, modes, concurrency, turns=2).blocks())
    blocks = [steps[start : start + 3] for start in range(0, len(steps), 3)]
    assert [len(block[0][2]) for block in blocks] == 2 * sizes
    assert [block[0][1] for block in blocks] == [modes[n % 3] for n in range(len(blocks))]
    for number, block in enumerate(blocks):
        assert {mode for _, mode, _ in block} == set(modes) and {n for n, _, _ in block} == {number}
        assert len({tuple(prompt.id for prompt in prompts) for _, _, prompts in block}) == 1
    assert {prompt.id for _, _, prompts in steps for prompt in prompts} == {prompt.id for prompt in PROMPTS}


def test_modes_by_name():
    fields = {"method": "tree", "budget": 16, "depth": 4, "drafter": "lookup"}
    assert drafting_fields("tree:16/4@lookup") == {"ddtree": fields}
    assert drafting_fields("auto:auto") == {"ddtree": {"method": "auto", "budget": "auto"}}
    assert drafting_fields("as served") == {}
    for wrong in ("fast", "tree:", "tree:x", "off@", ""):
        with pytest.raises(ConfigError, match="--drafting"):
            drafting_fields(wrong)


def test_modes_are_compared_block_by_block():
    """In sums a single slow block would decide."""
    replies = [reply("off", n, tokens=10, latency=s) for n, s in enumerate((1, 10, 1))]
    replies += [reply("tree", n, tokens=20, latency=s) for n, s in enumerate((1, 10, 2))]
    off, tree = load_table(replies).rows
    assert off[4] == "1.00 (1.00 to 1.00)" and tree[4].startswith("2.00 ")
    assert tree[3] == "10.0 (6.0 to 15.0)"


def test_answers_at_once_share_the_time_of_their_block():
    replies = [
        reply("off", tokens=5, sent=10.0, latency=1.0),
        reply("off", tokens=15, sent=10.5, latency=3.5),
    ]
    assert load_table(replies).rows[0][3] == "5.0 (5.0 to 5.0)"


def test_the_table_tells_failures_texts_and_cached_prompts():
    replies = [
        reply("off", text="yes"),
        reply("off", name="b", text="also"),
        reply("tree", text="yes", cached=8),
        reply("tree", name="b", text="not"),
        reply("tree", name="c", text="only here"),
        reply("auto", error="503: away"),
    ]
    table = load_table(replies)
    rows = [[row[0], *row[1:3], *row[-2:]] for row in table.rows]
    assert rows == [
        ["off", "2", "0", "0%", "2 of 2"],
        ["tree", "3", "0", "27%", "1 of 2"],
        ["auto", "1", "1", "-", "0 of 0"],
    ]
    assert table.header[4] == "over off"


def test_events_come_complete_however_the_bytes_are_cut():
    raw = 'data: {"a":"\u2028ü"}\n\n: waiting\n\ndata:two\r\n\r\ndata: [DONE]\n\n'.encode()

    async def read(size):
        async def source():
            for i in range(0, len(raw), size):
                yield raw[i : i + size]

        return [data async for data in sse_events(source())]

    for size in (1, 2, 7, 1000):
        assert asyncio.run(read(size)) == ['{"a":"\u2028ü"}', "two", "[DONE]"]


@pytest.fixture(scope="module")
def address():
    loaded = ddtree.load(
        talker.model(max_position_embeddings=1024), "lookup", tokenizer=talker.tokenizer(), max_rows=4,
        prefix_bytes=2**24,
    )  # fmt: skip
    service = EngineThread(loaded, name="tiny", limits=ServerLimits(max_waiting=16))
    service.start()
    fakes.ready(service)
    with loaded, fakes.served(service) as address:
        yield address


@pytest.fixture
def bench(address, tmp_path, capsys):
    """Run the command; gives exit code, standard output and standard error."""

    def call(*more, url=address, texts=("abcabcabcabc", "hello there", "To be, or not to be")):
        path = tmp_path / "prompts.jsonl"
        records = [{"id": f"p{i}", "task": "chat", "turns": [text]} for i, text in enumerate(texts)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        try:
            code = main(["bench", "serve", "--url", url, "--prompts", str(path), "-n", "12", *more])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(("concurrency", "answers"), [("1", 6), ("2", 16)])
def test_drafting_modes_are_compared_in_one_run(bench, tmp_path, concurrency, answers):
    out = tmp_path / "out.json"
    options = ("--concurrency", concurrency, "--turns", "2", "--out", str(out))
    code, told, err = bench("--drafting", "off", "tree:8", *options)
    assert code == 0, err
    found = json.loads(out.read_text())
    assert (found["model"], found["max_tokens"]) == ("tiny", 12)
    for mode in ("off", "tree:8"):
        of_mode = [answer for answer in found["answers"] if answer["mode"] == mode]
        assert len(of_mode) == answers
        assert all(0 < answer["ttft"] <= answer["latency"] and answer["error"] is None for answer in of_mode)
        assert all(0 < answer["tokens"] <= 12 for answer in of_mode)
    rows = [line.split() for line in told.splitlines() if line.startswith(("off ", "tree:8 "))]
    assert [row[1:3] + row[-3:] for row in rows] == [f"{answers} 0 {answers} of {answers}".split()] * 2


def test_failed_answers_are_counted_and_told(bench):
    code, told, _ = bench(texts=("hello", "long " * 400))
    assert code == 1 and "failed: 400: " in told and "the prompt has 2003 tokens" in told
    (row,) = [line.split() for line in told.splitlines() if line.startswith("as served ")]
    assert row[2:4] == ["2", "1"]


def test_what_cannot_be_measured_is_told_in_one_line(bench, tmp_path):
    for options, words in [
        (["--drafting", "warp"], "--drafting 'warp'"),
        (["--drafting", "tree@nobody"], "nobody"),
        (["--concurrency", "0"], "--concurrency"),
        (["--turns", "0"], "--turns"),
        (["--model", "other"], "other"),
        (["--out", str(tmp_path / "no" / "out.json")], "--out"),
    ]:
        code, _, told = bench(*options)
        assert code == 2 and words in told and told.count("\n") == 1, (options, told)
    code, _, told = bench(url="http://127.0.0.1:9")
    assert code == 2 and "is it running" in told
    code, _, told = bench(url="not an address")
    assert code == 2 and "not an address" in told
