"""Sampler: each choice equals a plain reference, depends on its arguments alone, follows the target's law."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import SequenceBiasLogitsProcessor

import reference
from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.sampling import sampler as sampling
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler, token_logprobs

VOCAB = 400
EOS = frozenset({2})
PROMPT = 6


def drop_odd(prefix: list[int], logits: Tensor) -> Tensor:
    return logits - 3.0 * (torch.arange(logits.numel()) % 2)


def by_length(prefix: list[int], logits: Tensor) -> Tensor:
    return logits.roll(len(prefix))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "almost greedy": {"temperature": 1e-6},
    "plain": {},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 20},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "all filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3, "logit_bias": {3: 4.0, "7": -5}},
    "presence and frequency": {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    "negative penalties": {"presence_penalty": -1, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1},
    "bad words": {"temperature": 0.5, "bad_words": [[5], [1, 2], [9, 8, 7]]},
    "minimum": {"min_tokens": 4, "stop_token_ids": [11, 12], "logit_bias": {2: 20, 11: 20}},
    "custom": {"processors": [drop_odd, by_length], "top_p": 0.8},
    "everything": {
        "temperature": 0.9,
        "top_k": 100,
        "top_p": 0.97,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {4: 1.0},
        "bad_words": [[6], [3, 4]],
        "min_tokens": 3,
        "processors": [drop_odd],
    },
}


def expected(params: SamplingParams, logits: Tensor, prefix: list[int]) -> int:
    """The choice by full sorts, without state, with noise for the whole vocabulary."""
    scores = reference.processed(logits, prefix, PROMPT, params, EOS)
    if params.greedy:
        return int(scores.argmax())
    assert params.seed is not None
    return int((scores.log_softmax(-1) + Noise(params.seed, VOCAB).gumbel(len(prefix))).argmax())


def make(seed: int | None = 1, prompt_length: int = PROMPT, vocab: int = VOCAB, **fields: Any) -> Sampler:
    return Sampler(
        SamplingParams(seed=seed, **fields), vocab_size=vocab, eos_ids=EOS, prompt_length=prompt_length
    )


def target(prefix: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A stand-in for a model: logits that depend on the last two tokens."""
    generator = torch.Generator().manual_seed(1000 * prefix[-1] + prefix[-2])
    return (torch.randn(VOCAB, generator=generator) * 2.5).to(dtype)


def decode(sampler: Sampler, steps: int, dtype: torch.dtype = torch.float32) -> list[int]:
    prefix = [1, 5, 9, 3, 3, 8]
    for _ in range(steps):
        prefix.append(sampler.choose(target(prefix, dtype), prefix))
    return prefix


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_choice_equals_the_plain_reference(name: str, dtype: torch.dtype) -> None:
    for seed in (0, 2**63 - 1):
        sampler = make(seed, **SETTINGS[name])
        prefix = [1, 5, 9, 3, 3, 8]
        for _ in range(25):
            logits = target(prefix, dtype)
            token = sampler.choose(logits, prefix)
            assert token == expected(sampler.params, logits, prefix)
            prefix.append(token)


@pytest.mark.parametrize("name", SETTINGS)
def test_abandoned_branches_and_siblings_leave_no_trace(name: str) -> None:
    """A tree is looked at in any order; each choice is that of a fresh sampler on the same prefix."""
    sampler = make(3, **SETTINGS[name])
    generator = torch.Generator().manual_seed(0)
    committed = decode(make(3, **SETTINGS[name]), 12)
    prefixes = []
    for _ in range(60):
        cut = int(torch.randint(PROMPT, len(committed) + 1, (), generator=generator))
        branch = torch.randint(
            0, 12, (int(torch.randint(0, 6, (), generator=generator)),), generator=generator
        )
        prefixes.append(committed[:cut] + branch.tolist())
    for prefix in prefixes:
        logits = target(prefix)
        before = logits.clone()
        assert sampler.choose(logits, prefix) == make(3, **SETTINGS[name]).choose(logits, prefix)
        assert torch.equal(logits, before), "the target's logits are not ours to change"


