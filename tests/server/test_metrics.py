"""Figures: Prometheus can read them, their names are those clients look for, and they count what happened."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import talker
from ddtree.policy import OFF, Arm, Choice
from ddtree.server.metrics import RoundBook
from ddtree.server.tokens import TokenTexts
from ddtree.stats import Stats
from ddtree.tree import DraftTree

TREE = Arm("tree", ("lookup",))


def a_round(accepted=(2, 0), sizes=(4, 1), arms=(TREE, OFF), verify=0.25):
    """A round whose first `accepted` nodes of each row lie on a path."""
    trees = [chain(size) for size in sizes]
    return SimpleNamespace(
        rows=[SimpleNamespace(tokens=[1, 99]) for _ in sizes],
        choices=[Choice(arm, 8) for arm in arms],
        tree=DraftTree.stack(trees),
        paths=[list(range(count + 1)) for count in accepted],
        seconds={"draft": 0.25, "verify": verify},
    )


def chain(size):
    tree = DraftTree.root([7])
    return DraftTree(
        tree.tokens.new_tensor([[7 + at for at in range(size)]]),
        tree.parents.new_tensor([[max(0, at - 1) for at in range(size)]]),
        tree.depths.new_tensor([list(range(size))]),
        tree.logprobs.new_tensor([[-0.5 * at for at in range(size)]]),
        [size],
    )


def book(name="m", texts=None, now=lambda: 0.0):
    return RoundBook(name, texts or TokenTexts(None), now)


def read(book):
    """name -> {labels: value} of everything that is told."""
    found = {}
    for family in text_string_to_metric_families(book.metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(book, name, **labels):
    return read(book)[name][tuple(sorted(labels.items()))]


def test_load_clients_find_the_lines_they_look_for():
    named = book("a model")
    named.add(a_round())
    lines = named.metrics.text().decode().splitlines()
    told = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("vllm:")}
    labels = 'engine="0",model_name="a_model"'
    assert told.pop(f"vllm:spec_decode_num_drafts_total{{{labels}}}") == 1
    assert told.pop(f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}") == 3
    assert told.pop(f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}") == 2
    per_depth = [
        told.pop(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}}')
        for place in range(16)
    ]
    assert per_depth == [1, 1, *14 * [0]] and not told
    # Clients sum lines by a part of their name.
    assert "_created" not in named.metrics.text().decode()


def test_rounds_are_counted():
    counted, other = book(), book()
    counted.add(a_round())
    counted.add(a_round(accepted=(3,), sizes=(4,), arms=(TREE,)))
    assert value(counted, "ddtree_rounds_total") == 2 and value(other, "ddtree_rounds_total") == 0
    assert value(counted, "ddtree_draft_nodes_total") == 6
    assert value(counted, "ddtree_accepted_tokens_total") == 5
    depths = [value(counted, "ddtree_accepted_tokens_per_depth_total", depth=str(d)) for d in range(1, 5)]
    assert depths == [2, 2, 1, 0]
    assert value(counted, "ddtree_arm_rounds_total", arm="tree@lookup") == 2
    assert value(counted, "ddtree_arm_rounds_total", arm="off") == 1


def test_answers_are_counted():
    counted = book()
    metrics = counted.metrics
    metrics.observe("time_to_first_token", 0.3)
    metrics.observe("queue_time", 0.02)
    metrics.tokens(4, 0.08)
    stats = Stats(prompt_tokens=10, cached_tokens=6, output_tokens=5)
    counted.answer_ended("stop", stats, 0.4, 0.3, 0.02)
    counted.answer_ended("cancelled", Stats(prompt_tokens=3), 0.1)
    found = read(counted)
    assert found["ddtree_requests_total"] == {
        (("finish_reason", "stop"),): 1, (("finish_reason", "cancelled"),): 1,
    }  # fmt: skip
    for name, total in (("prompt", 13), ("cached_prompt", 6), ("generation", 5)):
        assert found[f"ddtree_{name}_tokens_total"] == {(): total}
    for name, count, total in (
        ("time_to_first_token", 1, 0.3), ("inter_token_latency", 4, 0.08), ("inter_chunk_latency", 1, 0.08),
        ("time_per_output_token", 1, 0.02), ("request_latency", 2, 0.5), ("queue_time", 1, 0.02),
    ):  # fmt: skip
        assert found[f"ddtree_{name}_seconds_count"][()] == count
        assert found[f"ddtree_{name}_seconds_sum"][()] == pytest.approx(total)


def test_gauges_time_switches_and_refusals_are_told():
    counted, rows = book(), [3]
    metrics = counted.metrics
    metrics.gauge("rows_running", "Rows.", lambda: rows[0])
    assert value(counted, "ddtree_rows_running") == 3
    rows[0] = 4
    assert value(counted, "ddtree_rows_running") == 4
    metrics.count("time_seconds", 0.5, part="draft")
    metrics.count("time_seconds", 1.0, part="verify")
    metrics.count("refused", reason="busy")
    metrics.count("engine_errors")
    assert value(counted, "ddtree_time_seconds_total", part="verify") == 1
    assert value(counted, "ddtree_refused_total", reason="busy") == 1
    assert value(counted, "ddtree_engine_errors_total") == 1
    policy = SimpleNamespace(state=lambda: {"groups": [controller(3), controller(5, 7)]})
    for _ in range(2):
        counted.look_at(policy, at_once=True)
    # Each switch counts once, however often it is seen.
    assert value(counted, "ddtree_arm_switches_total", before="off", after="tree@lookup") == 2
    assert [switch["round"] for switch in counted.switches] == [3, 7]
    assert [one["load"] for one in counted.controllers] == [3, 5]
    assert [one["reason"] for one in counted.controllers] == ["faster", "faster"]


def controller(rows, last=3):
    """A controller's state as the policy tells it: one switch, in round `last`."""
    switch = {"round": last, "before": "off", "after": "tree@lookup", "reason": "faster"}
    kind = {"method": "auto", "budget": "auto", "members": ["lookup"], "depth": 16, "sampled": False}
    return {**kind, "rows": rows, "arm": "tree@lookup", "switches": [switch]}


