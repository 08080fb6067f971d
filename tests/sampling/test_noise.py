"""The Gumbel noise: a pure function of (seed, position, token), and as good as independent draws."""

import math

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.sampling.noise import Noise, _gumbel, couple

EULER = 0.5772156649015329


def reference(seed: int, position: int, token: int) -> float:
    """The same number in plain Python integers and floats."""
    word = 2**64

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    stream = mix((seed + gamma) % word)
    key = mix((stream + (position + 1) * gamma) % word)
    bits = mix((key + token * gamma) % word) >> 11
    return -math.log(-math.log((bits | 1) * 2.0**-53))


def cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-x.double()))


def kolmogorov(values: torch.Tensor) -> float:
    """Kolmogorov-Smirnov distance from the Gumbel distribution, times sqrt(n); p < 0.001 above 1.95."""
    ordered = cdf(values.flatten().sort().values)
    n = ordered.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    return float(gap) * math.sqrt(n)


def correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    """Correlation of the probability integral transforms, times sqrt(n): standard normal if independent."""
    a, b = cdf(left).flatten() - 0.5, cdf(right).flatten() - 0.5
    return float((a * b).mean() * 12) * math.sqrt(a.numel())


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 4096, 2**31 - 1])
def test_equals_the_plain_integer_definition(seed: int, position: int) -> None:
    tokens = torch.tensor([0, 1, 2, 49151, 151935, 2**31 - 1])
    got = Noise(seed, 200_000).gumbel(position, tokens)
    want = torch.tensor([reference(seed, position, int(token)) for token in tokens])
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("size", [1, 3, 8, 17, 257, 5000])
def test_any_subset_has_the_values_of_the_full_row(size: int) -> None:
    vocab = 70_001
    generator = torch.Generator().manual_seed(size)
    tokens = torch.randint(0, vocab, (size,), generator=generator)
    alone = Noise(5, vocab).gumbel(9, tokens)
    noise = Noise(5, vocab)
    row = noise.gumbel(9)
    assert torch.equal(alone, row[tokens])
    assert torch.equal(noise.gumbel(9, tokens), alone)
    assert torch.equal(noise.gumbel(9, tokens.view(1, -1).int()), alone.view(1, -1))


def test_a_wider_vocabulary_and_other_threads_change_nothing() -> None:
    row = Noise(5, 1000).gumbel(3)
    assert torch.equal(Noise(5, 123_457).gumbel(3)[:1000], row)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(Noise(5, 123_457).gumbel(3)[:1000], row)
    finally:
        torch.set_num_threads(threads)


def test_a_row_is_made_once_while_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.sampling.noise._ROWS_KEPT", 4)
    noise = Noise(1, 100)
    row = noise.gumbel(0)
    for position in (1, 2, 3):
        noise.gumbel(position)
    assert noise.gumbel(0) is row
    noise.gumbel(4)
    assert noise.gumbel(0) is row, "position 0 was used last but one"
    before = noise.gumbel(2).clone()
    for position in range(10, 20):
        noise.gumbel(position)
    assert noise.gumbel(0) is not row
    assert torch.equal(noise.gumbel(2), before)


def test_rows_made_in_inference_mode_serve_outside_of_it() -> None:
    noise = Noise(1, 100)
    with torch.inference_mode():
        inside = noise.gumbel(0)
    noise.gumbel(1)
    weight = torch.ones((), requires_grad=True)
    (inside * weight).sum().backward()
    assert weight.grad is not None


def test_follows_the_gumbel_distribution() -> None:
    values = torch.stack([Noise(seed, 5000).gumbel(t) for seed in range(4) for t in range(10)])
    n = values.numel()
    assert abs(values.mean().item() - EULER) < 4 * math.pi / math.sqrt(6 * n)
    # The kurtosis of a Gumbel is 5.4, so the variance of the sample variance is 4.4 variance^2 / n.
    variance = math.pi**2 / 6
    assert abs(values.var().item() - variance) < 4 * variance * math.sqrt(4.4 / n)
    assert kolmogorov(values) < 1.95
    assert bool(values.isfinite().all())


def test_tails_are_those_of_a_gumbel() -> None:
    values = Noise(3, 2**20).gumbel(0)
    for expected in (16, 256):
        high = int((values > -math.log(-math.log1p(-expected / 2**20))).sum())
        low = int((values < -math.log(-math.log(expected / 2**20))).sum())
        assert abs(high - expected) < 5 * math.sqrt(expected)
        assert abs(low - expected) < 5 * math.sqrt(expected)


