"""The engine: exact lengths, endings, batches and rows, whatever is drafted."""

import pytest

import reference
import tiny
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError, PromptError
from ddtree.model.target import Target
from driving import answered, finish, greedy
from scripted import Scripted

LENGTH = 40
PROMPTS = [tiny.prompt(n, seed=n) for n in (13, 4, 29)]


@pytest.fixture(scope="module")
def texts(model):
    return [prompt + reference.decode(model, prompt, greedy(), LENGTH) for prompt in PROMPTS]


@pytest.fixture
def engine(model, texts):
    """An engine whose drafter knows the texts."""
    return Engine(Target(model), Scripted(texts))


def decode(model, drafter, params, **options):
    """The sequence of the first prompt."""
    return answered(Engine(Target(model), drafter), (PROMPTS[0], params), **options)[0]


def test_accepted_drafts_give_the_reference_text_in_fewer_rounds(model, texts):
    sequence = decode(model, Scripted(texts, reach=4), greedy())
    assert sequence.tokens == texts[0]
    assert sequence.stats.tau > 4
    assert sum(sequence.stats.accepted.values()) == sequence.stats.rounds
    assert sequence.stats.output_tokens == LENGTH


@pytest.mark.parametrize("cap", range(1, 11))
def test_max_tokens_is_exact_for_every_value(model, texts, cap):
    sequence = decode(model, Scripted(texts, reach=4), greedy(max_tokens=cap))
    assert sequence.output == texts[0][len(PROMPTS[0]) :][:cap]
    assert sequence.finish_reason == "length"


def test_a_cancelled_sequence_frees_its_row_and_spares_the_others(model, texts):
    engine = Engine(Target(model), Scripted(texts), max_rows=3)
    sequences = [engine.add(p, greedy()) for p in PROMPTS]
    waiting = engine.add(PROMPTS[0], greedy())
    engine.step()
    assert list(engine.waiting) == [waiting]
    for one in (waiting, sequences[0]):
        engine.cancel(one)
        assert one.finish_reason == "cancelled"
    assert waiting.output == [] and len(engine.running) == engine._cache.rows == 2
    finish(engine)
    assert [s.tokens for s in sequences[1:]] == texts[1:]


def test_two_ragged_batches_in_turn_are_two_fresh_runs(engine, texts):
    for _ in range(2):
        sequences = [engine.add(p, greedy(), budget=b) for p, b in zip(PROMPTS, (3, 64, 8), strict=True)]
        finish(engine)
        assert [s.tokens for s in sequences] == texts
        assert engine._cache.rows == 0 and engine.drafter.seen == []


@pytest.mark.parametrize("reach", [1, 4, 16])
def test_a_context_nearly_full_shrinks_the_block_then_ends_with_length(texts, reach):
    small = tiny.model("llama")
    engine = Engine(Target(small, max_context=30), Scripted(texts, reach=reach))
    sequence = engine.add(PROMPTS[0], greedy())
    finish(engine)
    assert sequence.finish_reason == "length"
    assert sequence.tokens == texts[0][:30]


def test_drafting_switched_off_half_way_changes_no_token(engine, texts):
    sequence = engine.add(PROMPTS[0], greedy())
    engine.step()
    engine.step()
    sequence.request = engine.request("off", 0, 1, None, sampled=False)
    finish(engine)
    assert sequence.tokens == texts[0]
    assert sequence.stats.arms["off"] > 1 and sequence.stats.arms["tree@scripted"] == 1


def test_logprobs_are_the_targets_with_and_without_drafts(model, texts):
    plain = decode(model, None, greedy(logprobs=3))
    drafted = decode(model, Scripted(texts), greedy(logprobs=3))
    assert len(plain.logprobs) == LENGTH
    for token, a, b in zip(plain.output, plain.logprobs, drafted.logprobs, strict=True):
        assert a.token == b.token == token
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [i for i, _ in a.top] == [i for i, _ in b.top]


def test_a_failing_processor_ends_its_own_sequence_only(engine, texts):
    def fail(prefix, logits):
        if len(prefix) > len(PROMPTS[0]) + 3:
            raise RuntimeError("mine")
        return logits

    broken = engine.add(PROMPTS[0], greedy(processors=(fail,)))
    sound = engine.add(PROMPTS[1], greedy())
    finish(engine)
    assert broken.finish_reason == "error" and str(broken.error) == "mine"
    assert broken.tokens == texts[0][: len(PROMPTS[0]) + 4]
    assert sound.tokens == texts[1]


def test_time_is_told_apart_by_part_of_the_round(model, texts):
    stats = decode(model, Scripted(texts), greedy()).stats
    assert all(stats.seconds[part] > 0 for part in ("prefill", "draft", "verify", "walk", "commit"))
    assert 0 < stats.ttft < stats.total
    assert sum(stats.seconds.values()) <= stats.total


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(PromptError, match="the prompt is empty: give at least one token"):
        Engine(Target(model)).add([], greedy())


def test_no_buffer_grows_with_the_square_of_the_context(texts):
    """A huge context costs nothing until it is used."""
    huge = tiny.model("llama", max_position_embeddings=2**20)
    engine = Engine(Target(huge), Scripted(texts))
    sequence = engine.add(PROMPTS[0], greedy())
    finish(engine)
    assert sequence.tokens == texts[0]
    assert 0 < engine._cache.capacity <= 512


