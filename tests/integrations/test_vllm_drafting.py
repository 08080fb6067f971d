"""Drafting for vLLM's requests, without vLLM: what is counted, and what the policy learns."""

from types import SimpleNamespace

import pytest

from ddtree import stats
from ddtree.engine.planner import Plan
from ddtree.integrations.vllm import drafting
from ddtree.integrations.vllm.drafting import DraftScheduler
from ddtree.integrations.vllm.request_state import StepRow, Verified, chain
from ddtree.policy import OFF, Arm, Choice
from ddtree.stats import Clock
from ddtree.tree import DraftTree

TREES = [chain([1, 2, 3]), chain([4, 5])]
BEFORE = {"a": Verified([0], [1]), "b": Verified([0], [4])}
AFTER = {"a": Verified([0, 1], [2, 7]), "b": Verified([0], [6])}


class FixedPlanner:
    """Drafts the same trees each time, and keeps what it is to learn."""

    def __init__(self, decided=True):
        self.decided = decided
        self.learnt = []

    def plan(self, rows, most, places):
        choices = [Choice(Arm("tree", ("lookup",)), 2) for _ in places]
        return Plan(choices, DraftTree.stack([TREES[place] for place in places]), self.decided)

    def learn(self, plan, paths, answers, seconds):
        self.learnt.append((paths, answers, seconds))


@pytest.fixture
def step(monkeypatch):
    """Run one step of some requests on a scheduler; time stands still but for what the step takes."""
    planner, seconds, clock = FixedPlanner(), Clock(), SimpleNamespace(now=0.0)
    for module in (drafting, stats):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    states = {
        name: SimpleNamespace(name=name, drafts=True, tokens=[], ended=bool, drafted=None, arm=OFF)
        for name in "ab"
    }
    scheduler = DraftScheduler(list(states.values()), planner, seconds, most_nodes=16, most_tokens=1024)

    def run(verified, names="ab", trees=TREES):
        clock.now += 0.5
        seconds.seconds["verify"] += 0.25
        rows = [StepRow(states[name], 0, 0, 0, 10, tree) for name, tree in zip(names, trees, strict=True)]
        return scheduler.draft(rows, verified)

    return SimpleNamespace(run=run, planner=planner, scheduler=scheduler)


def test_a_round_that_is_verified_as_drafted_is_learnt_with_its_time(step):
    assert step.run(BEFORE, trees=[chain([0]), chain([0])]) == {"a": [2, 3], "b": [5]}
    assert step.planner.learnt == []
    step.run(AFTER)
    ((paths, answers, seconds),) = step.planner.learnt
    assert (paths, answers) == ([[0, 1], [0]], [[2, 7], [6]])
    assert seconds["verify"] == 0.25
    assert seconds["commit"] == 0.25


@pytest.mark.parametrize(
    ("verified", "names", "trees"),
    [
        (AFTER, "ab", [chain([1, 2]), TREES[1]]),  # the scheduler cut a tree
        ({"a": AFTER["a"]}, "a", TREES[:1]),  # a request waits
        ({"a": AFTER["a"]}, "ab", TREES),  # a prompt is processed beside it
    ],
)
def test_a_round_that_is_not_verified_as_drafted_is_not_learnt(step, verified, names, trees):
    step.run(BEFORE)
    step.run(verified, names, trees)
    assert step.planner.learnt == []


def test_a_policy_that_did_not_decide_learns_nothing(step):
    step.planner.decided = False
    step.run(BEFORE)
    step.run(AFTER)
    assert step.planner.learnt == []


def test_a_request_that_a_step_passes_over_is_counted_as_it_was_drafted(step):
    step.run(BEFORE, trees=[chain([0]), chain([0])])
    step.run({"a": AFTER["a"]}, "a", TREES[:1])
    step.run({"b": AFTER["b"]}, "b", TREES[1:])
    counters = step.scheduler.counters.as_dict()
    assert counters["arms"] == {"off": 2, "tree@lookup": 2}
    assert (counters["steps"], counters["drafted_steps"]) == (4, 2)
    assert (counters["nodes"], counters["accepted"]) == (3, 1)
    assert counters["accepted_per_depth"] == {"1": 1}
