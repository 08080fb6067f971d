"""Which drafters, and how many nodes: by speed, with hysteresis and bounded exploration."""

import json

import numpy as np
import pytest

from ddtree.policy import OFF, Arm, Request
from ddtree.policy.controller import EXPLORATION, ArmStats, Controller, best_width

FULL, DFLASH, LOOKUP = Arm("tree", ("dflash", "lookup")), Arm("tree", ("dflash",)), Arm("tree", ("lookup",))
SECONDS = {FULL: 0.034, DFLASH: 0.033, LOOKUP: 0.028, OFF: 0.023}


def controller(*members, seconds=None):
    request = Request("auto", "auto", members or ("dflash", "lookup"))
    return Controller(request, seconds or (lambda arm, nodes: SECONDS[arm]))


def play(control, rounds, tokens, seed=0):
    """Play rounds in which arms make `tokens` on average; return the arms played."""
    random = np.random.default_rng(seed)
    played = []
    for _ in range(rounds):
        arm = control.choose().arm
        luck = random.random()
        made = {
            other: 1 + (mean - 1) * (0.5 + luck) * random.uniform(0.8, 1.2) for other, mean in tokens.items()
        }
        others = {other: made[other] for other in (DFLASH, LOOKUP) if other != arm == FULL}
        control.learn(arm, made.get(arm, 1.0), others)
        played.append(arm)
    return played


def test_arms_of_a_request():
    def names(*request):
        return [str(arm) for arm in Request(*request).arms()]

    assert names("auto", "auto", ("a", "b")) == ["tree@a+b", "tree@a", "tree@b", "off"]
    assert names("auto", 8, ("a",)) == ["tree@a", "off"]
    assert names("chain", "auto", ("a", "b")) == ["chain@a+b", "off"]
    assert names("auto", "auto", ()) == names("off", 0, ("a",)) == ["off"]


@pytest.mark.parametrize(
    ("tokens", "best"),
    [
        ({FULL: 3.6, DFLASH: 2.2, LOOKUP: 3.3}, LOOKUP),
        ({FULL: 5.6, DFLASH: 4.7, LOOKUP: 1.6}, FULL),
        ({FULL: 1.1, DFLASH: 1.05, LOOKUP: 1.05}, OFF),
    ],
)
def test_the_fastest_arm_is_used(tokens, best):
    played = play(controller(), 400, tokens)
    assert np.mean([arm == best for arm in played[100:]]) > 0.9


@pytest.mark.parametrize("good", [0, 300, 3000])
def test_a_drafter_that_is_useless_or_becomes_so_is_left(good):
    control = controller("dflash")
    play(control, good, {DFLASH: 2.8})
    assert control.current == DFLASH
    before = control.explored
    played = play(control, 600, {DFLASH: 1.0}, seed=1)
    assert OFF in played[: 50 if good == 0 else 200]
    assert np.mean([arm == OFF for arm in played[250:]]) >= 1 - 1.2 * EXPLORATION
    assert control.explored - before <= EXPLORATION * 600 + 1


def test_an_arm_that_comes_to_pay_is_found_again():
    control = controller()
    play(control, 200, {FULL: 1.05, DFLASH: 1.0, LOOKUP: 1.05})
    assert control.current == OFF
    play(control, 1500, {FULL: 5.0, DFLASH: 1.5, LOOKUP: 4.9})
    assert control.current == LOOKUP


def test_arms_that_are_alike_are_not_switched_back_and_forth():
    control = controller()
    play(control, 2000, {FULL: 3.4, DFLASH: 3.3, LOOKUP: 2.8})
    assert len(control.switches) <= 8


def test_probabilities_that_do_not_come_true_are_soon_believed_no_more():
    stats = ArmStats()
    for _ in range(30):
        worth = stats.observe(tokens=1.0, nodes=9.0, expected=1.8)
    assert worth < 1.12 and stats.ratio < 0.15
    for _ in range(400):
        stats.observe(tokens=2.0, nodes=9.0, expected=2.0)
    assert stats.ratio > 0.9
    lucky, unlucky = (ArmStats().observe(tokens, 9.0, 1.8) for tokens in (6.0, 1.0))
    assert 1 < unlucky < lucky < 4


def test_state_and_switches_can_be_read():
    control = controller()
    play(control, 300, {FULL: 1.1, DFLASH: 1.05, LOOKUP: 1.05})
    state = json.loads(json.dumps(control.state()))
    assert state["arm"] == "off" and state["rounds"] == 300
    switch = state["switches"][0]
    assert switch["before"] == str(FULL) and "tokens a second a row" in switch["reason"]
    assert state["arms"][str(LOOKUP)]["tokens_per_round"] < 1.3


def test_a_batch_shares_one_width_that_is_worth_the_nodes_of_all_rows():
    chances = np.array([[0.9, 0.5, 0.1], [0.4, 0.2, 0.0]])  # 2, 3.3, 4.0, 4.1 tokens
    assert best_width(chances, np.array([1.0, 1.2, 1.6, 2.0]), None) == 1
    assert best_width(chances, np.array([1.0, 1.2, 1.3, 1.6]), None) == 2
    assert best_width(chances, np.array([1.0, 1.2, 1.6, 2.0]), None, least=2) == 2


def test_a_step_in_the_costs_is_jumped_where_it_pays_and_the_smallest_of_equals_is_taken():
    assert best_width(np.array([[0.1, 0.1, 0.9, 0.9]]), np.array([1.0, 1.5, 1.5, 1.5, 1.5]), None) == 4
    assert best_width(np.array([[0.01, 0.01]]), np.array([1.0, 2.0, 3.0]), None) == 0
    assert best_width(np.zeros((1, 2)), np.ones(3), None) == 0


def test_the_going_rate_makes_the_most_tokens_per_second_in_the_long_run():
    random = np.random.default_rng(0)
    rounds = [np.sort(random.random((1, 40)) ** random.uniform(1, 12))[:, ::-1] for _ in range(300)]
    seconds = 0.02 + 0.001 * np.arange(41)

    def speed(width):
        widths = [width(chances) for chances in rounds]
        tokens = sum(1 + chances[0, :n].sum() for chances, n in zip(rounds, widths, strict=True))
        return tokens / sum(seconds[n] for n in widths)

    constant = rate = max(speed(lambda _, n=n: n) for n in range(41))
    for _ in range(5):
        rate = speed(lambda chances: best_width(chances, seconds, rate))  # noqa: B023
    assert rate > speed(lambda chances: best_width(chances, seconds, None))
    assert rate > 1.01 * constant
