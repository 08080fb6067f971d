"""D2SD: where the second pass begins, whose probabilities a node has, chains unmerged, batches, noise."""

import math
from dataclasses import replace

import pytest
import torch

import tiny
import wellformed
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.errors import ConfigError
from ddtree.sampling.noise import PLAIN, Noise, couple
from drafting import DEPTH, best_prefixes, drafted, marginals, request, scored, varied_network


def backbone(target, seed=0, **options):
    return Backbone(varied_network(seed=seed), target, **options)


def block(net, target, row, given=(), coupling=PLAIN):
    """Log-probabilities [L, V] of a block whose first tokens are given, under a row's noise."""
    logprobs = marginals(net, target, row, given)
    if row.noise is None:
        return logprobs
    noise = torch.stack([row.noise.gumbel(len(row.tokens) + at) for at in range(len(logprobs))])
    return couple(logprobs, noise, coupling[0] * row.temperature, coupling[1])


def points_of(first, branches, depth, chain=False):
    """The prefixes of the highest risk, of the whole tree or of the greedy chain."""
    greedy = first.argmax(-1).tolist()

    def children(path):
        return {
            token: p for token, p in level(first, path).items() if not chain or token == greedy[len(path)]
        }

    candidates = best_prefixes(children, 4 * branches, depth - 1)
    confidence = first.max(-1).values.exp().tolist()
    risk = {path: math.exp(score) * (1 - confidence[len(path)]) for path, score in candidates.items()}
    return sorted(risk, key=lambda path: -risk[path])[:branches]


def level(logprobs, path):
    """{token: log-probability} after a path by a block's marginals."""
    return dict(enumerate(logprobs[len(path)].tolist()))


def oracle(first, second, points, budget, depth):
    """The best prefixes when each child has the probability of the longest branch point before it."""
    blocks = {(): first, **{point: second(point) for point in points}}

    def children(path):
        longest = max((point for point in blocks if path[: len(point)] == point), key=len)
        return level(blocks[longest], path)

    return best_prefixes(children, budget, depth)


@pytest.mark.parametrize("length", [5, 12, 19])
@pytest.mark.parametrize("branches", [1, 4])
@pytest.mark.parametrize("own_second", [False, True])
def test_the_tree_is_the_best_under_the_pass_that_knows_most_of_each_path(
    target, length, branches, own_second
):
    row = request(length, budget=25)
    second = backbone(target, seed=1) if own_second else None
    tree = drafted(D2SD(backbone(target), second, branches=branches), row)
    again = varied_network(seed=1 if own_second else 0)
    first = block(varied_network(), target, row)
    points = points_of(first, branches, DEPTH)
    expected = oracle(first, lambda given: block(again, target, row, given), points, 25, DEPTH)
    assert scored(tree) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [5, 12, 19, 23])
@pytest.mark.parametrize("branches", [1, 3])
def test_the_tree_of_chains_equals_its_branches_unmerged(target, length, branches):
    row = request(length, budget=1024)
    tree = drafted(D2SD(backbone(target), branches=branches, trees=False), row)
    first = block(varied_network(), target, row)
    greedy = first.argmax(-1).tolist()
    chains = {tuple(greedy)}
    points = points_of(first, branches, DEPTH, chain=True)
    assert len(points) == branches
    for point in points:
        redrafted = block(varied_network(), target, row, point).argmax(-1).tolist()
        chains.add((*point, *redrafted[len(point) :]))
    paths = wellformed.paths(tree)
    leaves = {path for path in paths if not any(other[:-1] == path for other in paths)}
    assert leaves == chains
    assert len(paths) == 1 + len({chain[:k] for chain in chains for k in range(1, DEPTH + 1)})


