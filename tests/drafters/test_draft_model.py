import itertools
import math

import pytest
import torch

import reference
import tiny
import wellformed
from ddtree.drafters import DraftRow, draft_model
from ddtree.drafters.draft_model import DraftModel
from ddtree.engine.engine import Engine
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams
from ddtree.stats import Clock
from drafting import drafted, opened, scored

SMALL = 6  # a vocabulary whose trees can be enumerated
LLAMA = tiny.model("llama")


def row(tokens, budget=15, depth=4, **more):
    return DraftRow(list(tokens), budget, depth, **more)


def drafter_for(model, **arguments):
    target = Target(model)
    return DraftModel(Target(model), target, **arguments)


def plain(model, tokens, path, temperature=1.0):
    """The log-probability of `path` after `tokens`, by one whole forward."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*tokens, *path]]), use_cache=False).logits[0]
    logq = (logits.float() / temperature).log_softmax(-1)
    return sum(float(logq[len(tokens) - 1 + i, token]) for i, token in enumerate(path))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_scores_are_the_models_own_log_probabilities_of_each_path(family, length):
    model, tokens = tiny.model(family), tiny.prompt(length)
    found = scored(drafted(drafter_for(model), row(tokens, budget=20)))
    assert len(found) == 20
    assert max(map(len, found)) > 1
    for path, score in found.items():
        assert score == pytest.approx(plain(model, tokens, path), abs=2e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_the_best_of_all_paths(seed):
    model = tiny.model("llama", seed=seed, vocab_size=SMALL)
    tokens = [t % SMALL for t in tiny.prompt(9, seed)]
    found = scored(drafted(drafter_for(model, width=32), row(tokens, budget=30, depth=3)))
    every = [
        plain(model, tokens, path)
        for depth in (1, 2, 3)
        for path in itertools.product(range(SMALL), repeat=depth)
    ]
    assert list(found.values()) == pytest.approx(sorted(every, reverse=True)[:30], abs=1e-4)


def test_growth_ends_when_no_deeper_node_can_be_among_the_best(monkeypatch):
    wanted = [row(tiny.prompt(12), budget=5, depth=12), row(tiny.prompt(5), budget=9, depth=12)]
    drafter, passes = drafter_for(LLAMA), []
    run = Target.extend
    monkeypatch.setattr(Target, "extend", lambda *a, **k: passes.append(1) or run(*a, **k))
    early = drafted(drafter, *wanted)
    count = len(passes)
    monkeypatch.setattr(draft_model._Growth, "_finished", lambda *_: False)
    late = drafted(drafter, *wanted)
    assert count < len(passes) - count == 12
    assert wellformed.paths(early, 0) == wellformed.paths(late, 0)
    assert wellformed.paths(early, 1) == wellformed.paths(late, 1)
    assert torch.allclose(early.logprobs, late.logprobs, atol=1e-5)


def test_a_chain_is_the_models_greedy_continuation():
    tokens = tiny.prompt(20)
    expected = list(tokens)
    with torch.inference_mode():
        for _ in range(9):
            logits = LLAMA(input_ids=torch.tensor([expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    tree = drafted(drafter_for(LLAMA), row(tokens, budget=20, depth=9, chain=True))
    assert wellformed.paths(tree)[-1] == tuple(expected[20:])


def test_after_rounds_of_any_length_the_tree_is_that_of_the_whole_text():
    texts = [tiny.prompt(60, 1), tiny.prompt(60, 2)]
    lengths = [20, 4]
    drafter = opened(drafter_for(LLAMA), *(row(t[:n]) for t, n in zip(texts, lengths, strict=True)))
    for steps in [(1, 4), (17, 1), (2, 25), (1, 1)]:
        drafter.draft([row(t[:n]) for t, n in zip(texts, lengths, strict=True)], Clock())
        for index, step in enumerate(steps):
            start = lengths[index] - 1
            drafter.observe(index, texts[index][start : start + step], None)
            lengths[index] += step
    wanted = [row(t[:n]) for t, n in zip(texts, lengths, strict=True)]
    tree = drafter.draft(wanted, Clock())
    for index, one in enumerate(wanted):
        assert scored(tree, index) == pytest.approx(scored(drafted(drafter_for(LLAMA), one)), abs=1e-4)


def test_a_row_that_sat_out_catches_up():
    text, other = tiny.prompt(50, 1), row(tiny.prompt(9))
    drafter = opened(drafter_for(LLAMA), row(text[:10]), other)
    for stop in range(10, 50):
        drafter.draft([row(text[:stop], depth=0), other], Clock())
        drafter.observe(0, [text[stop - 1]], None)
    tree = drafter.draft([row(text), other], Clock())
    assert scored(tree) == pytest.approx(scored(drafted(drafter_for(LLAMA), row(text))), abs=1e-4)


def test_the_draft_models_context_limits_the_depth():
    target = Target(LLAMA)
    drafter = DraftModel(Target(LLAMA, max_context=20), target, width=2)
    for length, depth in [(17, 4), (18, 3), (20, 1), (21, 0), (60, 0)]:
        long, short = row(tiny.prompt(length), budget=40), row(tiny.prompt(5), budget=40)
        tree = drafted(drafter, long, short)
        assert int(tree.row(0).depths.max()) == depth
        assert scored(tree, 1) == pytest.approx(scored(drafted(drafter, short)), abs=1e-4)


def test_temperature_flattens_the_scores_of_sampled_rows():
    tokens = tiny.prompt(9)
    found = scored(drafted(drafter_for(LLAMA), row(tokens, temperature=0.5, noise=Noise(0, tiny.VOCAB))))
    for path, score in found.items():
        assert score == pytest.approx(plain(LLAMA, tokens, path, temperature=0.5), abs=4e-4)


def processed(drafter, monkeypatch):
    """A list to which each pass of the draft model over a part of a text adds its tokens."""
    sizes, extend = [], drafter.model.extend

    def counted(cache, tokens, *args, rows=None, **options):
        if rows is not None:
            sizes.append(tokens.numel())
        return extend(cache, tokens, *args, rows=rows, **options)

    monkeypatch.setattr(drafter.model, "extend", counted)
    return sizes


def test_a_long_prompt_that_joins_holds_up_no_step_by_more_than_a_chunk(monkeypatch):
    target, chunk = Target(LLAMA), 16
    drafter = DraftModel(Target(tiny.model("llama", seed=3)), target, chunk=chunk)
    sizes = processed(drafter, monkeypatch)
    engine = Engine(target, drafter, prefill_chunk=chunk)
    params = SamplingParams(temperature=0.0, max_tokens=70)
    first = engine.add(tiny.prompt(9), params, budget=4)
    engine.step()
    late = [engine.add(tiny.prompt(length, length), params, budget=4) for length in (150, 100)]
    steps = []
    while not engine.idle:
        sizes.clear()
        engine.step()
        steps.append(sum(sizes))
    assert max(steps) == chunk
    assert sum(steps) >= 150 + 100 - 2 * 17
    for sequence in (first, *late):
        prompt = sequence.tokens[: sequence.prompt_length]
        assert sequence.output == reference.decode(LLAMA, prompt, params, 70)
        assert sequence.stats.nodes > 0


def test_a_row_is_left_out_until_its_text_is_processed_and_drafted_as_ever_then(monkeypatch):
    ready, late = row(tiny.prompt(12)), row(tiny.prompt(60, 1))
    drafter = opened(drafter_for(LLAMA, chunk=20), ready)
    drafter.draft([ready], Clock())
    opened(drafter, late, first=1)
    sizes = processed(drafter, monkeypatch)
    for left in (39, 19):
        tree = drafter.draft([ready, late], Clock())
        assert (sizes, drafter.lagging_rows, len(drafter._backlog[1])) == ([20], [1], left)
        assert tree.sizes == [16, 1]
        assert scored(tree) == pytest.approx(scored(drafted(drafter_for(LLAMA), ready)), abs=1e-4)
        sizes.clear()
    tree = drafter.draft([ready, late], Clock())
    assert (sizes, drafter.lagging_rows) == ([19], [])
    assert scored(tree, 1) == pytest.approx(scored(drafted(drafter_for(LLAMA), late)), abs=1e-4)


def test_texts_are_processed_at_once_where_no_other_row_waits(monkeypatch):
    rows = [row(tiny.prompt(60, 1)), row(tiny.prompt(45, 2))]
    drafter = opened(drafter_for(LLAMA, chunk=20), *rows)
    sizes, clock = processed(drafter, monkeypatch), Clock()
    tree = drafter.draft(rows, clock)
    assert (sizes, drafter.lagging_rows, tree.sizes) == ([20, 20, 19, 20, 20, 4], [], [16, 16])
    assert clock.seconds["prefill"] > 0


def test_rows_that_are_not_drafted_for_wait_as_well(monkeypatch):
    off, late = row(tiny.prompt(60), depth=0), row(tiny.prompt(60, 1))
    drafter = opened(drafter_for(LLAMA, chunk=20), off, late)
    sizes = processed(drafter, monkeypatch)
    drafter.draft([off, late], Clock())
    assert (sizes, drafter.lagging_rows) == ([20], [1])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_under_the_noise_an_equal_draft_model_foresees_the_samples(temperature):
    def tau(coupling):
        target = Target(LLAMA)
        engine = Engine(target, DraftModel(Target(LLAMA), target, coupling=coupling))
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=41)
        sequence = engine.add(tiny.prompt(8), params, method="chain", budget=8, depth=8)
        while not engine.idle:
            engine.step()
        return sequence.stats.tau

    assert tau((1.0, 1.0)) > 7 > 3 > tau((0.0, 1.0))


class Words:
    """A tokenizer with nothing but a vocabulary."""

    eos_token_id = None

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}


def pair(draft_words, target_words, draft_size=tiny.VOCAB):
    draft_target = Target(tiny.model("llama", vocab_size=draft_size), draft_words and Words(draft_words))
    return draft_target, Target(LLAMA, target_words and Words(target_words))


def test_another_vocabulary_size_is_refused_when_there_are_no_tokenizers():
    with pytest.raises(CheckpointError, match="the draft model has 40 tokens and the target 48"):
        DraftModel(*pair(None, None, draft_size=40))


@pytest.mark.parametrize("words", ["abdc", "abcx"])
def test_other_meanings_of_ids_are_refused(words):
    with pytest.raises(
        CheckpointError, match=f"token '{words[2] if words == 'abdc' else 'x'}' is .* use a draft"
    ):
        DraftModel(*pair(words, "abcde"))


def test_paddings_and_further_tokens_do_no_harm():
    drafter = DraftModel(*pair("abcd", "abcde", draft_size=40))
    # The target's ids from 40 on are unknown to the draft model.
    tree = drafted(drafter, row([3, 45, 7, 47]), row([3, 45, 7, 47] * 12))
    assert int(tree.tokens[:, 1:].max()) < 40
    assert tree.sizes == [16, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be from 1 to 32, not 0"),
        ({"width": 33}, "width must be from 1 to 32, not 33"),
        ({"chunk": 0}, "chunk must be at least 1, not 0"),
        ({"coupling": (math.nan, 1.0)}, "beta must be"),
        ({"coupling": (0.0, -1.0)}, "kappa must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        drafter_for(LLAMA, **arguments)
