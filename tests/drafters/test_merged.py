import math

import pytest
import torch

import wellformed
from ddtree.drafters import DraftRow
from ddtree.drafters.merged import Merged
from ddtree.errors import ConfigError
from ddtree.tree import DraftTree
from drafting import draft


class Fixed:
    """Proposes the same paths for every row, best first, and records what it is told."""

    def __init__(self, name, proposal, layers=(), max_depth=16):
        self.name, self.proposal = name, proposal
        self.feature_layers, self.max_depth = layers, max_depth
        self.told, self.asked = [], []

    def add_row(self):
        self.told.append("add")

    def drop_row(self, row):
        self.told.append(("drop", row))

    def observe(self, row, tokens, features):
        self.told.append((row, tokens, features))

    def draft(self, rows, clock):
        self.asked.append(rows)
        return DraftTree.stack([self.tree(row) for row in rows])

    def tree(self, row):
        places, columns = {(): 0}, [(row.tokens[-1], 0, 0, 0.0)]
        for path, p in self.proposal.items():
            if len(path) <= row.depth and len(columns) <= row.budget:
                places[path] = len(columns)
                columns.append((path[-1], places[path[:-1]], len(path), math.log(p)))
        return DraftTree(*(torch.tensor([column]) for column in zip(*columns, strict=True)), [len(columns)])


def row(budget=15, depth=16, **more):
    return DraftRow([1, 2, 3], budget, depth, **more)


A = {(5,): 0.6, (5, 6): 0.5, (7,): 0.2, (7, 8): 0.1}
B = {(9,): 0.4, (5,): 0.3, (5, 4): 0.25, (7,): 0.22, (7, 8): 0.21, (7, 8, 1): 0.05}


def test_the_best_nodes_of_either_drafter_share_one_budget():
    merged = Merged([Fixed("a", A), Fixed("b", B)])
    tree = draft(merged, row(budget=6), row(budget=2), row(budget=0), row(budget=100))
    best = [(), (5,), (5, 6), (9,), (5, 4), (7,), (7, 8)]
    assert wellformed.paths(tree, 0) == best
    assert tree.row(0).logprobs[0].exp().tolist() == pytest.approx([1, 0.6, 0.5, 0.4, 0.25, 0.22, 0.21])
    assert wellformed.paths(tree, 1) == best[:3]
    assert wellformed.paths(tree, 2) == [()]
    assert wellformed.paths(tree, 3) == [*best, (7, 8, 1)]


def test_one_drafter_is_that_drafter():
    assert wellformed.paths(draft(Merged([Fixed("a", A)]), row())) == [(), *A]


def test_every_drafter_gets_the_whole_budget_and_its_own_depth():
    shallow, deep = Fixed("a", A, max_depth=1), Fixed("b", B, max_depth=9)
    merged, wanted = Merged([shallow, deep]), row(budget=9, depth=5)
    assert (merged.name, merged.max_depth) == ("a+b", 9)
    tree = draft(merged, wanted)
    assert wanted == row(budget=9, depth=5)
    assert [(r.budget, r.depth) for drafter in (shallow, deep) for r in drafter.asked[0]] == [(9, 1), (9, 5)]
    assert (5, 6) not in wellformed.paths(tree)


def test_a_chain_is_the_one_with_the_most_expected_tokens():
    long = {(4,): 0.5, (4, 4): 0.45, (4, 4, 4): 0.4}
    merged = Merged([Fixed("short", {(5,): 0.9}), Fixed("long", long)])
    tree = draft(merged, row(chain=True), row(chain=False))
    assert wellformed.paths(tree, 0) == [(), *long]
    assert wellformed.paths(tree, 1) == [(), (5,), *long]


def test_each_drafter_gets_the_features_of_its_own_layers_in_its_order():
    parts = [Fixed("a", A, layers=(7, 2)), Fixed("b", B), Fixed("c", B, layers=(2, 4, 7))]
    merged = Merged(parts)
    assert merged.feature_layers == (2, 4, 7)
    layer = {n: torch.full((5, 3), float(n)) for n in merged.feature_layers}
    merged.observe(1, [8] * 5, torch.cat([layer[2], layer[4], layer[7]], dim=1))
    (told,) = zip(*(part.told for part in parts), strict=True)
    assert [entry[:2] for entry in told] == [(1, [8] * 5)] * 3
    assert torch.equal(told[0][2], torch.cat([layer[7], layer[2]], dim=1))
    assert told[1][2] is None
    assert torch.equal(told[2][2], torch.cat([layer[2], layer[4], layer[7]], dim=1))


def test_rows_are_opened_and_dropped_in_every_drafter():
    parts = [Fixed("a", A), Fixed("b", B)]
    merged = Merged(parts)
    merged.add_row()
    merged.drop_row(0)
    merged.observe(0, [1], None)
    assert [part.told for part in parts] == [["add", ("drop", 0), (0, [1], None)]] * 2


@pytest.mark.parametrize(
    ("parts", "message"), [([], r"drafters=\[\] holds no drafter"), ([Fixed("a", A)] * 2, "given twice")]
)
def test_what_cannot_be_merged_is_named(parts, message):
    with pytest.raises(ConfigError, match=message):
        Merged(parts)
