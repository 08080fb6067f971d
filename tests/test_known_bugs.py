"""Public bug reports of speculative decoding, each a test named after its symptom (those not at home elsewhere)."""

import pytest

import reference
import tiny
import words
from ddtree.engine.detokenizer import Detokenizer
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from scripted import Scripted

PROMPT = tiny.prompt(9)


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def answer(model):
    return reference.decode(model, PROMPT, SamplingParams(temperature=0.0), 40)


def run(model, drafter, *, text=None, **fields):
    engine = Engine(Target(model), drafter)
    sequence = engine.add(
        PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **fields}), text=text
    )
    while not engine.idle:
        engine.step()
    return sequence


def knowing(answer, reach=5):
    return Scripted([PROMPT + answer], reach=reach)


def first_new(answer, low, high):
    return next(i for i in range(low, high) if answer[i] not in answer[:i])


def test_stop_string_mid_accept_leaves_no_ids_or_logprobs_behind_it(model, answer):
    """vllm#47616: text was cut, token ids and logprobs ran past the stop string."""
    tokenizer = words.tokenizer()
    at = first_new(answer, 2, 5)
    stop = tokenizer.decode([answer[at]])
    text = Detokenizer(tokenizer, SamplingParams(stop=(stop,)))
    sequence = run(model, knowing(answer), text=text, stop=(stop,), logprobs=2)
    assert sequence.finish_reason == "stop"
    assert sequence.output == answer[: at + 1]
    assert len(sequence.logprobs) == at + 1
    assert text.text == tokenizer.decode(answer[:at])


def test_stop_token_inside_an_accepted_run_is_not_hidden_by_max_tokens(model, answer):
    """sglang#31599: [10, 11, STOP, 20, ...] with a cap of 5 must give 3 tokens and finish "stop"."""
    at = first_new(answer, 2, 4)
    sequence = run(model, knowing(answer), stop_token_ids=(answer[at],), max_tokens=at + 3)
    assert (sequence.output, sequence.finish_reason) == (answer[: at + 1], "stop")


def test_a_token_equal_to_a_mask_id_is_not_stripped_from_the_output(model):
    """z-lab/dflash#73: output was filtered by value. Force every token to be the would-be mask id."""
    mask = 7
    sequence = run(model, None, logit_bias={mask: 100.0}, max_tokens=12)
    assert sequence.output == [mask] * 12


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": {4: 3.0, 9: -5.0}},
        {"min_p": 0.1, "temperature": 1.0, "seed": 3},
        {"top_k": 3, "temperature": 1.3, "seed": 3},
        {"processors": (lambda prefix, logits: logits.roll(prefix[-1]),)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_penalties_bias_and_processors_are_not_ignored_on_drafted_tokens(model, answer, fields):
    """vllm#18902, sglang#26330: processing must see each node's own prefix."""
    expected = reference.decode(model, PROMPT, SamplingParams(**{"temperature": 0.0, **fields}), 40)
    assert expected != answer
    sequence = run(model, knowing(expected), **fields)
    assert sequence.output == expected
    assert sequence.stats.tau > 4


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1.0])
def test_temperatures_at_and_near_zero_divide_by_nothing(model, answer, temperature):
    """vllm#27077: a sentinel for T = 0 was divided by."""
    output = run(model, knowing(answer), temperature=temperature, seed=1).output
    assert len(output) == 40
    if temperature < 1:
        assert output == answer


def test_no_token_outside_the_filtered_support_appears(model):
    """sparkring#161: top-k and top-p were ignored with drafts on. With k = 1, sampling must be greedy."""
    greedy = reference.decode(model, PROMPT, SamplingParams(temperature=0.0), 40)
    assert run(model, knowing(greedy), temperature=1.5, top_k=1, seed=9).output == greedy
    assert run(model, knowing(greedy), temperature=1.5, top_p=1e-6, seed=9).output == greedy


def test_a_tree_that_holds_the_chain_accepts_no_less_in_any_round(model, answer):
    """lucebox#414: state drift made trees accept fewer tokens than the chain they contain."""
    chain = run(model, knowing(answer, reach=3))
    tree = run(model, knowing(answer, reach=5))
    assert tree.stats.rounds <= chain.stats.rounds
    assert tree.stats.tau >= chain.stats.tau


def test_the_seed_decides_the_text_whatever_else_is_in_the_batch(model):
    """TensorRT-LLM#17599, vllm#51226: seeds were ignored or depended on the batch."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30)
    alone = run(model, None, temperature=1.0, seed=11, max_tokens=30).output
    engine = Engine(Target(model), max_rows=5)
    others = [
        engine.add(tiny.prompt(n), SamplingParams(temperature=1.0, seed=n, max_tokens=30)) for n in (3, 8, 21)
    ]
    again = engine.add(PROMPT, params)
    while not engine.idle:
        engine.step()
    assert again.output == alone
    assert all(other.output != alone for other in others)
    assert run(model, None, temperature=1.0, seed=12, max_tokens=30).output != alone


def test_a_prompt_longer_than_the_context_is_an_error_not_a_crash(model):
    """omlx#1190: failure at the full context."""
    from ddtree.errors import PromptError

    with pytest.raises(PromptError, match="the context holds 512"):
        Engine(Target(model)).add([1] * 600, SamplingParams())