@pytest.mark.parametrize("kind", ["tree", "draft", "merged"])
def test_a_row_that_ends_before_its_neighbour_has_drafted_spares_both(model, texts, kind):
    """The drafter's buffers hold no row yet that only joined; one that ended with its first token is moved over."""
    engine = Engine(Target(model), tiny.drafter(kind, model))
    first = engine.add(PROMPTS[0], greedy())
    engine.step()
    engine.step()
    short = engine.add(PROMPTS[1], greedy(max_tokens=1))
    last = engine.add(PROMPTS[2], greedy())
    finish(engine)
    assert [first.tokens, last.tokens] == [texts[0], texts[2]]
    assert short.tokens == texts[1][: len(PROMPTS[1]) + 1]


def test_a_cancel_from_within_a_round_frees_the_row_at_its_end(engine, texts):
    other = engine.add(PROMPTS[1], greedy())

    def cancelling(prefix, logits):
        if len(prefix) == len(PROMPTS[0]) + 3:
            engine.cancel(other)
        return logits

    one = engine.add(PROMPTS[0], greedy(processors=(cancelling,)))
    third = engine.add(PROMPTS[2], greedy())
    finish(engine)
    assert [one.tokens, third.tokens] == [texts[0], texts[2]]
    assert other.finish_reason == "cancelled"
    assert engine._cache.rows == 0


def test_a_processor_that_decodes_with_its_own_engine_is_told_so(model):
    engine = Engine(Target(model))
    sequence = engine.add(PROMPTS[0], greedy(processors=(lambda prefix, logits: engine.step(),)))
    finish(engine)
    assert isinstance(sequence.error, ConfigError) and "a step is running" in str(sequence.error)


class Failing(Scripted):
    """A drafter whose rows cannot be dropped."""

    def drop_row(self, row):
        raise ZeroDivisionError("mine\ntwo")


def test_a_row_that_cannot_be_freed_closes_the_engine(model, texts):
    engine = Engine(Target(model), Failing(texts), max_rows=2)
    short = engine.add(PROMPTS[0], greedy(max_tokens=1))
    others = [engine.add(PROMPTS[1], greedy()), engine.add(PROMPTS[2], greedy())]
    with pytest.raises(ZeroDivisionError, match="mine"):
        engine.step()
    assert (short.finish_reason, short.tokens) == ("length", texts[0][: len(PROMPTS[0]) + 1])
    assert [(s.finish_reason, str(s.error)) for s in others] == [("error", "mine\ntwo")] * 2
    assert engine.idle and engine._cache.rows == 0
    for call in (lambda: engine.add(PROMPTS[0], greedy()), engine.step):
        with pytest.raises(
            ConfigError, match=r"is closed, a row could not be freed \(ZeroDivisionError: mine two\)"
        ):
            call()


def test_a_closed_engine_cancels_what_runs_and_takes_no_more(model, texts):
    engine = Engine(Target(model), Scripted(texts), max_rows=1)
    sequences = [engine.add(p, greedy()) for p in PROMPTS[:2]]
    engine.step()
    engine.close()
    assert [s.finish_reason for s in sequences] == ["cancelled"] * 2
    assert engine.idle and engine._cache.rows == 0 and engine.drafter.seen == []
    with pytest.raises(ConfigError, match="the engine is closed: load the model again"):
        engine.add(PROMPTS[0], greedy())


def test_what_a_processor_raises_after_a_stop_does_not_count(model, texts):
    answer = texts[0][len(PROMPTS[0]) :]
    at = next(i for i in range(2, 5) if answer[i] not in answer[:i])
    asked = []

    def failing(prefix, logits):
        asked.append(len(prefix) - len(PROMPTS[0]))
        if asked[-1] > at:
            raise RuntimeError("asked after the stop")
        return logits

    params = greedy(processors=(failing,), stop_token_ids=(answer[at],))
    one = decode(model, Scripted(texts, reach=6), params)
    assert (one.finish_reason, one.error, one.output) == ("stop", None, answer[: at + 1])
    assert max(asked) == at + 1


def test_a_sequence_that_its_processor_cancels_keeps_the_tokens_chosen_before(model, texts):
    def cancelling(prefix, logits):
        if len(prefix) == len(texts[0]) - LENGTH + 5:
            engine.cancel(one)
        return logits

    for drafter in (None, Scripted(texts, reach=8)):
        engine = Engine(Target(model), drafter)
        one = engine.add(PROMPTS[0], greedy(processors=(cancelling,)), budget=32)
        finish(engine)
        assert (one.finish_reason, one.output) == ("cancelled", texts[0][-LENGTH:][:5])


def test_each_part_of_an_answer_is_taken_once(engine):
    one = engine.add(PROMPTS[0], greedy(logprobs=0))
    taken = []
    while one.finish_reason is None:
        engine.step()
        taken.append(one.take_new())
    assert [token for part in taken for token in part.tokens] == one.output
    assert [origin for part in taken for origin in part.origins] == one.origins
    assert [entry for part in taken for entry in part.logprobs] == one.logprobs
    assert one.take_new().tokens == []
