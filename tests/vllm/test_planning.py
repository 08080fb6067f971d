"""How much is drafted: by what steps cost here, with the same texts and right counts whatever is decided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm
from engines import PROMPTS, TOKENS, answers, counters, drafted, engine, oracle, params
from vllm.config import CompilationMode
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from ddtree import stats
from ddtree.integrations.vllm import drafting, model_runner, timers
from ddtree.policy import cache, calibration
from ddtree.policy.controller import Policy
from scripted import Scripted


class Clock:
    """Time that only costs move: what is decided by it does not depend on the machine."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now


@pytest.fixture
def priced(monkeypatch, tmp_path):
    """Gives a forward pass of so many tokens, and a draft, a price in seconds; returns the clock."""

    def price(forward, draft):
        clock, run, drafted = Clock(), model_runner.TreeRunner._model_forward, Scripted.draft

        def model_forward(self, input_ids=None, *args, **kwargs):
            clock.now += forward(len(input_ids))
            return run(self, input_ids, *args, **kwargs)

        def drafts(self, rows, own):
            clock.now += draft
            return drafted(self, rows, own)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(model_runner.TreeRunner, "_model_forward", model_forward)
        monkeypatch.setattr(Scripted, "draft", drafts)
        for module in (stats, calibration, drafting, model_runner, timers):
            monkeypatch.setattr(module, "time", clock)
        return clock

    return price


def test_auto_measures_decides_and_learns(known, monkeypatch, priced):
    clock = priced(lambda tokens: 0.02 + 1e-5 * tokens, draft=1e-4)
    learnt, latencies = [], []
    learn, schedule = Policy.learn, Scheduler.schedule

    def scheduling(self, *args, **kwargs):
        clock.now += 3e-3
        return schedule(self, *args, **kwargs)

    def watched(self, tree, paths, answers, seconds):
        latencies.append(self.latency)
        learnt.append((max(tree.sizes), [len(path) for path in paths], dict(seconds)))
        return learn(self, tree, paths, answers, seconds)

    monkeypatch.setattr(Policy, "learn", watched)
    monkeypatch.setattr(Scheduler, "schedule", scheduling)
    found = drafted(known, times=3, method="auto", budget="auto")
    assert found["accepted"] > found["steps"] / 2
    assert len(learnt) > 20 and max(width for width, _, _ in learnt) > 1
    assert all(seconds["verify"] > 0.02 and seconds["walk"] > 0 for _, _, seconds in learnt)
    assert all(3e-3 < seconds["commit"] < 4e-3 for _, _, seconds in learnt)
    widths = {point.width for point in latencies[0].points}
    assert {1, 2, 9, 17} <= widths and max(widths) <= 17
    assert latencies[0].draft_points.keys() == {"scripted"}


def test_drafts_that_never_come_true_are_given_up(known, priced):
    priced(lambda tokens: 0.01 + 1e-3 * tokens, draft=2e-3)
    found = drafted(known, oracle(known, Wrong), times=6, method="auto", budget="auto")
    assert found["accepted"] == 0
    assert found["arms"]["off"] > found["steps"] / 2


def test_where_trees_do_not_pay_auto_costs_hardly_more_than_off(known, priced):
    # Four rows without drafts take 30 ms a token; with drafts no better than 36, since every node adds 5 ms.
    clock = priced(lambda tokens: 0.01 + 5e-3 * tokens, draft=5e-3)
    spent = {}
    for method, turns in (("off", 1), ("auto", 6)):
        with engine(known[0], oracle(known), method=method, budget="auto") as made:
            for _ in range(turns):
                before = clock.now
                assert answers(made, PROMPTS, params(TOKENS)) == known[1]
                spent.setdefault(method, []).append(clock.now - before)
    assert max(spent["auto"][1:]) < 1.1 * spent["off"][0]


class Wrong(Scripted):
    """Proposes siblings of the answer alone."""

    name = "wrong"

    def _tree(self, row):
        tree = super()._tree(row)
        tree.tokens[:, 2::2] = (tree.tokens[:, 2::2] + 2) % self.vocab
        return tree


def test_the_engines_own_counts_are_ours(known, monkeypatch):
    seen = {"drafts": 0, "nodes": 0, "accepted": 0}
    observe = SpecDecodingStats.observe_draft

    def counted(self, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        seen["drafts"] += 1
        seen["nodes"] += num_draft_tokens
        seen["accepted"] += num_accepted_tokens
        return observe(self, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    monkeypatch.setattr(SpecDecodingStats, "observe_draft", counted)
    found = drafted(known, disable_log_stats=False)
    assert (found["drafted_steps"], found["nodes"], found["accepted"]) == tuple(seen.values())
    assert sum(found["accepted_per_depth"].values()) == found["accepted"]
    assert sum(found["arms"].values()) == found["steps"]
    produced = found["accepted"] + found["steps"]
    assert produced == len(PROMPTS) * TOKENS


class Failing(Scripted):
    """Breaks after a while."""

    def draft(self, rows, clock):
        if len(rows[0].tokens) > 30:
            raise RuntimeError("broken")
        return super().draft(rows, clock)


def test_a_drafter_that_fails_costs_no_text(known):
    with engine(known[0], oracle(known, Failing)) as made:
        assert answers(made, PROMPTS[:1], params(8)) == [known[1][0][:8]]
        assert counters(made)["drafting_failed"] == 0
        for _ in range(2):
            assert answers(made, PROMPTS[:2], params(TOKENS)) == known[1][:2]
        assert 0 < counters(made)["accepted"] < 60
        assert counters(made)["drafting_failed"] == 1


class Clinging(Scripted):
    """Breaks when a request has ended."""

    def drop_row(self, row):
        raise RuntimeError("broken")


def test_a_drafter_that_fails_at_an_end_costs_no_text(known):
    with engine(known[0], oracle(known, Clinging)) as made:
        assert answers(made, PROMPTS[:1], params(TOKENS)) == known[1][:1]
        before = counters(made)["nodes"]
        assert before
        for _ in range(2):
            assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        assert counters(made)["nodes"] == before


@pytest.mark.parametrize(
    "other", [("0.33.0", CompilationMode.NONE), (vllm.__version__, CompilationMode.VLLM_COMPILE)]
)
def test_another_release_or_way_to_compile_is_timed_anew(other, monkeypatch):
    def place(version, mode):
        monkeypatch.setattr(timers.vllm, "__version__", version)
        config = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))
        return cache.latency_file({"target": "llama", "runtime": timers.runtime(config)})

    here = vllm.__version__, CompilationMode.NONE
    assert place(*here) == place(*here) != place(*other)
