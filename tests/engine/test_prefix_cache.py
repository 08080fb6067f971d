"""The prefix store: what it keeps, what it gives back, and that reuse changes no text."""

import pytest
import torch

import tiny
from ddtree.engine.engine import Engine
from ddtree.engine.prefix_cache import PrefixCache
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.processors import common_length
from driving import finish

# Of a token below: two layers of keys and values of one head of 3 floats, and 2 features.
TOKEN = (2 * 2 * 3 + 2) * 4


def states(tokens, scale=1.0):
    """Columns [1, n, 3] that tell the tokens they stand for."""
    value = torch.tensor(tokens, dtype=torch.float32)[None, :, None].expand(1, len(tokens), 3) * scale
    return value


def filled(texts, limit=10**6):
    store = PrefixCache(limit, features=True)
    for text in texts:
        add(store, text)
    return store


def add(store, text):
    features = torch.tensor(text, dtype=torch.float32)[:, None].expand(-1, 2)
    store.add_row(text, reader(text), list(features.split(3)))
    store.drop_row(0, None, reader(text))


def reader(text):
    def read(start, stop):
        return [(states(text[start:stop]), states(text[start:stop], -1.0)) for _ in range(2)]

    return read


def check(parts, text):
    """The parts are those of a text, keys, values and features too."""
    assert [token for part in parts for token in part.tokens] == text
    for part in parts:
        for keys, values in part.columns:
            assert torch.equal(keys, states(part.tokens)) and torch.equal(values, states(part.tokens, -1.0))
        assert part.features[:, 0].tolist() == part.tokens


