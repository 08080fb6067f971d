"""The load client's arithmetic: arrivals, blocks, times of an answer, percentiles, counters. No server."""

import asyncio
import json
import random
from itertools import pairwise

import pytest

from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.serving import events, figures, report
from ddtree.bench.serving.answer import Answer
from ddtree.bench.serving.arrivals import Load, arrivals
from ddtree.bench.serving.counters import Counters
from ddtree.bench.serving.figures import Limits
from ddtree.bench.serving.jobs import Plan, Step
from ddtree.bench.serving.runner import Asked, Block
from ddtree.bench.serving.settings import AS_SERVED, Setting
from ddtree.errors import ConfigError

PROMPTS = [BenchPrompt(str(i), "chat", ("hello",)) for i in range(10)]


def answer(times, tokens, latency, text="x", error=None, **usage):
    usage = {"completion_tokens": tokens[-1] if tokens and tokens[-1] else None, **usage}
    chunks = list(zip(times, tokens, strict=True))
    return Answer(0.0, 200, error, text, chunks, latency, "length", usage)


def block(setting, answers, seconds=1.0, number=0, load=None, counters=None, turn=0):
    step = Step(load or Load("concurrency", 1), Setting(setting, {}), turn, number, PROMPTS[: len(answers)])
    asked = [Asked(str(i), "chat", i, 0, one) for i, one in enumerate(answers)]
    return Block(step, asked, seconds, counters or Counters())


def test_times_of_an_answer_whose_chunks_hold_several_tokens():
    one = answer([0.5, 0.75, 1.5], [1, 2, 5], latency=2.0)
    assert one.ttft == 0.5
    assert one.tpot == pytest.approx((2.0 - 0.5) / 4)
    assert one.chunk_gaps == [0.25, 0.75]
    assert one.token_gaps == [0.25, 0.25, 0.25, 0.25]


def test_what_a_server_does_not_tell_is_not_guessed():
    one = answer([0.5, 0.75], [None, None], latency=1.0, completion_tokens=None)
    assert one.token_gaps is None and one.tpot is None and one.chunk_gaps == [0.25]
    assert answer([0.5], [1], latency=1.0).tpot is None
    assert answer([], [], latency=1.0).ttft is None


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = arrivals(4000, 8.0, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and times == sorted(times) and times == arrivals(4000, 8.0, seed=1)
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.1) and variance == pytest.approx(mean**2, rel=0.2)


def most_at_once(load, jobs, seconds):
    now = most = 0

    async def work(job):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(seconds)
        now -= 1

    asyncio.run(load.run(range(jobs), work, seed=0))
    assert now == 0
    return most


def test_a_closed_loop_holds_its_concurrency_and_an_open_one_does_not_wait():
    assert most_at_once(Load("concurrency", 3), 9, 0.002) == 3
    assert most_at_once(Load("concurrency", 3), 2, 0.002) == 2
    assert most_at_once(Load("rate", 2000.0), 12, 0.2) == 12


@pytest.mark.parametrize(
    "kind, value", [("concurrency", 0), ("concurrency", 1.5), ("rate", 0), ("rate", float("inf"))]
)
def test_impossible_loads_are_refused(kind, value):
    with pytest.raises(ConfigError, match="must be"):
        Load(kind, value)


def test_blocks_hold_every_prompt_and_the_settings_take_turns_at_being_first():
    settings = [Setting.parse(name) for name in ("off", "tree", "auto")]
    loads = [Load("concurrency", 1), Load("concurrency", 2), Load("rate", 5.0)]
    plan = Plan(PROMPTS, loads, settings)
    assert [len(one) for one in plan.blocks(loads[0])] == [1] * 10
    assert [len(one) for one in plan.blocks(loads[1])] == [10]
    assert [len(one) for one in plan.blocks(loads[2])] == [10]
    assert [len(one) for one in Plan(PROMPTS, loads, settings, requests=25).blocks(loads[1])] == [9, 8, 8]
    steps = [step for step in plan.steps() if step.load == loads[0]]
    firsts = [steps[i].setting.name for i in range(0, len(steps), 3)]
    assert firsts[:6] == ["off", "tree", "auto"] * 2
    for i in range(0, len(steps), 3):
        assert {step.setting.name for step in steps[i : i + 3]} == {"off", "tree", "auto"}
        assert len({tuple(p.id for p in step.prompts) for step in steps[i : i + 3]}) == 1


def test_a_plan_that_cannot_reach_its_concurrency_is_refused():
    with pytest.raises(ConfigError, match="--block 2 is less than the 4"):
        Plan(PROMPTS, [Load("concurrency", 4)], [AS_SERVED], block=2)
    with pytest.raises(ConfigError, match="--turns 0"):
        Plan(PROMPTS, [Load("concurrency", 1)], [AS_SERVED], turns=0)