@pytest.mark.parametrize("name", ["everything", "presence and frequency", "repetition"])
def test_telling_what_is_committed_changes_nothing(name: str) -> None:
    plain, told = make(4, **SETTINGS[name]), make(4, **SETTINGS[name])
    prefix = [1, 5, 9, 3, 3, 8]
    for step in range(30):
        for branch in ([], [7], [7, 7, 3], [4, 200]):
            node = prefix + branch
            assert told.choose(target(node), node, len(prefix)) == plain.choose(target(node), node)
        prefix.append(step % 9)


def test_counts_follow_a_growing_prefix_without_counting_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.sampling.processors import TokenCounts

    counted = 0
    replace = TokenCounts._replace

    def spy(self: TokenCounts, old: list[int], new: list[int]) -> None:
        nonlocal counted
        counted += len(new)
        replace(self, old, new)

    monkeypatch.setattr(TokenCounts, "_replace", spy)
    sampler = make(1, prompt_length=1000, repetition_penalty=1.2, temperature=0)
    prefix = [v % VOCAB for v in range(1000)]
    sampler.choose(target(prefix), prefix)
    assert counted == 1000
    for step in range(50):
        prefix.append(step)
        sampler.choose(target(prefix), prefix)
    assert counted == 1050


def test_ids_beyond_the_head_are_not_counted() -> None:
    """Embeddings may be wider than the head (image tokens in a prompt)."""
    sampler = make(1, temperature=0, repetition_penalty=2.0, prompt_length=3)
    prefix = [VOCAB + 7, 1, VOCAB]
    logits = torch.zeros(VOCAB)
    logits[1], logits[4] = 3.0, 2.0
    assert sampler.choose(logits, prefix) == 4
    assert sampler.choose(logits, [1, VOCAB + 3]) == 4
    assert sampler.choose(logits, [VOCAB + 3]) == 1


def test_bad_words_equal_transformers_sequence_bias() -> None:
    words = ((5,), (1, 2), (9, 8, 7), (2, 2))
    warper = SequenceBiasLogitsProcessor({word: -math.inf for word in words})
    warper.prepared_bias_variables = False
    for prefix in ([1, 5, 9, 8], [3, 1], [2, 2], [2], [8, 9], [3, 8], [9, 8, 9, 8]):
        seen: list[Tensor] = []
        spy = [lambda _, scores, seen=seen: seen.append(scores.clone()) or scores]
        make(0, vocab=12, prompt_length=1, bad_words=words, processors=spy).choose(torch.zeros(12), prefix)
        assert torch.equal(seen[0], warper(torch.tensor([prefix]), torch.zeros(1, 12))[0])


def test_ignore_eos_makes_it_an_ordinary_token() -> None:
    assert make(0, stop_token_ids=[7]).stop_ids == {2, 7}
    sampler = make(0, temperature=0, ignore_eos=True, min_tokens=3, stop_token_ids=[7], prompt_length=1)
    assert sampler.stop_ids == {7}
    logits = torch.zeros(VOCAB)
    logits[2] = 5.0
    assert sampler.choose(logits, [1]) == 2