def test_the_smallest_draw_is_finite() -> None:
    """The finalizer maps the word 0 to 0, which as a uniform draw would have no logarithm."""
    assert _gumbel(torch.zeros(1, dtype=torch.int64)).item() == pytest.approx(-math.log(53 * math.log(2)))


@pytest.mark.parametrize("lag", [1, 2, 8, 64, 1024])
def test_neighbouring_tokens_positions_and_seeds_are_independent(lag: int) -> None:
    vocab, block = 4096, 40
    one = torch.stack([Noise(7, vocab).gumbel(t) for t in range(block)])
    assert abs(correlation(one[:, lag:], one[:, :-lag])) < 4.5
    later = torch.stack([Noise(7, vocab).gumbel(t + lag) for t in range(block)])
    assert abs(correlation(one, later)) < 4.5
    other = torch.stack([Noise(7 + lag, vocab).gumbel(t) for t in range(block)])
    assert abs(correlation(one, other)) < 4.5


def test_a_diagonal_of_token_and_position_is_independent() -> None:
    """Keys that were sums of token and position terms would repeat along a diagonal."""
    vocab, block = 4096, 64
    rows = torch.stack([Noise(7, vocab).gumbel(t) for t in range(block)])
    for shift in (-3, -1, 1, 3):
        left, right = rows[:-1, 8:-8], rows[1:, 8 + shift : vocab - 8 + shift]
        assert abs(correlation(left, right)) < 4.5
    assert rows.unique().numel() > rows.numel() - 5000


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Wilson-Hilferty: the statistic as a standard normal."""
    expected = probabilities.double() * counts.sum()
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    df = counts.numel() - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_argmax_with_noise_samples_the_softmax(over: str) -> None:
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.3, -2.0, 1.0, 0.9])
    if over == "seeds":
        noise = torch.stack([Noise(seed, 8).gumbel(4) for seed in range(20_000)])
    else:
        noise = torch.stack([Noise(2, 8).gumbel(position) for position in range(20_000)])
    counts = torch.bincount((logits + noise).argmax(-1), minlength=8)
    probabilities = torch.softmax(logits, 0)
    assert abs(chi_square(counts, probabilities)) < 4
    wrong = torch.softmax(logits * 1.1, 0)
    assert chi_square(counts, wrong) > 5, "the test would not notice a temperature that is off by a tenth"


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", None, True])
def test_a_seed_out_of_range_is_refused_by_name(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer from 0 to"):
        Noise(seed, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [-1, 2**31])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(ConfigError, match="position"):
        Noise(0, 10).gumbel(position)


def test_a_few_tokens_have_the_values_of_the_row_to_within_a_rounding():
    noise = Noise(123, 5000)
    tokens = [0, 4999, 17, 17, 2500]
    for position in (0, 1, 999, 2**31 - 1):
        assert noise.few(position, tokens) == pytest.approx(noise.gumbel(position)[tokens].tolist(), abs=1e-5)
        assert noise.few(position, tokens) == noise.gumbel(position)[tokens].tolist()
    assert noise.few(3, []) == noise.few(4, []) == []


def test_coupled_scores_are_renormalised() -> None:
    logq = torch.log_softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), -1)
    noise = torch.stack([Noise(1, 50).gumbel(position) for position in (4, 5, 6)])
    assert torch.allclose(couple(logq, noise, 0.0, 1.0), logq, atol=1e-6), "the plain drafter"
    got = couple(logq, noise, 0.7, 0.4)
    want = torch.log_softmax((logq.double() + 0.7 * noise.double()) / 0.4, -1)
    assert got.dtype == torch.float32 and torch.allclose(got.double(), want, atol=1e-5)
    # A perfect drafter ranks the target's sample first.
    assert torch.equal(couple(logq, noise, 1.0, 0.5).argmax(-1), (logq + noise).argmax(-1))


@pytest.mark.parametrize(("beta", "kappa"), [(-0.1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, math.nan)])
def test_a_coupling_out_of_range_is_refused(beta: float, kappa: float) -> None:
    with pytest.raises(ConfigError, match=r"beta|kappa"):
        couple(torch.zeros(2), torch.zeros(2), beta, kappa)
