"""At temperature > 0 the drawn text has the target's distribution, with every drafter, coupled to noise or not.

All continuations of a few tokens are enumerated exactly and compared by a chi-square test with the texts of many seeds.
The sampler alone draws those, from logits that were computed once for every prefix. The engine must then give the very
same text for each of many seeds, without a drafter and with every one. To count 20,000 texts of three tokens of the
engine takes minutes for every drafter and is marked `exhaustive`.
"""

import functools
import itertools

import pytest
import torch

import tiny
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler

VOCAB, LENGTH, ROWS = 8, 3, 128
FEW, SEEDS, MANY = 64, 4_000, 20_000
PROMPT = [3, 5, 2, 7]
# Wilson and Hilferty's normal approximation is within 1e-4 of the chi-square quantile at these degrees of freedom.
Z_LIMIT = 4.0


@functools.cache
def model():
    return tiny.model("llama", vocab_size=VOCAB, initializer_range=0.15)


@functools.cache
def logits():
    """The target's logits [8^3, LENGTH, V] along every continuation, in the order of `itertools.product`."""
    texts = [PROMPT + list(text) for text in itertools.product(range(VOCAB), repeat=LENGTH)]
    with torch.inference_mode():
        found = model()(input_ids=torch.tensor(texts), use_cache=False).logits
    return found[:, len(PROMPT) - 1 : -1]


def index(text):
    """Place of the first continuation that begins with these tokens."""
    return sum(token * VOCAB ** (LENGTH - 1 - depth) for depth, token in enumerate(text))


@functools.cache
def exact(temperature, length):
    """Probability of every continuation of so many tokens."""
    logprobs = (logits().double() / temperature).log_softmax(-1)
    steps = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    whole = logprobs.gather(-1, steps[:, :, None]).sum(1).flatten().exp()
    return whole.reshape(VOCAB**length, -1).sum(1)


def drawn(temperature, seeds, length=LENGTH):
    """The text of each seed as the sampler alone draws it, token after token."""
    texts = []
    for seed in range(seeds):
        params = SamplingParams(temperature=temperature, seed=seed)
        sampler = Sampler(params, VOCAB, (), prompt_length=len(PROMPT))
        text = []
        for depth in range(length):
            text.append(sampler.choose(logits()[index(text), depth], PROMPT + text))
        texts.append(tuple(text))
    return texts


def outputs(drafter, temperature, seeds, method="tree", budget=6):
    """The text of each seed as the engine gives it."""
    engine = Engine(Target(model()), drafter, max_rows=ROWS)
    sequences = [
        engine.add(
            PROMPT,
            SamplingParams(temperature=temperature, seed=seed, max_tokens=LENGTH),
            method=method,
            budget=budget,
        )
        for seed in range(seeds)
    ]
    while not engine.idle:
        engine.step()
    engine.target.close()
    return [tuple(sequence.output) for sequence in sequences]


def z_score(texts, temperature):
    """Chi-square statistic of texts as a standard normal; cells expected under 5 times are pooled."""
    length = len(texts[0])
    places = torch.tensor([index(text) for text in texts]) // VOCAB ** (LENGTH - length)
    seen = places.bincount(minlength=VOCAB**length)
    expected = exact(temperature, length) * len(texts)
    large = expected >= 5
    observed = torch.cat([seen[large], seen[~large].sum()[None]]).double()
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


TEMPERATURES = pytest.mark.parametrize("temperature", [0.7, 1.0])
DRAFTED = pytest.mark.parametrize("kind", ["chain", "tree", "lookup", "draft", "merged", "domino"])
COUPLED = pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])


@TEMPERATURES
def test_counts_over_seeds_fit_the_exact_distribution(temperature):
    assert abs(z_score(drawn(temperature, SEEDS, length=2), temperature)) < Z_LIMIT


@TEMPERATURES
def test_the_engine_gives_each_seed_the_text_that_the_sampler_draws(temperature):
    assert outputs(None, temperature, 4 * FEW) == drawn(temperature, 4 * FEW)


@TEMPERATURES
@COUPLED
@DRAFTED
def test_each_seed_gives_the_same_text_with_every_drafter(kind, coupled, temperature):
    drafter = tiny.drafter(kind, model(), coupled=coupled)
    method = "chain" if kind == "chain" else "tree"
    assert outputs(drafter, temperature, FEW, method) == drawn(temperature, FEW)


def test_noise_that_forgets_its_position_fails_the_same_test(monkeypatch):
    """It draws each token rightly and the text wrongly."""
    right = Noise.gumbel
    monkeypatch.setattr(Noise, "gumbel", lambda self, position, tokens=None: right(self, 0, tokens))
    assert z_score(drawn(1.0, SEEDS, length=2), 1.0) > 10 * Z_LIMIT


def test_a_wrong_temperature_fails_the_same_test():
    assert z_score(drawn(0.85, SEEDS, length=2), 1.0) > Z_LIMIT


@pytest.mark.exhaustive
@TEMPERATURES
def test_counts_of_the_engine_fit_the_exact_distribution(temperature):
    texts = outputs(None, temperature, MANY)
    assert abs(z_score(texts, temperature)) < Z_LIMIT
    assert z_score(texts, temperature - 0.1) > Z_LIMIT


@pytest.mark.exhaustive
@TEMPERATURES
@COUPLED
@DRAFTED
def test_counts_of_the_engine_fit_the_exact_distribution_with_every_drafter(kind, coupled, temperature):
    drafter = tiny.drafter(kind, model(), coupled=coupled)
    texts = outputs(drafter, temperature, MANY, method="chain" if kind == "chain" else "tree")
    assert abs(z_score(texts, temperature)) < Z_LIMIT
