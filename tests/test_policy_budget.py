import numpy as np
import pytest

from ddtree.policy.budget import best_width, gains


def test_gains_add_up_the_nodes_of_all_rows():
    expected = gains(np.array([[0.9, 0.5, 0.1], [0.4, 0.2, 0.0]]))
    assert expected == pytest.approx([2.0, 3.3, 4.0, 4.1])


def test_nodes_are_taken_while_the_ratio_rises():
    expected = gains(np.array([[0.9, 0.5, 0.3, 0.05, 0.01]]))
    seconds = 0.03 + 0.002 * np.arange(6)
    ratios = expected / seconds
    assert best_width(expected, seconds) == ratios.argmax() == 3


def test_a_curve_with_a_step_is_jumped_where_it_pays():
    expected = gains(np.array([[0.1, 0.1, 0.9, 0.9]]))
    assert best_width(expected, np.array([1.0, 1.5, 1.5, 1.5, 1.5])) == 4


def test_nothing_is_taken_when_nothing_pays_and_the_smallest_of_equals():
    assert best_width(gains(np.array([[0.01, 0.01]])), np.array([1.0, 2.0, 3.0])) == 0
    assert best_width(gains(np.array([[0.0, 0.0]])), np.array([1.0, 1.0, 1.0])) == 0


def test_the_going_rate_makes_the_most_tokens_per_second_in_the_long_run():
    random = np.random.default_rng(0)
    rounds = [gains(np.sort(random.random((1, 40)) ** random.uniform(1, 12))[:, ::-1]) for _ in range(300)]
    seconds = 0.02 + 0.001 * np.arange(41)

    def speed(width):
        widths = [width(expected) for expected in rounds]
        return sum(e[w] for e, w in zip(rounds, widths, strict=True)) / sum(seconds[w] for w in widths)

    rate = max(speed(lambda _, w=w: w) for w in range(41))
    for _ in range(5):
        rate = speed(lambda expected: best_width(expected, seconds, rate))  # noqa: B023
    assert rate > speed(lambda expected: best_width(expected, seconds))
    assert rate > 1.01 * max(speed(lambda _, w=w: w) for w in range(41))