def test_custom_processors_get_the_prefix_and_may_not_change_it() -> None:
    seen = []

    def spoil(prefix: list[int], logits: Tensor) -> Tensor:
        seen.append(list(prefix))
        prefix.clear()
        logits.zero_()
        logits[len(seen)] = 1.0
        return logits

    sampler = make(0, temperature=0, processors=[spoil])
    prefix, logits = [1, 2, 3], torch.randn(VOCAB)
    before = logits.clone()
    assert sampler.choose(logits, prefix) == 1
    assert (prefix, seen) == ([1, 2, 3], [[1, 2, 3]])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:-1], r"must return floating-point logits \[400\], not torch.float32\[399\]"),
        (lambda x: x[None], r"must return floating-point logits \[400\], not torch.float32\[1, 400\]"),
        (lambda x: x.tolist(), r"must return floating-point logits \[400\], not list"),
        (lambda x: x.long(), r"must return floating-point logits \[400\], not torch.int64\[400\]"),
        (lambda x: x * math.nan, "returned NaN or infinite logits at position 3"),
        (lambda x: x.index_fill(0, torch.tensor(5), math.inf), "returned NaN or infinite logits at"),
        (lambda x: x - math.inf, "ruled out every token at position 3"),
    ],
)
def test_a_processor_that_misbehaves_is_named(result: Any, message: str) -> None:
    def my_processor(prefix: list[int], logits: Tensor) -> Any:
        return result(logits)

    for temperature in (0.0, 1.0):
        with pytest.raises(ConfigError, match=f"processor .*my_processor {message}"):
            make(0, temperature=temperature, processors=[my_processor]).choose(torch.zeros(VOCAB), [1, 2, 3])


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_ruling_out_every_token_is_an_error(fields: dict[str, Any]) -> None:
    sampler = make(0, vocab=3, bad_words=[[0], [1]], min_tokens=1, prompt_length=1, **fields)
    with pytest.raises(ConfigError, match="no token is left at position 1; relax bad_words"):
        sampler.choose(torch.zeros(3), [1])


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {1: 1}}]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_an_error(fields: dict[str, Any], value: float) -> None:
    logits = torch.zeros(VOCAB, dtype=torch.float16)
    logits[33] = value
    with pytest.raises(UnsupportedModelError, match="logits at position 2 are NaN or infinite"):
        make(0, **fields).choose(logits, [1, 2])


def test_a_target_s_own_minus_infinity_is_an_ordinary_value() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[8, 9]] = 0.0
    for fields in ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.5}):
        assert make(0, **fields).choose(logits, [1]) in (8, 9)


def test_logprobs_are_the_target_s_own() -> None:
    logits = target([1, 2], torch.bfloat16)
    got = token_logprobs(logits, 17, 5)
    want = torch.log_softmax(logits.float(), -1)
    best = sorted(range(VOCAB), key=lambda v: (-want[v].item(), v))[:5]
    assert got.token == 17 and got.logprob == pytest.approx(want[17].item(), abs=1e-5)
    assert [token for token, _ in got.top] == best
    assert [value for _, value in got.top] == pytest.approx(want[best].tolist(), abs=1e-5)
    assert token_logprobs(logits, 17, 0).top == ()
    assert [token for token, _ in token_logprobs(torch.zeros(VOCAB), 3, 1000).top] == list(range(VOCAB))


def test_the_vocabulary_is_checked() -> None:
    with pytest.raises(ConfigError, match="logit_bias names token 400"):
        make(0, logit_bias={400: 1.0})


def test_works_inside_and_outside_of_inference_mode() -> None:
    sampler = make(1, **SETTINGS["everything"])
    expected = decode(make(1, **SETTINGS["everything"]), 20)
    prefix = [1, 5, 9, 3, 3, 8]
    for step in range(20):
        with torch.inference_mode(step % 2 == 0):
            prefix.append(sampler.choose(target(prefix), prefix))
    assert prefix == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_highest_score_is_found_among_any_signs_and_ties(dtype):
    """In half precision it is found by the numbers' bits."""
    generator = torch.Generator().manual_seed(0)
    cases = [
        torch.randn(50, generator=generator).mul(scale).add(shift)
        for scale in (1, 100)
        for shift in (0, -500)
    ]
    cases += [
        torch.zeros(5),
        -torch.zeros(5),
        torch.tensor([-0.0, 0.0, -1.0]),
        torch.tensor([-2.0, -1.0, -1.0]),
    ]
    cases += [torch.tensor([1.0, 3.0, 3.0]), torch.full((4,), float("-inf"))]
    for scores in cases:
        own = scores.to(dtype)
        token, value = sampling._highest(own)
        assert value == float(own.float().max())
        assert token == own.float().tolist().index(value)
    for sign in (1.0, -1.0):
        nan = torch.tensor(float("nan")).copysign(torch.tensor(sign))
        token, value = sampling._highest(
            torch.stack([torch.tensor(1.0), nan, torch.tensor(math.inf)]).to(dtype)
        )
        assert token == 1 and value != value