def test_rolling_figures_are_of_the_last_while():
    now = [0.0]
    rolling = book(now=lambda: now[0])
    nothing = {"answers": 0, "ttft_p50": None, "tpot_p50": None}
    assert rolling.window_stats() == {
        "tau": None, "tokens_per_second": None, "drafted": nothing, "plain": nothing, "by_arm": {},
    }  # fmt: skip
    rolling.add(a_round())
    for seconds in (1.0, 2.0, 9.0):
        rolling.answer_ended("stop", Stats(arms={"off": 1, "tree@lookup": 1}), 20.0, seconds, seconds / 10)
    rolling.answer_ended("stop", Stats(arms={"off": 2}), 20.0, 1.5, 0.6)
    found = rolling.window_stats()
    assert (found["tau"], found["tokens_per_second"]) == (2.0, 8.0)
    assert found["drafted"] == {"answers": 3, "ttft_p50": 2.0, "tpot_p50": 0.2}
    assert found["plain"] == {"answers": 1, "ttft_p50": 1.5, "tpot_p50": 0.6}
    assert found["by_arm"] == {
        "tree@lookup": {"rounds": 1, "tau": 3.0, "tokens_per_second": 6.0},
        "off": {"rounds": 1, "tau": 1.0, "tokens_per_second": 2.0},
    }
    assert rolling.accepted_per_depth()[:3] == [1.0, 1.0, 0.0]  # of rounds that had a draft
    now[0] = 11.0
    assert rolling.window_stats()["tau"] is None and rolling.window_stats()["by_arm"] == found["by_arm"]


def test_reports_are_throttled_and_lose_no_token():
    now, told = [0.0], []
    reports = book(now=lambda: now[0])
    reports.add(a_round())
    stop = reports.watch(told.append)
    for _ in range(10):
        now[0] += 0.02
        reports.add(a_round())
    assert 3 <= len(told) <= 5
    now[0] += 1
    reports.add(a_round())
    assert sum(report["rounds"] for report in told) == 12 and sum(report["made"] for report in told) == 48
    last = told[-1]
    assert (last["rows"], last["arm"]) == (2, "tree@lookup, off")
    assert (last["accepted"], last["nodes"]) == ([2, 0], [3, 0])
    assert last["tree"] == {
        "row": 0, "tokens": ["7", "8", "9", "10"], "parents": [0, 0, 1, 2], "depths": [0, 1, 2, 3],
        "logprobs": [0.0, -0.5, -1.0, -1.5], "path": [0, 1, 2], "next": "99",
    }  # fmt: skip
    stop()
    stop()
    now[0] += 1
    reports.add(a_round())
    assert told[-1] is last


def test_a_drawn_tree_names_parts_of_characters_as_log_probabilities_do():
    texts = TokenTexts(talker.tokenizer())
    reports = book(texts=texts)
    reports.add(a_round())
    assert reports.tree["tokens"] == [texts(token)[0] for token in (7, 8, 9, 10)]
