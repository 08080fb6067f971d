"""Reads of the device in a round, by method: each makes the host wait for all that was queued before it."""

import pytest
import torch

import tiny
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.policy.controller import Policy
from ddtree.policy.latency import LatencyTable, Sample
from driving import answered, finish, greedy
from host_reads import HostReads

PROMPTS = [tiny.prompt(length, length) for length in (9, 17)]
SAMPLED = {"temperature": 0.8, "seed": 5}
FILTERED = {**SAMPLED, "top_p": 0.9}


@pytest.fixture
def on_a_device(monkeypatch):
    """Work as on a GPU, where nothing is read without need; the tensors stay here."""
    monkeypatch.setattr("ddtree.tree.tree._HOST", "none")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)


@pytest.mark.parametrize("inference", [False, True])
def test_every_kind_of_read_is_counted(inference):
    with torch.inference_mode(inference):
        values = torch.tensor([1.0, 2.0]) * 2
        with HostReads() as reads:
            values.tolist(), values.numpy(), float(values[0]), int(values.argmax()), bool(values.any())
            values[values > 1], values.nonzero(), torch.equal(values, values), values.sum().item()
            values + 1, values[torch.tensor([0])], values.max(dim=0)
        kinds = ("tolist", "numpy", "float", "int", "bool", "item", "equal")
        assert reads.counts == {**dict.fromkeys(kinds, 1), "nonzero": 2}
        values.tolist()
        assert reads.total == 9


def reads_a_round(engine, params, **options):
    """The most reads of a round of two rows, with the texts."""
    sequences = [engine.add(prompt, params, **options) for prompt in PROMPTS]
    while len(engine.running) < len(sequences):
        engine.step()
    counts = []
    while len(engine.running) == len(sequences):
        with HostReads() as reads:
            engine.step()
        counts.append(reads.total)
    finish(engine)
    assert len(counts) > 3
    return max(counts), [sequence.tokens for sequence in sequences]


# Reads a round by kind of drafter and rule. A block drafter's tree is known by its shape; where children depend on
# their parents, the host has to see how many there are, once to grow a tree and once to cut it.
PINNED = {
    ("none", "greedy"): 1,
    ("none", "sampled"): 1,
    ("tree", "greedy"): 1,
    ("tree", "sampled"): 1,
    ("tree", "coupled"): 1,
    ("lookup", "greedy"): 1,
    ("lookup", "sampled"): 1,
    ("continuity", "greedy"): 3,
    ("markov", "greedy"): 3,
    ("treeflash", "greedy"): 3,
    ("domino", "greedy"): 3,
    ("d2sd", "greedy"): 4,
    ("draft", "greedy"): {6: 6, 30: 8},
}
RULES = {"greedy": {}, "sampled": SAMPLED, "coupled": SAMPLED}


@pytest.mark.parametrize("budget", [6, 30])
@pytest.mark.parametrize(("kind", "rule"), PINNED)
def test_a_round_reads_as_often_as_is_pinned(kind, rule, budget, on_a_device):
    model, params = tiny.model(), greedy(24, **RULES[rule])
    drafter = None if kind == "none" else tiny.drafter(kind, model, coupled=rule == "coupled")
    found, texts = reads_a_round(Engine(Target(model), drafter), params, budget=budget)
    pinned = PINNED[kind, rule]
    assert found == (pinned[budget] if isinstance(pinned, dict) else pinned)
    assert texts == [one.tokens for one in answered(Engine(Target(model)), *((p, params) for p in PROMPTS))]


def test_the_policy_reads_the_probabilities_of_a_tree_once(on_a_device):
    model = tiny.model()
    engine = Engine(Target(model), tiny.drafter("tree", model))
    points = [Sample(width, 1, 0.0, 0.01 + 0.0001 * width) for width in (1, 9, 65)]
    engine.policy = Policy(LatencyTable(points, {"dflash": points}, machine={}))
    found, _ = reads_a_round(engine, greedy(24), method="auto", budget="auto")
    assert found == 2


def test_rows_with_filters_and_processors_are_read_node_by_node_beside_plain_ones(on_a_device):
    model = tiny.model()
    every = [greedy(24), greedy(24, **SAMPLED), greedy(24, **FILTERED), greedy(24, repetition_penalty=1.3)]
    asked = [
        (tiny.prompt(length, length), params) for length, params in zip((9, 17, 5, 30), every, strict=True)
    ]
    drafted = answered(Engine(Target(model), tiny.drafter("tree", model)), *asked)
    assert [one.tokens for one in drafted] == [one.tokens for one in answered(Engine(Target(model)), *asked)]


def test_logits_that_are_no_numbers_are_an_error_as_they_are_node_by_node(on_a_device):
    model = tiny.model()
    engine = Engine(Target(model), tiny.drafter("tree", model))
    sequence = engine.add(PROMPTS[0], greedy(24))
    engine.step()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    engine.step()
    assert sequence.finish_reason == "error"
    assert "NaN or infinite" in str(sequence.error)
