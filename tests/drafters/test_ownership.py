"""One drafter, one user: rows of two engines must never share its state."""

import gc

import pytest

import ddtree
import tiny
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.target import Target

REFUSED = "the drafter 'lookup' is in use by another model"


def lookup():
    return Lookup(vocab_size=tiny.VOCAB)


def test_a_drafter_given_to_two_models_is_refused_until_the_first_is_closed():
    drafter = lookup()
    with ddtree.load(tiny.model(), drafter) as first:
        with pytest.raises(ConfigError, match=REFUSED):
            ddtree.load(tiny.model(), drafter)
        expected = first.generate(tiny.prompt(5), max_tokens=6, seed=1).token_ids
    second = ddtree.load(tiny.model(), drafter)
    assert second.generate(tiny.prompt(5), max_tokens=6, seed=1).token_ids == expected


def test_a_part_of_a_merged_drafter_is_in_use_too():
    part, target = lookup(), Target(tiny.model())
    first = Engine(target, Merged([tiny.drafter("tree", tiny.model()), part]))
    for drafter in (part, Merged([part, tiny.drafter("draft", tiny.model())])):
        with pytest.raises(ConfigError, match=REFUSED):
            Engine(target, drafter)
    first.close()
    Engine(target, part)


def test_an_engine_that_is_gone_holds_nothing():
    drafter, target = lookup(), Target(tiny.model())
    engine = Engine(target, drafter)
    del engine
    gc.collect()
    Engine(target, drafter)


def test_closing_twice_does_not_take_the_drafter_from_its_next_user():
    drafter, target = lookup(), Target(tiny.model())
    first = Engine(target, drafter)
    first.close()
    second = Engine(target, drafter)
    first.close()
    with pytest.raises(ConfigError, match=REFUSED):
        Engine(target, drafter)
    second.close()


def test_a_refused_pair_leaves_no_hooks_on_the_target():
    drafter, model = tiny.drafter("tree", tiny.model()), tiny.model()
    first = ddtree.load(tiny.model(), drafter)
    with pytest.raises(ConfigError, match="in use by another model"):
        ddtree.load(model, drafter)
    assert not any(module._forward_hooks for module in model.modules())
    first.close()