def memory(store):
    """Bytes of the storages that the store holds."""
    found = {}
    for part in store._parts():
        for tensor in [t for pair in part.columns for t in pair] + [part.features]:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def test_the_longest_common_prefix_is_found():
    store = filled([[1, 2, 3, 4, 5], [1, 2, 9, 9], [7, 7]])
    check(store.find([1, 2, 3, 8]), [1, 2, 3])
    check(store.find([1, 2, 9, 9, 5]), [1, 2, 9, 9])
    check(store.find([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5])
    check(store.find([1, 6]), [1])
    assert store.find([5]) == [] and store.find([]) == []


def test_texts_that_begin_alike_share_memory():
    store = filled([[1, 2, 3, 4, 5], [1, 2, 9, 9], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
    assert store.bytes == memory(store) == 8 * TOKEN


def test_what_was_of_no_use_for_longest_goes_first_and_the_bound_holds():
    store = filled([], limit=10 * TOKEN)
    for text in ([1, 2, 3, 4], [5, 6, 7, 8]):
        add(store, text)
    store.find([1])
    add(store, [9, 9, 9])
    check(store.find([5, 6]), [])
    check(store.find([1, 2, 3, 4]), [1, 2, 3, 4])
    for first in range(10, 40):
        add(store, [first, 1, first % 3, 4])
        add(store, [1, 2, first])
        assert store.bytes == memory(store) <= 10 * TOKEN
    # The beginning that all have in common was of use each time.
    check(store.find([1, 2, 39]), [1, 2, 39])


def test_a_text_longer_than_the_bound_is_not_kept_and_drives_nothing_out_that_it_continues():
    store = filled([[1, 2, 3]], limit=5 * TOKEN)
    add(store, [1, 2, 3, 4, 5, 6])
    check(store.find([1, 2, 3, 4]), [1, 2, 3])
    assert store.bytes == 3 * TOKEN


def test_an_answer_is_kept_behind_its_prompt_and_not_without_it():
    text = list(range(1, 9))
    features = torch.tensor(text, dtype=torch.float32)[:, None].expand(-1, 2)
    for evicted in (False, True):
        store = PrefixCache(12 * TOKEN, features=True)
        store.add_row(text[:5], reader(text), [features[:5]])
        store.observe(0, features[5:7])
        store.observe(0, features[7:])
        if evicted:
            add(store, list(range(20, 31)))
        store.drop_row(0, text, reader(text))
        check(store.find(text), [] if evicted else text)


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [([], [], 0), ([1], [2], 0), ([1, 2], [1, 2, 3], 2), ([4, 5, 6], [4, 6], 1)],
)
def test_the_length_of_the_common_beginning_is_counted(first, second, common):
    assert common_length(first, second) == common_length(second, first) == common


def decode(engine, prompt, **changes):
    sequence = engine.add(prompt, SamplingParams(**{"seed": 3, "max_tokens": 20, "logprobs": 2, **changes}))
    trees = []
    engine.listener = lambda one: trees.append(one.tree.tokens.tolist())
    finish(engine)
    return sequence, trees


@pytest.mark.parametrize(
    ("family", "kind", "temperature"),
    [
        ("llama", "none", 1.0),
        ("llama", "lookup", 0.0),
        ("llama", "merged", 1.0),
        ("gemma3", "tree", 0.0),
        ("gpt_oss", "tree", 1.0),
        ("mistral", "markov", 0.0),
        ("qwen3_moe", "d2sd", 0.0),
    ],
)
def test_a_second_turn_is_the_same_with_and_without_the_store(family, kind, temperature):
    model = tiny.model(family)
    turns = {}
    for limit in (0, 10**8):
        drafter = None if kind == "none" else tiny.drafter(kind, model)
        engine = Engine(Target(model), drafter, prefill_chunk=16, prefix_bytes=limit)
        first, _ = decode(engine, tiny.prompt(45), temperature=temperature)
        prompt = first.tokens + tiny.prompt(9, seed=1)
        turns[limit] = decode(engine, prompt, temperature=temperature)
        engine.close()
    (plain, trees), (reused, same) = turns.values()
    # The last token of an answer was never processed.
    assert (plain.stats.cached_tokens, reused.stats.cached_tokens) == (0, 45 + 20 - 1)
    assert reused.stats.as_dict()["cached_tokens"] == 64
    assert reused.tokens == plain.tokens
    for one, other in zip(plain.logprobs, reused.logprobs, strict=True):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [token for token, _ in other.top] == [token for token, _ in one.top]
    # The drafters were told all that they would have been told.
    assert same == trees


def test_of_a_known_prompt_only_the_last_token_is_processed_again():
    model, prompt = tiny.model(), tiny.prompt(30)
    engine = Engine(Target(model), tiny.drafter("tree", model), prefill_chunk=8, prefix_bytes=10**8)
    sequences = [engine.add(prompt, SamplingParams(seed=3, max_tokens=12)) for _ in range(3)]
    finish(engine)
    assert [s.stats.cached_tokens for s in sequences] == [0, 29, 29]
    assert sequences[0].tokens == sequences[1].tokens == sequences[2].tokens


def known(engine, tokens):
    return sum(len(part.tokens) for part in engine.prefixes.find(tokens))


def test_a_cancelled_answer_leaves_what_there_is_and_a_failed_one_its_prompt():
    model, prompt = tiny.model(), tiny.prompt(30)
    engine = Engine(Target(model), tiny.drafter("tree", model), prefix_bytes=10**8)
    cancelled = engine.add(prompt, SamplingParams(seed=3, max_tokens=100))
    for _ in range(5):
        engine.step()
    engine.cancel(cancelled)
    assert known(engine, cancelled.tokens) == len(cancelled.tokens) - 1

    def fail(prefix, logits):
        if len(prefix) > 24:
            raise ZeroDivisionError
        return logits

    failed, _ = decode(engine, tiny.prompt(20, seed=8), processors=(fail,))
    assert failed.finish_reason == "error" and failed.output_length > 1
    assert known(engine, failed.tokens) == 20


def test_the_bound_holds_while_many_chats_go_on():
    model = tiny.model()
    engine = Engine(Target(model), tiny.drafter("tree", model), prefix_bytes=40_000, max_rows=2)
    alone = Engine(Target(model))
    for number in range(6):
        prompt = tiny.prompt(25, seed=number % 4)
        for _ in range(2):
            sequence, _ = decode(engine, prompt, temperature=0.0)
            assert engine.prefixes.bytes == memory(engine.prefixes) <= 40_000
            assert sequence.tokens == decode(alone, prompt, temperature=0.0)[0].tokens
            prompt = sequence.tokens + tiny.prompt(5, seed=number)
    assert engine.prefixes.bytes > 20_000
