import json

import numpy as np
import pytest

from ddtree.policy.acceptance import Acceptance
from ddtree.policy.arms import OFF, Arm, arms_for
from ddtree.policy.controller import EXPLORATION, Controller, Figures, Made

FULL, DFLASH, LOOKUP = Arm("tree", ("dflash", "lookup")), Arm("tree", ("dflash",)), Arm("tree", ("lookup",))
SECONDS = {FULL: 0.034, DFLASH: 0.033, LOOKUP: 0.028, OFF: 0.023}


def controller(arms=(FULL, DFLASH, LOOKUP, OFF), rows=1):
    return Controller(arms, lambda arm, nodes: SECONDS[arm], rows)


def play(control, rounds, tokens, slowness=None, seed=0):
    """Rounds in which arms make `tokens` on average; returns the arms played."""
    random = np.random.default_rng(seed)
    played = []
    for _ in range(rounds):
        arm = control.choose()
        luck = random.random()
        made = {other: 1 + float(random.poisson((mean - 1) * (0.5 + luck))) for other, mean in tokens.items()}
        others = [other for other in (DFLASH, LOOKUP) if other != arm and arm == FULL]
        foretold = {other: Made(made[other], 8.0) for other in others}
        control.learn(arm, Made(made.get(arm, 1.0), 8.0 * (arm != OFF)), foretold)
        control.time(arm, (slowness or {}).get(arm, 1.0))
        played.append(arm)
    return played


def test_arms_of_a_request():
    assert arms_for("auto", ["dflash", "lookup"])[0] == FULL and OFF in arms_for("auto", ["dflash", "lookup"])
    assert [str(arm) for arm in arms_for("auto", ["a"])] == ["tree@a", "chain@a", "off"]
    assert [str(arm) for arm in arms_for("chain", ["a", "b"])] == ["chain@a+b", "off"]
    assert arms_for("auto", []) == arms_for("off", ["a"]) == [OFF]


def test_a_free_drafter_with_a_budget_to_be_found_needs_no_arm_that_is_off():
    assert [str(arm) for arm in arms_for("auto", ["a"], ["a"])] == ["tree@a", "chain@a"]
    assert [str(arm) for arm in arms_for("tree", ["a"], ["a"])] == ["tree@a"]
    assert OFF not in arms_for("auto", ["net", "a"], ["a"])
    assert OFF in arms_for("tree", ["net", "a"], ["a"]) and OFF in arms_for("auto", ["a"], ["a"], 8)


def test_probabilities_count_for_what_came_true_of_them_and_are_trusted_again_in_time():
    figures = Figures()
    for now in range(1, 101):
        figures.worth(Made(1.0, 4.0, 1.5), now)
    assert figures.truth < 0.1
    for now in range(101, 801):
        figures.worth(Made(1.0, 0.0, 1.0), now)
    assert figures.truth > 0.8


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


def test_a_useless_drafter_is_left_within_50_rounds():
    for seed in range(20):
        played = play(controller((DFLASH, OFF)), 400, {DFLASH: 1.03}, seed=seed)
        assert OFF in played[:50]
        spent = sum(SECONDS[arm] for arm in played)
        assert 400 * SECONDS[OFF] / spent >= 0.95


def test_under_several_rows_it_is_left_the_sooner():
    """Each row of a round is evidence of its own."""
    for seed in range(20):
        played = play(controller((DFLASH, OFF), rows=4), 100, {DFLASH: 1.03}, seed=seed)
        assert OFF in played[:14]
        assert played[20:].count(DFLASH) <= 5


def test_one_of_use_is_not_left_for_few_poor_rounds_of_several_rows():
    for seed in range(20):
        random = np.random.default_rng(seed)
        control = controller((DFLASH, OFF), rows=4)
        played = []
        for _ in range(200):
            played.append(control.choose())
            drafts = played[-1] == DFLASH
            tokens = 1 + float(random.poisson(0.65, 4).mean()) if drafts else 1.0  # pays by 15 %
            control.learn(played[-1], Made(tokens, 8.0 * drafts), {})
            control.time(played[-1], 1.0)
        assert played.count(OFF) <= 20


def test_no_more_than_the_bound_is_explored():
    control = controller()
    play(control, 1000, {FULL: 1.1, DFLASH: 1.05, LOOKUP: 1.05})
    assert 0 < control.explored <= EXPLORATION * 1000


