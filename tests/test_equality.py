"""Every family, drafter, way of sampling, budget and batch gives the plain loop's tokens."""

import itertools

import pytest

import matrix
import tiny
from ddtree.model import kv_cache as cache_module
from matrix import Case

FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)
SAMPLING = pytest.mark.parametrize("sampling", matrix.SAMPLING)
COVERING = matrix.covering()


@SAMPLING
@FAMILIES
def test_a_true_path_among_wrong_siblings_is_accepted_and_changes_nothing(family, sampling):
    for case in matrix.block(family, "scripted", sampling):
        matrix.check(case)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_no_drafter_changes_the_tokens_of_any_family(case):
    matrix.check(case)


@pytest.mark.parametrize(("family", "kind", "rows"), matrix.GROWING)
def test_buffers_that_grow_keep_what_they_hold(family, kind, rows, monkeypatch):
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 32)
    engine = matrix.check(Case(family, kind, "top-p", 15, rows))
    assert engine._cache.capacity > 64 and engine._cache.version >= 2


def test_any_two_values_meet_in_some_case():
    factors = (tiny.FAMILIES, matrix.DRAFTERS, matrix.SAMPLING, matrix.BUDGETS, matrix.ROWS)
    met = set(itertools.chain.from_iterable(map(matrix.pairs, COVERING)))
    assert len(COVERING) == len(tiny.FAMILIES) * len(matrix.DRAFTERS)
    assert met == set(
        itertools.chain.from_iterable(map(matrix.pairs, map(Case._make, itertools.product(*factors))))
    )


@pytest.mark.exhaustive
@SAMPLING
@pytest.mark.parametrize("kind", matrix.DRAFTERS)
@FAMILIES
def test_every_combination_gives_the_plain_loops_tokens(family, kind, sampling):
    for case in matrix.block(family, kind, sampling):
        matrix.check(case, length=200)
