"""Admission by memory: what can never fit is refused, what does not fit now waits, and the bound holds."""

import pytest

import tiny
from ddtree.drafters import kv_footprints_of
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError, PromptError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from driving import answered, greedy

# Two layers of keys and values, two heads of 8 floats.
TOKEN = 2 * 2 * 2 * 8 * 4
# Outputs of two layers.
FEATURES = 2 * 32 * 4
# Buffers of two rows of 512 tokens, the target's and DFlash's, features that wait, and a prompt beside them.
LIMIT = 2 * 512 * 2 * TOKEN + 4 * 128 * FEATURES + 60 * (TOKEN + FEATURES)


def size(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def kept(engine):
    """Bytes of the tensors that are kept of the tokens of an engine."""
    caches = [engine._cache, *(footprint.cache for footprint in kv_footprints_of(engine.drafter))]
    features = [part for one in backbones(engine.drafter) for row in one._unread for part in row]
    if engine._scheduler.prefill is not None:
        caches.append(engine._scheduler.prefill.cache)
        features += [part for _, part in engine._scheduler.prefill.observed if part is not None]
    if engine.prefixes is not None:
        features += [part for row in engine.prefixes._answers for part in row]
    return sum(size(cache._stacks) for cache in caches) + sum(part.numel() * 4 for part in features)


def backbones(drafter):
    own = [drafter.backbone] if hasattr(drafter, "backbone") else []
    return own + [inner for part in getattr(drafter, "drafters", ()) for inner in backbones(part)]


def engine_of(model, **options):
    return Engine(Target(model), tiny.drafter("tree", model), cache_bytes=LIMIT, prefill_chunk=16, **options)


def decode(engine, asked, limit=LIMIT, **options):
    """Decode within the bound what each gives alone without one; return how many ran at once at most."""
    sequences = [engine.add(prompt, params, **options) for prompt, params in asked]
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
        assert kept(engine) <= limit
        assert engine.kv_bytes()[0] <= engine.kv_bytes()[1] == limit
    alone = answered(Engine(Target(engine.target.model)), *asked)
    assert [sequence.tokens for sequence in sequences] == [sequence.tokens for sequence in alone]
    return most


def ask(length, answer, seed=0):
    return tiny.prompt(length, seed), greedy(answer)


def test_what_can_never_fit_is_refused_with_its_size(model):
    tight = Engine(Target(model), cache_bytes=300 * TOKEN)
    with pytest.raises(
        PromptError, match=r"a prompt of 20 tokens with an answer of up to 200 needs 0\.1 MiB .* cache_bytes"
    ):
        tight.add(*ask(20, 200))
    tight.add(*ask(20, 150))
    # An answer that the context cuts short takes no more than the context.
    engine_of(model).add(tiny.prompt(20), greedy(10**9))
    with pytest.raises(ConfigError, match="is too little for any text: give at least"):
        Engine(Target(model), cache_bytes=100 * TOKEN)


def test_what_does_not_fit_now_waits_for_its_turn(model):
    assert decode(engine_of(model), [ask(9, 30), ask(40, 200, 1), ask(12, 20, 2), ask(5, 20, 3)]) == 2


def test_many_short_ones_run_together_after_a_long_one_has_left_its_buffers(model):
    engine = engine_of(model)
    decode(engine, [ask(50, 300)])
    assert engine._cache.capacity == 512
    assert decode(engine, [ask(5, 20, seed) for seed in range(8)]) == 4


def test_the_order_of_arrival_is_kept(model):
    engine = engine_of(model)
    first = engine.add(tiny.prompt(9), greedy(60))
    engine.step()
    others = [engine.add(tiny.prompt(30, seed), greedy(300)) for seed in range(2)]
    small = engine.add(tiny.prompt(4), greedy(5))
    order = []
    while not engine.idle:
        order += [s for s in engine.step() if s.output_length and s not in order]
        assert kept(engine) <= LIMIT
    assert order == [first, *others, small]


def test_a_wide_tree_does_not_break_the_bound(model):
    engine, sizes = engine_of(model), []
    engine.listener = lambda one: sizes.append(max(one.tree.sizes))
    decode(engine, [ask(30, 160, seed) for seed in range(4)], budget=1024)
    assert max(sizes) > 100


def test_a_target_with_caches_of_its_own_cannot_be_bounded(model):
    with pytest.raises(ConfigError, match="cannot bound the caches that LlamaForCausalLM makes for itself"):
        Engine(AutoregressiveTarget(model), cache_bytes=10**9)


def test_a_prompt_that_fits_without_a_drafter_only_is_refused_with_one(model):
    limit = 512 * TOKEN + 100 * (TOKEN + FEATURES)
    free, own = (
        Engine(Target(model), tiny.drafter(kind, model), cache_bytes=limit) for kind in ("lookup", "tree")
    )
    free.add(*ask(20, 200))
    with pytest.raises(PromptError, match=r"keys and values with the drafter's, and cache_bytes allows 0\.2"):
        own.add(*ask(20, 200))


@pytest.mark.parametrize(("kind", "together"), [("lookup", 2), ("tree", 1), ("draft", 1)])
def test_a_drafter_that_keeps_rows_of_its_own_leaves_room_for_fewer(model, kind, together):
    limit = 2 * 512 * TOKEN + 512 * FEATURES
    engine = Engine(Target(model), tiny.drafter(kind, model), cache_bytes=limit)
    assert decode(engine, [ask(40, 200, seed) for seed in range(2)], limit) == together


@pytest.mark.parametrize("kind", ["tree", "treeflash", "domino", "d2sd", "continuity", "draft", "merged"])
def test_what_is_counted_is_what_the_drafter_allocates(model, kind):
    drafter = tiny.drafter(kind, model)
    engine = Engine(Target(model), drafter)
    for seed in range(3):
        engine.add(tiny.prompt(30, seed), greedy(40), budget=8)
    engine.step()
    for _ in range(3):
        engine.step()
    held = kv_footprints_of(drafter)
    assert len(held) == {"merged": 2}.get(kind, 1)
    for footprint in held:
        # 30 + 40 tokens and all that is not committed lie within the first 256 columns, three rows among four.
        assert footprint.bytes(3, 70) - 3 * footprint.row == size(footprint.cache._stacks) == 4 * 256 * TOKEN
        assert footprint.cache.used_bytes == sum(footprint.cache.lengths) * TOKEN > 0


def test_the_features_that_wait_for_a_block_are_counted(model):
    drafter = tiny.drafter("tree", model)
    engine = Engine(Target(model), drafter)
    engine.add(tiny.prompt(30), greedy(300), method="off")
    (footprint,), most = kv_footprints_of(drafter), 0
    while not engine.idle:
        engine.step()
        most = max(most, sum(part.numel() * 4 for row in drafter.backbone._unread for part in row))
    assert most == footprint.row == 128 * FEATURES


@pytest.mark.parametrize("kind", ["tree", "d2sd", "draft", "merged"])
@pytest.mark.parametrize("prefix_bytes", [0, 2**20])
def test_the_bound_holds_whatever_the_drafter_keeps(model, kind, prefix_bytes):
    limit = 3 * 2**20
    options = {"cache_bytes": limit, "prefix_bytes": prefix_bytes, "prefill_chunk": 64}
    engine = Engine(Target(model), tiny.drafter(kind, model), **options)
    lengths = [(8, 12), (9, 8), (300, 20), (5, 90), (6, 10), (7, 10), (10, 10), (150, 10)]
    assert decode(engine, [ask(length, answer, length) for length, answer in lengths], limit, budget=12) > 1
