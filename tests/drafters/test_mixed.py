"""The continuity prior: probabilities of n-grams and a network mixed node by node."""

import math
from dataclasses import replace

import pytest
import torch

import tiny
from ddtree.drafters import DraftRow, merged
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.merged import Merged, Mixed
from ddtree.drafters.ngram import Lookup, TextIndex, backoff
from ddtree.errors import ConfigError
from drafting import DEPTH, best_prefixes, drafted, opened, scored

WEIGHT = 0.75


@pytest.fixture(autouse=True)
def the_whole_vocabulary_is_looked_at(monkeypatch):
    monkeypatch.setattr(merged, "_LEAST", tiny.VOCAB)


def dflash(target, draft_ids=None, **options):
    network = tiny.network(tiny.model(), block_size=DEPTH + 1)
    return DFlash(Backbone(network, target, draft_ids=draft_ids), **options)


class Foreign:
    """Another drafter, of which nothing is known but its trees."""

    def __init__(self, inner):
        self.inner, self.name = inner, "foreign"
        self.feature_layers, self.max_depth = inner.feature_layers, inner.max_depth
        self.add_row, self.drop_row, self.observe = inner.add_row, inner.drop_row, inner.observe
        self.draft = inner.draft


def request(seed, length=40, budget=20, depth=DEPTH, **changes):
    # Few different tokens, so that n-grams find something.
    return DraftRow([2 + token % 6 for token in tiny.prompt(length, seed)], budget, depth, **changes)


def conditional(tree):
    """Probabilities of each node's children in a tree."""
    scores, found = {(): 0.0, **scored(tree)}, {}
    for path in scores:
        if path:
            found.setdefault(path[:-1], {})[path[-1]] = math.exp(scores[path] - scores[path[:-1]])
    return found


def oracle(row, likely, weight=WEIGHT):
    """The best prefixes under the mix; `likely` gives a prefix's children under the network."""
    index = TextIndex(5)
    index.extend(row.tokens)

    def children(path):
        seen, left = backoff([*row.tokens, *path][-5:], index, None, 2.0)
        assert sum(seen.values()) == pytest.approx(1 - left)
        known, share = likely(path), 1 - weight * (1 - left)
        chances = {t: weight * seen.get(t, 0.0) + share * known.get(t, 0.0) for t in {*seen, *known}}
        return {token: math.log(chance) for token, chance in chances.items() if chance > 0}

    return best_prefixes(children, row.budget, DEPTH)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weight", [0.3, 0.75, 1.0])
def test_the_tree_is_the_best_under_the_mix(target, seed, weight):
    row = request(seed)
    tree = drafted(Mixed(dflash(target), Lookup(), weight=weight), row)
    tokens, logprobs = opened(dflash(target), row).candidates([row], 1000)
    levels = [
        dict(zip(t, p, strict=True))
        for t, p in zip(tokens[0].tolist(), logprobs[0].exp().tolist(), strict=True)
    ]
    expected = oracle(row, lambda path: levels[len(path)], weight)
    found = scored(tree)
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)
    assert {path: expected[path] for path in found if path in expected} == pytest.approx(
        {path: score for path, score in found.items() if path in expected}, abs=1e-4
    )
    assert len(set(found) - set(expected)) <= 1  # a tie at the end


@pytest.mark.parametrize("seed", range(3))
def test_another_drafters_probabilities_are_those_of_its_tree(target, seed):
    row = request(seed)
    tree = drafted(Mixed(Foreign(dflash(target)), Lookup()), row)
    inside = conditional(drafted(dflash(target), replace(row, budget=2 * row.budget)))
    expected = oracle(row, lambda path: inside.get(path, {}))
    assert list(scored(tree).values()) == pytest.approx(list(expected.values()), abs=1e-4)


