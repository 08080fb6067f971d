"""The contract of every drafter: rows do not touch each other, drafts leave nothing behind, noise counts on request."""

import copy
import dataclasses

import pytest
import torch

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.heads import create
from ddtree.drafters.draft_model import DraftModel
from ddtree.drafters.merged import Merged, Mixed
from ddtree.drafters.ngram import Lookup
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN, Noise
from drafting import COUPLING, draft, observe, opened, scored, varied_network

HEADS = {
    "markov": {"size": tiny.VOCAB, "rank": 6},
    "treeflash": {"hidden_size": 32, "intermediate_size": 16},
    "domino": {"hidden_size": 32, "size": tiny.VOCAB, "gru_hidden": 12, "rank": 8},
}
KINDS = [
    "dflash",
    "windows",
    *HEADS,
    "d2sd",
    "d2sd chains",
    "draft model",
    "lookup",
    "mixed",
    "mixed tree",
    "merged",
]
every_drafter = pytest.mark.parametrize("kind", KINDS)


def drafter_of(kind, target, coupling=PLAIN):
    shape = {"windows": (4, None), "causal": (True, False)} if kind == "windows" else {}
    backbone = Backbone(varied_network(seed=1, **shape), target)
    lookup = Lookup(coupling=coupling)
    if kind in ("dflash", "windows"):
        return DFlash(backbone, coupling=coupling)
    if kind in HEADS:
        torch.manual_seed(2)
        head = create(kind, **HEADS[kind])
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        if kind == "domino":
            return Domino(backbone, head, coupling=coupling, width=64, candidates=64)
        return FirstOrder(backbone, head, coupling=coupling, predecessors=10_000)
    if kind in ("d2sd", "d2sd chains"):
        return D2SD(backbone, branches=3, trees=kind == "d2sd", coupling=coupling)
    if kind == "draft model":
        return DraftModel(Target(tiny.model("llama", seed=3)), target, coupling=coupling)
    if kind == "mixed":
        return Mixed(drafter_of("dflash", target, coupling), lookup)
    if kind == "mixed tree":
        return Mixed(drafter_of("domino", target, coupling), lookup)
    if kind == "merged":
        return Merged([drafter_of("treeflash", target, coupling), lookup])
    return lookup


def request(length=25, budget=14, depth=4, **changes):
    # Few different tokens, so that n-grams find something.
    return DraftRow([2 + token % 8 for token in tiny.prompt(length, length)], budget, depth, **changes)


def same(tree, index, other, place=0):
    return scored(tree, index) == pytest.approx(scored(other, place), abs=2e-4)


@every_drafter
@pytest.mark.parametrize("coupling", [PLAIN, COUPLING])
def test_ragged_rows_draft_as_each_alone(target, kind, coupling):
    """Lengths, budgets, depths, chains, temperatures all differ; some rows want nothing."""
    rows = [
        request(40, budget=30, depth=3),
        request(7, budget=5, depth=2, noise=Noise(4, tiny.VOCAB), temperature=1.0),
        request(23, budget=8, chain=True),
        request(12, budget=0),
        request(18, depth=0, noise=Noise(5, tiny.VOCAB), temperature=0.6),
        request(31, noise=Noise(6, tiny.VOCAB), temperature=0.7),
        request(2, budget=1, depth=1),
    ]
    if kind == "mixed tree":
        del rows[2]  # a batch that holds a chain asks the drafter within for the same
    together = draft(opened(drafter_of(kind, target, coupling), *rows), *rows)
    for index, row in enumerate(rows):
        alone = draft(opened(drafter_of(kind, target, coupling), row), row)
        assert same(together, index, alone)
        assert bool(together.sizes[index] > 1) <= bool(row.budget and row.depth)


@every_drafter
def test_drafting_twice_changes_nothing_and_the_text_goes_on_from_there(target, kind):
    """vllm#14649: nothing of a drafted block may stay in the context."""
    rows = [request(25), request(9)]
    before = copy.deepcopy(rows)
    drafter = opened(drafter_of(kind, target), *rows)
    first, second = draft(drafter, *rows), draft(drafter, *rows)
    assert same(first, 0, second) and same(first, 1, second, 1)
    assert rows == before
    longer = dataclasses.replace(rows[0], tokens=[*rows[0].tokens, 5, 3, 4])
    observe(drafter, 0, longer, start=24)
    assert same(draft(drafter, longer, rows[1]), 0, draft(opened(drafter_of(kind, target), longer), longer))


@every_drafter
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_text_in_any_chunks_gives_the_same_draft(target, kind, chunk):
    row = request(40)
    whole = draft(opened(drafter_of(kind, target), row), row)
    assert same(draft(opened(drafter_of(kind, target), row, chunk=chunk), row), 0, whole)


@every_drafter
def test_nothing_of_a_dropped_row_is_left_and_the_last_takes_its_place(target, kind):
    """llama.cpp PR#22105: state of a request must not reach the next one."""
    a, b, c, d = request(30), request(8), request(12), request(19)
    shorter = dataclasses.replace(c, tokens=c.tokens[:8])
    drafter = opened(drafter_of(kind, target), a, b, shorter)
    draft(drafter, a, b, shorter)
    # The rest of the last row's text has been shown and not been drafted from when the row moves.
    observe(drafter, 2, c, start=7)
    drafter.drop_row(0)
    drafter.add_row()
    observe(drafter, 2, d)
    tree = draft(drafter, c, b, d)
    for index, row in enumerate((c, b, d)):
        assert same(tree, index, draft(opened(drafter_of(kind, target), row), row))


@every_drafter
def test_rows_without_budget_or_depth_give_roots(target, kind):
    rows = [request(25, budget=0), request(9, depth=0)]
    tree = draft(opened(drafter_of(kind, target), *rows), *rows)
    assert tree.sizes == [1, 1] and tree.tokens.shape == (2, 1)


@every_drafter
def test_a_chain_ends_at_its_budget_and_its_depth(target, kind):
    for budget, depth, most in ((2, 4, 2), (50, 3, 3)):
        row = request(25, budget=budget, depth=depth, chain=True)
        tree = draft(opened(drafter_of(kind, target), row), row)
        assert tree.sizes == [most + 1] and tree.parents[0].tolist() == [0, *range(most)]


@every_drafter
def test_noise_counts_for_sampled_rows_of_coupled_drafters_alone(target, kind):
    greedy = request(25, budget=30)
    sampled = dataclasses.replace(greedy, noise=Noise(3, tiny.VOCAB), temperature=1.0)
    trees = {
        (coupling, row.noise is not None): draft(opened(drafter_of(kind, target, coupling), row), row)
        for coupling in (PLAIN, COUPLING)
        for row in (greedy, sampled)
    }
    plain = trees[PLAIN, False]
    assert same(trees[PLAIN, True], 0, plain) and same(trees[COUPLING, False], 0, plain)
    assert not same(trees[COUPLING, True], 0, plain)