def test_chains_score_as_the_pass_that_drafted_them(target):
    row = request(12, budget=1024)
    tree = drafted(D2SD(backbone(target), branches=2, trees=False), row)
    first = block(varied_network(), target, row)
    expected = {}
    for point in [(), *points_of(first, 2, DEPTH, chain=True)]:
        own = block(varied_network(), target, row, point) if point else first
        path, score = (), 0.0
        for depth in range(DEPTH):
            logprobs = first if depth < len(point) else own
            token = int(logprobs[depth].argmax())
            path, score = (*path, token), score + float(logprobs[depth, token])
            expected[path] = max(score, expected.get(path, -math.inf))
    assert scored(tree) == pytest.approx(expected, abs=1e-4)


def test_a_row_that_wants_a_chain_gets_the_first_passs(target):
    row = request(9, budget=4, chain=True)
    for trees in (True, False):
        tree = drafted(D2SD(backbone(target), trees=trees), row)
        alone = drafted(DFlash(backbone(target)), row)
        assert wellformed.paths(tree) == wellformed.paths(alone)
        beside = drafted(D2SD(backbone(target), trees=trees), request(12, budget=20), row)
        assert wellformed.paths(beside, 1) == wellformed.paths(alone)


def test_a_depth_of_one_is_the_first_pass_alone(target):
    row = request(9, budget=20, depth=1)
    expected = drafted(DFlash(backbone(target)), row)
    assert scored(drafted(D2SD(backbone(target)), row)) == pytest.approx(scored(expected), abs=1e-6)


def test_a_second_network_may_look_further_than_the_first(target):
    row, deep = request(9, budget=60, depth=8), varied_network(9, seed=1)
    drafter = D2SD(backbone(target), Backbone(deep, target))
    assert drafter.max_depth == 8
    tree = drafted(drafter, row)
    first = block(varied_network(), target, row)
    beyond = torch.full((3, tiny.VOCAB), -math.inf)
    points = points_of(torch.cat((first, beyond)), 4, DEPTH + 1)
    expected = oracle(
        torch.cat((first, beyond)), lambda given: block(deep, target, row, given), points, 40, 8
    )
    best = dict(list(scored(tree).items())[:40])
    assert best == pytest.approx(expected, abs=1e-4)


def test_both_passes_are_drafted_under_the_noise(target):
    coupling = (0.9, 0.8)
    row = request(12, budget=20, noise=Noise(5, tiny.VOCAB), temperature=0.6)
    tree = drafted(D2SD(backbone(target), coupling=coupling), row)
    first = block(varied_network(), target, row, coupling=coupling)
    points = points_of(first, 4, DEPTH)
    expected = oracle(
        first, lambda given: block(varied_network(), target, row, given, coupling), points, row.budget, DEPTH
    )
    assert scored(tree) == pytest.approx(expected, abs=1e-4)
    plain = drafted(D2SD(backbone(target)), row)
    assert scored(plain) == pytest.approx(scored(drafted(D2SD(backbone(target)), replace(row, noise=None))))


def test_a_draft_vocabulary_is_translated_for_both_passes(target):
    ids = torch.arange(1, tiny.VOCAB, 3)
    row = request(12, budget=20)
    tree = drafted(D2SD(backbone(target, draft_ids=ids)), row)
    assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())
    outside = torch.ones(tiny.VOCAB, dtype=torch.bool)
    outside[ids] = False

    def reduced(given=()):
        logits = block(varied_network(), target, row, given)
        return logits.masked_fill(outside, -math.inf).log_softmax(-1)

    expected = oracle(reduced(), reduced, points_of(reduced(), 4, DEPTH), row.budget, DEPTH)
    assert scored(tree) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("branches", [0, 65, 1.5])
def test_branches_out_of_range_are_named(target, branches):
    with pytest.raises(ConfigError, match=r"branches must be (from 1 to 64|a whole number)"):
        D2SD(backbone(target), branches=branches)


def test_networks_over_other_features_are_refused(target):
    other = backbone(target)
    other.feature_layers = (0,)
    with pytest.raises(ConfigError, match=r"layers \[0\] and the first \[0, 1\]"):
        D2SD(backbone(target), other)
