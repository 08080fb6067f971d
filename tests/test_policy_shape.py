"""Sizes of passes are compared between neighbouring rounds, whatever the machine's pace."""

import numpy as np
import pytest

from ddtree.policy.costs import Costs
from ddtree.policy.latency import LatencyModel, Sample
from ddtree.policy.shape import Shape

LINE = np.linspace(0.02, 0.05, 20)  # seconds of 1..20 nodes, as first measured


def truth(width):
    """Measured over predicted: nodes are dearer than they were thought to be."""
    return width**0.5


def test_nothing_is_corrected_before_there_is_something_to_compare():
    shape = Shape()
    for _ in range(50):
        assert not shape.observe(9, 3.0)
    assert (shape.correct(LINE) == LINE).all()


def test_sizes_are_compared_whatever_the_pace():
    random = np.random.default_rng(0)
    shape, pace = Shape(), 1.0
    for number in range(120):
        pace *= 2.0 if number % 40 == 20 else 0.5 if number % 40 == 0 else 1.0
        width = int(random.choice([1, 2, 8, 16]))
        shape.observe(width, pace * truth(width) * random.lognormal(0, 0.03))
    found = shape.correct(LINE) / LINE
    for width in (1, 2, 4, 8, 16):
        assert found[width - 1] / found[0] == pytest.approx(truth(width), rel=0.1)


def test_a_truth_that_was_seen_is_kept_where_only_one_size_is_used():
    shape = Shape()
    for number in range(40):
        shape.observe(1 + 8 * (number % 2), 3.0 if number % 2 else 1.0)
    before = shape.correct(LINE)
    assert before[8] / before[0] > 2.5 * LINE[8] / LINE[0]
    for _ in range(500):
        shape.observe(9, 3.0)
    assert (shape.correct(LINE) == before).all()


def test_nodes_beyond_the_largest_pass_are_as_much_dearer_as_before_it():
    shape = Shape()
    for number in range(60):
        width = (1, 8)[number % 2]
        shape.observe(width, (LINE[0] + 3 * (LINE[width - 1] - LINE[0])) / LINE[width - 1])
    found = shape.correct(LINE)
    found *= LINE[0] / found[0]
    assert np.diff(found)[8:] / np.diff(LINE)[8:] == pytest.approx(np.full(11, 3.0), rel=0.1)


def test_nodes_are_never_worth_time():
    shape = Shape()
    for number in range(60):
        shape.observe((1, 8)[number % 2], (1.0, 0.3)[number % 2])
    found = shape.correct(LINE)
    assert (np.diff(found) >= 0).all()
    assert found[7] == pytest.approx(found[0], rel=1e-6)
    assert np.diff(found)[7:] == pytest.approx(0.5 * np.diff(LINE)[7:], rel=1e-6)


def test_bursts_are_passed_over():
    shape = Shape()
    for number in range(100):
        shape.observe(1 + 15 * (number % 2), 10.0 if number % 9 == 0 else 1.0)
    assert shape.correct(LINE) == pytest.approx(LINE, rel=1e-6)


def test_noise_corrects_nothing():
    """Spells in which a machine is several times as slow, and rounds that scatter by a fifth."""
    random = np.random.default_rng(1)
    shape, slow, worst = Shape(), 1.0, 0.0
    for number in range(2000):
        slow = random.choice([1.0, 3.0, 10.0]) if number % 5 == 0 else slow
        shape.observe(int(random.choice([1, 2, 3, 9])), slow * random.lognormal(0, 0.2))
        worst = max(worst, float(np.abs(shape.correct(LINE) / LINE - 1).max()))
    assert worst < 0.3


def test_noise_where_nodes_are_free_does_not_make_the_next_ones_dear():
    """Up to 16 nodes cost a ten-thousandth of a pass; 3 % more than the root's own time is no slope to go on with."""
    seconds = np.interp(np.arange(1, 65), [1, 16, 64], [0.035, 0.0350035, 0.07])
    shape = Shape()
    for number in range(60):
        shape.observe((1, 16)[number % 2], (1.0, 1.03)[number % 2])
    assert shape.correct(seconds)[-1] < 1.7 * seconds[-1]


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_clocks_that_went_wrong_are_passed_over(ratio):
    shape = Shape()
    for number in range(20):
        assert not shape.observe(1 + number % 2, ratio)
    assert (shape.correct(LINE) == LINE).all()


def test_predictions_follow_what_passes_of_each_size_take():
    """First measured flat; the root alone, 2 and 9 nodes then take 57, 66 and 208 ms, at two rows too."""
    flat = [Sample(width, rows, 0, 0.05) for width in (1, 2, 17, 33) for rows in (1, 2)]
    costs = Costs(LatencyModel.fit(flat, {"lookup": [Sample(9, 1, 0, 0.001)]}, machine={}))
    took = {0: 0.057, 1: 0.066, 8: 0.208}
    for rows in (1, 2):
        for number in range(90):
            nodes = (0, 8, 1)[number % 3]
            costs.verified(nodes, rows, 100.0, rows * took[nodes])
        for nodes, seconds in took.items():
            assert costs.verify(nodes, rows, 100.0) == pytest.approx(rows * seconds, rel=0.1)
        assert (np.diff(costs.rounds(32, rows, 100.0, ["lookup"], sampled=False)) >= 0).all()
