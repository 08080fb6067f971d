"""How much is drafted: by what steps cost here, with the same texts and right counts whatever is decided."""

from __future__ import annotations

import pytest
from engines import PROMPTS, answers, counters, engine, params
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from ddtree.policy import Policy
from ddtree.vllm import planning
from scripted import Scripted

TOKENS = 64


@pytest.fixture(scope="module")
def known(checkpoints):
    folder = checkpoints("llama")
    with engine(folder) as stock:
        return folder, [answers(stock, [prompt], params(TOKENS))[0] for prompt in PROMPTS]


def oracle(known):
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, known[1], strict=True)]
    return lambda spec, target: Scripted(texts)


def test_auto_measures_decides_and_learns(known, monkeypatch):
    learnt, latencies = [], []
    learn = Policy.learn

    def watched(self, tree, paths, answers, seconds):
        latencies.append(self.latency)
        learnt.append((max(tree.sizes), [len(path) for path in paths], dict(seconds)))
        return learn(self, tree, paths, answers, seconds)

    monkeypatch.setattr(planning.Policy, "learn", watched)
    with engine(known[0], oracle(known), method="auto", budget="auto") as made:
        for _ in range(3):
            assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        found = counters(made)
    assert found["accepted"] > found["steps"] / 2
    assert len(learnt) > 20 and max(width for width, _, _ in learnt) > 1
    assert all(seconds["verify"] > 0 and seconds["walk"] > 0 for _, _, seconds in learnt)
    widths = {point.width for point in latencies[0].points}
    assert {1, 2, 9, 17} <= widths and max(widths) <= 17
    assert latencies[0].covers(["scripted"])


def test_drafts_that_never_come_true_are_given_up(known):
    texts = [prompt + text for prompt, text in zip(PROMPTS, known[1], strict=True)]
    with engine(known[0], lambda spec, target: Wrong(texts), method="auto", budget="auto") as made:
        for _ in range(6):
            assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        found = counters(made)
    assert found["accepted"] == 0
    assert found["arms"]["off"] > found["steps"] / 2


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
    with engine(known[0], oracle(known), disable_log_stats=False) as made:
        assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        found = counters(made)
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
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, known[1], strict=True)]
    with engine(known[0], lambda spec, target: Failing(texts)) as made:
        for _ in range(2):
            assert answers(made, PROMPTS[:2], params(TOKENS)) == known[1][:2]
        assert 0 < counters(made)["accepted"] < 60


class Clinging(Scripted):
    """Breaks when a request has ended."""

    def drop_row(self, row):
        raise RuntimeError("broken")


def test_a_drafter_that_fails_at_an_end_costs_no_text(known):
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, known[1], strict=True)]
    with engine(known[0], lambda spec, target: Clinging(texts)) as made:
        assert answers(made, PROMPTS[:1], params(TOKENS)) == known[1][:1]
        before = counters(made)["nodes"]
        assert before
        for _ in range(2):
            assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        assert counters(made)["nodes"] == before
