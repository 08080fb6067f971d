"""At temperature > 0 the drawn text has the target's distribution, with every drafter, coupled to noise or not.

All 8^3 continuations of three tokens are enumerated exactly and compared with 20,000 seeds by a chi-square test. For
decoding without a drafter that runs always. For every drafter it takes half an hour and is marked `exhaustive`; what
always runs for them is the stronger statement on fewer seeds, that each seed gives the very same text.
"""

import functools
import itertools

import pytest
import torch

import tiny
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.sampler import SamplingParams

VOCAB, LENGTH, SEEDS, ROWS = 8, 3, 20_000, 128
PROMPT = [3, 5, 2, 7]
# Wilson and Hilferty's normal approximation is within 1e-4 of the chi-square quantile at these degrees of freedom.
Z_LIMIT = 4.0


@functools.cache
def model():
    return tiny.model("llama", vocab_size=VOCAB, initializer_range=0.15)


@functools.cache
def exact(temperature):
    """Probability of every continuation, in the order of `itertools.product`."""
    texts = [list(text) for text in itertools.product(range(VOCAB), repeat=LENGTH)]
    with torch.inference_mode():
        logits = model()(input_ids=torch.tensor([PROMPT + text for text in texts]), use_cache=False).logits
    logprobs = (logits.double() / temperature).log_softmax(-1)
    steps = torch.tensor(texts)
    total = sum(logprobs[torch.arange(len(texts)), len(PROMPT) - 1 + k, steps[:, k]] for k in range(LENGTH))
    return total.exp()


def outputs(drafter, temperature, seeds, method="tree", budget=6):
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


def counts(drafter, temperature, method="tree"):
    seen = torch.zeros(VOCAB**LENGTH)
    for a, b, c in outputs(drafter, temperature, SEEDS, method):
        seen[(a * VOCAB + b) * VOCAB + c] += 1
    return seen


@functools.cache
def plain(temperature, seeds):
    return outputs(None, temperature, seeds)


def z_score(seen, temperature):
    """Chi-square statistic of the counts as a standard normal; cells expected under 5 times are pooled."""
    expected = exact(temperature) * SEEDS
    large = expected >= 5
    observed = torch.cat([seen[large], seen[~large].sum()[None]]).double()
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_counts_over_seeds_fit_the_exact_distribution(temperature):
    assert abs(z_score(counts(None, temperature), temperature)) < Z_LIMIT


DRAFTED = pytest.mark.parametrize("kind", ["chain", "tree", "lookup", "draft", "merged"])
COUPLED = pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@COUPLED
@DRAFTED
def test_each_seed_gives_the_same_text_with_every_drafter(kind, coupled, temperature):
    drafter = tiny.drafter(kind, model(), coupled=coupled)
    method = "chain" if kind == "chain" else "tree"
    assert outputs(drafter, temperature, 500, method) == plain(temperature, 500)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@COUPLED
@DRAFTED
def test_counts_over_seeds_fit_the_exact_distribution_with_every_drafter(kind, coupled, temperature):
    drafter = tiny.drafter(kind, model(), coupled=coupled)
    seen = counts(drafter, temperature, method="chain" if kind == "chain" else "tree")
    assert abs(z_score(seen, temperature)) < Z_LIMIT


@pytest.mark.slow
def test_a_wrong_rule_fails_the_same_test(monkeypatch):
    """Noise that forgets its position draws each token rightly and the text wrongly."""
    right = Noise.gumbel
    monkeypatch.setattr(Noise, "gumbel", lambda self, position, tokens=None: right(self, 0, tokens))
    assert z_score(counts(None, 1.0), 1.0) > 10 * Z_LIMIT


@pytest.mark.slow
def test_a_wrong_temperature_fails_the_same_test():
    assert z_score(counts(None, 0.9), 1.0) > Z_LIMIT
