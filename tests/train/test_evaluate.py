"""Acceptance along known answers."""

import pytest
import torch

from ddtree.train.data import Example
from ddtree.train.evaluate import replay
from ddtree.tree import DraftTree


class Knowing:
    """Drafts the true continuation, right down to a given depth, and checks what it is shown."""

    name = "knowing"
    feature_layers = (0,)
    max_depth = 8

    def __init__(self, texts, right):
        self.texts, self.right = texts, right
        self.seen = []

    def add_row(self):
        self.seen.append([])

    def drop_row(self, row):
        last = self.seen.pop()
        if row < len(self.seen):
            self.seen[row] = last

    def observe(self, row, tokens, features):
        # Each token's feature is the token itself.
        assert features.flatten().tolist() == tokens
        self.seen[row] += tokens

    def draft(self, rows, clock):
        assert len(rows) == len(self.seen)
        trees = []
        for row, seen in zip(rows, self.seen, strict=True):
            assert row.tokens[:-1] == seen
            [text] = [t for t in self.texts if t[: len(row.tokens)] == row.tokens]
            rest = text[len(row.tokens) :][: row.depth]
            path = [t if d < self.right else 99 for d, t in enumerate(rest)]
            nodes = torch.tensor([[row.tokens[-1], *path]])
            depths = torch.arange(len(path) + 1)[None]
            trees.append(
                DraftTree(nodes, (depths - 1).clamp(min=0), depths, -depths.float(), [len(path) + 1])
            )
        return DraftTree.stack(trees)


def example(first, length, start=3):
    tokens = torch.arange(first, first + length)
    features = tokens[:, None, None].to(torch.bfloat16)
    return Example(tokens, start, True, features, features[:, 0])


def texts(examples):
    return [e.tokens.tolist() for e in examples]


@pytest.mark.parametrize(("right", "rounds"), [(0, 12), (1, 6), (2, 4), (3, 3), (8, 2)])
def test_rounds_are_those_that_decoding_would_take(right, rounds):
    examples = [example(10, 16)]  # twelve tokens after the bonus token
    result = replay(Knowing(texts(examples), right), examples, budget=8)
    assert (result.rounds, result.tokens) == (rounds, 12)
    assert result.tau == pytest.approx(12 / rounds)
    assert sum(count for count in result.accepted.values()) == rounds


def test_answers_side_by_side_give_the_sum_of_each_alone():
    examples = [example(10 + 30 * i, 8 + 3 * i) for i in range(3)]
    together = replay(Knowing(texts(examples), 2), examples, budget=8, rows=2)
    alone = [replay(Knowing(texts(examples), 2), [e], budget=8) for e in examples]
    assert together.rounds == sum(a.rounds for a in alone)
    assert (
        together.tokens
        == sum(a.tokens for a in alone)
        == sum(len(e.tokens) - e.answer_start - 1 for e in examples)
    )
    assert together.accepted == sum((a.accepted for a in alone), start=type(together.accepted)())
    assert together.each == [(a.rounds, a.tokens) for a in alone]


def test_the_budget_limits_the_depth_of_a_chain():
    examples = [example(10, 16)]
    assert replay(Knowing(texts(examples), 8), examples, budget=2, chain=True).rounds == 4


def test_an_answer_of_one_token_gives_no_round():
    examples = [example(10, 4), example(20, 8)]
    assert replay(Knowing(texts(examples[:1]), 8), examples[:1], budget=8).rounds == 0
    assert replay(Knowing(texts(examples), 8), examples, budget=8).each == [(0, 0), (1, 4)]
