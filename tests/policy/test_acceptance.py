import json

import numpy as np
import pytest

from ddtree.errors import ConfigError
from ddtree.policy.acceptance import REFRESH_EVERY, Acceptance, _descending


def taught(truth, rounds=400, depth=2, seed=0):
    """An acceptance that saw nodes of random probabilities p accepted with probability truth(p)."""
    random = np.random.default_rng(seed)
    acceptance = Acceptance()
    for _ in range(rounds):
        logprobs = -random.exponential(1.5, size=16).astype(np.float32)
        accepted = random.random(16) < truth(np.exp(logprobs))
        acceptance.learn(logprobs, np.full(16, depth), accepted)
    return acceptance


def at(acceptance, probabilities, depth=2):
    logprobs = np.log(np.array(probabilities, dtype=np.float32))
    return acceptance.calibrated(logprobs, np.full(len(probabilities), depth))


def test_the_drafters_own_probability_stands_until_something_was_seen():
    wanted = [0.9, 0.5, 0.1, 0.01]
    assert at(Acceptance(), wanted) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_observed_acceptance_is_learnt(power):
    acceptance = taught(lambda p: p**power)
    wanted = np.array([0.8, 0.5, 0.3, 0.15])
    assert at(acceptance, wanted) == pytest.approx(wanted**power, abs=0.06)


def test_each_depth_learns_for_itself():
    acceptance = taught(lambda p: p * 0.2, depth=5)
    assert at(acceptance, [0.6], depth=5)[0] < 0.2
    assert at(acceptance, [0.6], depth=1) == pytest.approx([0.6], rel=0.05)


def test_a_likelier_node_never_falls_below_a_less_likely_one():
    for seed in range(20):
        random = np.random.default_rng(seed)
        acceptance = taught(lambda p: random.random(p.shape), rounds=40, seed=seed)  # noqa: B023
        falling = at(acceptance, np.linspace(1, 1e-4, 300))
        assert (np.diff(falling) <= 1e-12).all() and falling.min() >= 0 and falling.max() <= 1


def test_what_is_old_fades():
    acceptance = taught(lambda p: p * 0, rounds=2000)
    random = np.random.default_rng(1)
    for _ in range(2000):
        logprobs = -random.exponential(1.5, size=16).astype(np.float32)
        acceptance.learn(logprobs, np.full(16, 2), random.random(16) < np.exp(logprobs))
    assert at(acceptance, [0.5])[0] > 0.3


def test_json_keeps_what_was_learnt():
    acceptance = taught(lambda p: p**2, rounds=10 * REFRESH_EVERY)
    again = Acceptance.from_list(json.loads(json.dumps(acceptance.as_list())))
    wanted = np.geomspace(1, 1e-3, 50)
    assert at(again, wanted) == pytest.approx(at(acceptance, wanted), abs=2e-3)


@pytest.mark.parametrize(
    "rows",
    [5, [5], [["a", 1, 1, 1, 1]], [[1, 1, 1, 1]], [[0, 1, 1, 1, 1]], [[1, 99, 1, 1, 1]], [[1, 1, 1, 1, 5]],
     [[1, 1, 1, -1, 1]], [[1, 1, float("nan"), 1, 0]], [[1.5, 1, 1, 1, 1]]],
)  # fmt: skip
def test_damaged_counts_are_named(rows):
    with pytest.raises(ConfigError, match="the acceptance counts are damaged"):
        Acceptance.from_list(rows)


def test_pooling_gives_the_nearest_descending_sequence():
    values, weights = np.array([0.5, 0.9, 0.2, 0.4, 0.1]), np.array([1.0, 3.0, 1.0, 1.0, 1.0])
    assert _descending(values[None], weights[None])[0] == pytest.approx([0.8, 0.8, 0.3, 0.3, 0.1])
