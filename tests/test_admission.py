"""Admission by memory: what can never fit is refused, what does not fit now waits, and the bound holds."""

import pytest

import tiny
from ddtree.autoregressive import AutoregressiveTarget
from ddtree.engine import Engine
from ddtree.errors import ConfigError, PromptError
from ddtree.sampling import SamplingParams
from ddtree.target import Target

# Two layers of keys and values, two heads of 8 floats.
TOKEN = 2 * 2 * 2 * 8 * 4
# Buffers of two rows of 512 tokens, and a prompt beside them.
LIMIT = (2 * 512 + 60) * TOKEN


def params(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def reserved(engine):
    joining = engine._joining
    return engine._cache.reserved_bytes + (0 if joining is None else joining.cache.reserved_bytes)


def finish(engine):
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
        assert reserved(engine) <= LIMIT
        assert engine.kv_bytes()[0] <= engine.kv_bytes()[1] == LIMIT
    return most


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def engine_of(model, **options):
    return Engine(Target(model), tiny.drafter("tree", model), cache_bytes=LIMIT, prefill_chunk=16, **options)


def texts(model, asked):
    """Each alone, without a bound."""
    engine = Engine(Target(model))
    sequences = [engine.add(prompt, params(length)) for prompt, length in asked]
    while not engine.idle:
        engine.step()
    return [sequence.tokens for sequence in sequences]


def test_what_can_never_fit_is_refused_with_its_size(model):
    tight = Engine(Target(model), cache_bytes=300 * TOKEN)
    with pytest.raises(
        PromptError, match=r"a prompt of 20 tokens with an answer of up to 200 needs 0\.1 MiB .* cache_bytes"
    ):
        tight.add(tiny.prompt(20), params(200))
    tight.add(tiny.prompt(20), params(150))
    # An answer that the context cuts short takes no more than the context.
    engine_of(model).add(tiny.prompt(20), params(10**9))
    with pytest.raises(ConfigError, match="is too little for any text: give at least"):
        Engine(Target(model), cache_bytes=100 * TOKEN)


def test_what_does_not_fit_now_waits_for_its_turn(model):
    engine = engine_of(model)
    asked = [
        (tiny.prompt(9), 30),
        (tiny.prompt(40, 1), 200),
        (tiny.prompt(12, 2), 20),
        (tiny.prompt(5, 3), 20),
    ]
    sequences = [engine.add(prompt, params(length)) for prompt, length in asked]
    engine.step()
    engine.step()
    assert finish(engine) == 2
    assert [s.tokens for s in sequences] == texts(model, asked)


def test_many_short_ones_run_together_after_a_long_one_has_left_its_buffers(model):
    engine = engine_of(model)
    long = engine.add(tiny.prompt(50), params(300))
    finish(engine)
    assert engine._cache.capacity == 512 and long.output_length == 300
    asked = [(tiny.prompt(5, seed), 20) for seed in range(8)]
    sequences = [engine.add(prompt, params(length)) for prompt, length in asked]
    assert finish(engine) == 4
    assert [s.tokens for s in sequences] == texts(model, asked)


def test_the_order_of_arrival_is_kept(model):
    engine = engine_of(model)
    first = engine.add(tiny.prompt(9), params(60))
    engine.step()
    others = [engine.add(tiny.prompt(30, seed), params(300)) for seed in range(2)]
    small = engine.add(tiny.prompt(4), params(5))
    order = []
    while not engine.idle:
        order += [s for s in engine.step() if s.output_length and s not in order]
        assert reserved(engine) <= LIMIT
    assert order == [first, *others, small]


def test_a_wide_tree_does_not_break_the_bound(model):
    engine = engine_of(model)
    asked = [(tiny.prompt(30, seed), 160) for seed in range(4)]
    sequences = [engine.add(prompt, params(length), budget=1024) for prompt, length in asked]
    sizes = []
    engine.listener = lambda one: sizes.append(max(one.tree.sizes))
    finish(engine)
    assert [s.tokens for s in sequences] == texts(model, asked)
    assert max(sizes) > 100


def test_a_target_with_caches_of_its_own_cannot_be_bounded(model):
    with pytest.raises(ConfigError, match="cannot bound the caches that LlamaForCausalLM makes for itself"):
        Engine(AutoregressiveTarget(model), cache_bytes=10**9)