def test_settings_by_name():
    assert Setting.parse("tree:16/4@lookup").fields == {
        "method": "tree", "budget": 16, "depth": 4, "drafter": "lookup",
    }  # fmt: skip
    assert Setting.parse("auto:auto").fields == {"method": "auto", "budget": "auto"}
    for wrong in ("fast", "tree:", "tree:x", "off@", ""):
        with pytest.raises(ConfigError, match="--drafting"):
            Setting.parse(wrong)


def test_percentiles_lie_between_the_values_in_proportion():
    values = random.Random(0).sample(range(101), 101)
    assert [figures.percentile(values, share) for share in (0, 50, 95, 100)] == [0, 50, 95, 100]
    assert figures.percentile([1.0, 2.0], 50) == 1.5
    assert figures.percentile([3.0], 99) == 3.0
    assert figures.spread([]) is None


def test_counters_are_read_as_vllm_writes_them():
    before = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2.0\n'
    after = """# HELP vllm:spec_decode_num_drafts_total Rounds.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1e+01
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
other_total 7
"""
    delta = Counters.read(after) - Counters.read(before)
    assert (delta.drafts, delta.drafted, delta.accepted) == (10, 80, 25)
    assert delta.tau == 3.5 and delta.positions == {0: 15, 1: 10}
    assert Counters.read("").tau is None


def test_goodput_counts_what_kept_to_all_limits():
    answers = [
        answer([0.1, 0.2], [1, 11], 1.1),
        answer([0.1, 0.2], [1, 2], 1.1),
        answer([0.9, 1.0], [1, 11], 1.9),
        answer([], [], 0.1, error="429: busy"),
    ]
    group = figures.Group([block("off", answers, seconds=2.0)])
    assert group.goodput(Limits(ttft=0.5)) == 1.0
    assert group.goodput(Limits(tpot=0.2)) == 1.0
    assert group.goodput(Limits(ttft=0.5, tpot=0.2)) == 0.5
    assert group.failed == 1 and group.throughput == (11 + 2 + 11) / 2


def test_ways_are_compared_block_by_block():
    def at(speed):
        return [answer([0.1], [1], 0.5, completion_tokens=speed)]

    blocks = [block("off", at(10), number=n, seconds=s) for n, s in enumerate((1, 10, 1))]
    blocks += [block("tree", at(20), number=n, seconds=s) for n, s in enumerate((1, 10, 2))]
    off, tree = figures.groups(blocks).values()
    # In sums a single slow block would decide.
    assert tree.over(off) == 2.0 and off.over(off) == 1.0


def test_tables_keep_the_order_of_the_first_load():
    loads = [Load("concurrency", 1), Load("concurrency", 2)]
    names = [("off", 0), ("auto", 0), ("auto", 1), ("off", 1)]
    blocks = [block(name, [answer([0.1], [1], 0.5)], load=loads[load]) for name, load in names]
    assert list(figures.groups(blocks)) == [
        ("1 at once", "off"), ("1 at once", "auto"), ("2 at once", "off"), ("2 at once", "auto"),
    ]  # fmt: skip


def test_a_report_tells_ratios_texts_failures_and_cached_prompts():
    cached = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}
    blocks = [
        block("off", [answer([0.1, 0.2], [1, 5], 0.5, "yes", **cached)], counters=Counters()),
        block("tree", [answer([0.1, 0.2], [1, 15], 0.5, "no", **cached)], counters=Counters(2, 9, 5)),
        block("auto", [answer([], [], 0.5, error="503: away")]),
    ]
    told = report.Report(blocks, Limits(ttft=1.0), comparable=True)
    text = told.text(percentiles=True)
    line = next(line for line in text.splitlines() if line.startswith("1 at once, tree"))
    assert "3.00x" in line and "3.50" in line and "0 of 1" in line and "15.0" in line
    for words in ("good/s", "Failed: 503: away", "16 of 20 prompt tokens", "ITL by token", "of the best"):
        assert words.lower() in text.lower(), text
    record = json.loads(json.dumps(told.record()))
    assert record["figures"][1]["over_first"] == 3.0 and record["figures"][1]["ttft"]["p99"] == 0.1
    assert record["blocks"][1]["answers"][0]["chunks"] == [[0.1, 1], [0.2, 15]]
    assert "same text" not in report.Report(blocks, Limits(), comparable=False).text()


def test_events_come_whole_however_the_bytes_are_cut():
    raw = 'data: {"a":"\u2028ü"}\n\n: waiting\n\ndata:two\r\n\r\ndata: [DONE]\n\n'.encode()

    async def read(size):
        async def source():
            for i in range(0, len(raw), size):
                yield raw[i : i + size]

        return [data async for data in events.events(source())]

    for size in (1, 2, 7, 1000):
        assert asyncio.run(read(size)) == ['{"a":"\u2028ü"}', "two", "[DONE]"]