def test_what_was_not_explored_does_not_pile_up():
    """A drafter that becomes useless after long good service is left as soon as one that was useless from the start."""
    for good in (300, 3000):
        control = controller((DFLASH, OFF))
        play(control, good, {DFLASH: 2.8})
        assert control.current == DFLASH
        before = control.explored
        played = play(control, 600, {DFLASH: 1.0}, seed=1)
        assert control.current == OFF
        assert np.mean([arm == OFF for arm in played[200:]]) >= 1 - 1.2 * EXPLORATION
        assert control.explored - before <= EXPLORATION * 600 + 4


def test_an_arm_that_comes_to_pay_is_found_again():
    control = controller()
    play(control, 200, {FULL: 1.05, DFLASH: 1.0, LOOKUP: 1.05})
    assert control.current == OFF
    play(control, 1000, {FULL: 5.0, DFLASH: 1.5, LOOKUP: 4.9})
    assert control.current == LOOKUP


def test_arms_that_are_alike_are_not_switched_back_and_forth():
    control = controller()
    play(control, 2000, {FULL: 3.4, DFLASH: 3.3, LOOKUP: 2.8})
    assert len(control.switches) <= 8


def known(tokens):
    """Of an arm whose rounds accepted so many of eight nodes, in an earlier run."""
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.play(8, tokens)
    return Acceptance.from_list(acceptance.as_list())


def test_what_earlier_runs_learnt_is_begun_with_and_overruled_by_what_is_seen():
    control = controller()
    control.recall({FULL: known(3), DFLASH: known(1), LOOKUP: known(3)})
    assert control.choose() == LOOKUP
    played = play(control, 600, {FULL: 5.0, DFLASH: 4.9, LOOKUP: 1.1})
    assert control.current in (FULL, DFLASH) and played[0] == LOOKUP
    few = Acceptance()
    few.play(8, 3)
    control = controller()
    control.recall({FULL: few, LOOKUP: few})
    assert control.choose() == FULL


def test_a_drafter_known_to_be_useless_is_left_at_once():
    recalled, new = controller((DFLASH, OFF)), controller((DFLASH, OFF))
    recalled.recall({DFLASH: known(0)})
    for control in (recalled, new):
        play(control, 16, {DFLASH: 1.0})
    assert (recalled.current, new.current) == (OFF, DFLASH)


def test_how_many_nodes_paid_on_another_machine_does_not_speak_against_drafting_fewer():
    """Eight nodes cost three times a plain step; one accepted node of one is worth its time."""
    control = Controller((FULL, OFF), lambda arm, nodes: (20 + 5 * nodes) / 1000)
    control.recall({FULL: known(1)})
    for _ in range(100):
        arm = control.choose()
        control.learn(arm, Made(1.0, 0.0) if arm == OFF else Made(1.6, 1.0), {})
    assert control.current == FULL and not control.switches


def test_a_text_that_suits_the_arm_in_use_does_not_speak_for_the_others():
    control = controller()
    play(control, 300, {FULL: 3.6, DFLASH: 2.6, LOOKUP: 3.3})
    assert control.current == LOOKUP
    usual = control.speed(DFLASH)
    play(control, 60, {FULL: 8.2, DFLASH: 2.6, LOOKUP: 8.0})
    assert control.current == LOOKUP
    assert control.speed(LOOKUP) > 1.5 * control.speed(DFLASH)
    assert control.speed(DFLASH) < 1.4 * usual


def test_measured_time_counts_more_than_predicted():
    control = controller((DFLASH, OFF))
    play(control, 1000, {DFLASH: 1.8}, slowness={DFLASH: 1.6, OFF: 1.0})
    assert control.current == OFF


def test_probabilities_that_do_not_come_true_are_soon_believed_no_more():
    figures = Figures()
    for now in range(30):
        worth = figures.worth(Made(tokens=1.0, nodes=9.0, expected=1.8), now)
    assert worth < 1.12
    scattered = [Figures().worth(Made(tokens, 9.0, 1.8), 1) for tokens in (1.0, 6.0)]
    assert scattered[1] - scattered[0] < 1.1


def test_state_and_switches_can_be_read():
    control = controller()
    play(control, 300, {FULL: 1.1, DFLASH: 1.05, LOOKUP: 1.05})
    state = json.loads(json.dumps(control.state()))
    assert state["arm"] == "off" and state["rounds"] == 300
    switch = state["switches"][0]
    assert switch["before"] == str(FULL) and "tokens a second a row" in switch["reason"]
    assert state["arms"][str(LOOKUP)]["tokens_per_round"] < 1.3