def test_where_n_grams_know_nothing_the_tree_is_the_networks(target):
    row, others = DraftRow(list(range(3, 20)), 20, DEPTH), torch.arange(20, tiny.VOCAB)
    alone = drafted(dflash(target, others), row)
    for network in (dflash(target, others), Foreign(dflash(target, others))):
        assert scored(drafted(Mixed(network, Lookup()), row)) == pytest.approx(scored(alone), abs=1e-5)


def test_beyond_the_networks_depth_n_grams_go_on(target):
    span = list(range(4, 30))
    row = DraftRow([*span, 1, 2, *span, 1, 2, *span[:5]], 60, 12)
    tree = drafted(Mixed(dflash(target), Lookup()), row)
    assert tuple(span[5:17]) in scored(tree)


def test_probabilities_of_siblings_do_not_exceed_one(target):
    row = request(1, budget=1024)
    for network in (dflash(target), Foreign(dflash(target))):
        for children in conditional(drafted(Mixed(network, Lookup()), row)).values():
            assert sum(children.values()) <= 1 + 1e-5


def test_rows_may_name_the_parts_that_draft_for_them(target):
    row = request(2)
    network, lookup = drafted(dflash(target), row), drafted(Lookup(), row)
    both = drafted(Mixed(dflash(target), Lookup()), row)
    assert len({tuple(scored(tree)) for tree in (network, lookup, both)}) == 3
    rows = [
        replace(row, members=members) for members in (("dflash",), ("lookup",), ("dflash", "lookup"), None)
    ]
    for batch in ([own] for own in rows[:2]), [rows]:
        for asked in batch:
            tree = drafted(Mixed(dflash(target), Lookup()), *asked)
            for index, own in enumerate(asked):
                expected = {("dflash",): network, ("lookup",): lookup}.get(own.members, both)
                assert scored(tree, index) == pytest.approx(scored(expected), abs=1e-4)


def test_drafters_that_draft_alone_are_told_as_merged_ones_are(target):
    drafter, row = Mixed(dflash(target), Lookup()), request(2)
    assert isinstance(drafter, Merged) and drafter.name == "dflash+lookup"
    drafted(drafter, replace(row, members=("lookup",)))
    assert [name for name, _ in drafter.proposals] == ["lookup"]


@pytest.mark.parametrize("foreign", [False, True])
def test_the_parts_own_trees_can_be_asked_for_after_a_mix(target, foreign):
    """They are those that the parts draft alone, also when the text has grown meanwhile."""

    rows = [request(1, length=20, budget=9), request(2, length=11, budget=14)]
    drafter = Mixed(Foreign(dflash(target)) if foreign else dflash(target), Lookup())
    alone = {drafter.network.name: drafted(dflash(target), *rows), "lookup": drafted(Lookup(), *rows)}
    inner, drafter.drop_row = drafter.drop_row, lambda row: None
    drafted(drafter, *rows)
    for row in rows:
        row.tokens.append(5)
    told = dict(drafter.proposals)
    for _ in rows:
        inner(0)
    assert list(told) == list(alone)
    for name, tree in told.items():
        for index in range(len(rows)):
            assert scored(tree, index) == pytest.approx(scored(alone[name], index), abs=1e-5)


def test_a_chain_is_a_path_under_the_mix(target):
    row = request(3, budget=DEPTH, chain=True)
    tree = drafted(Mixed(dflash(target), Lookup()), row)
    assert len(scored(tree)) == DEPTH
    wide = scored(drafted(Mixed(dflash(target), Lookup()), replace(row, budget=200, chain=False)))
    for path, score in scored(tree).items():
        siblings = [other for other in wide if other[:-1] == path[:-1]]
        assert score == pytest.approx(max(wide[other] for other in siblings), abs=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.1, math.nan])
def test_a_weight_out_of_range_is_named(target, weight):
    with pytest.raises(ConfigError, match=r"weight=.* is not above 0 and at most 1"):
        Mixed(dflash(target), Lookup(), weight=weight)
