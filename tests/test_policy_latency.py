"""Latency models: what they recover, what they keep to whatever was measured, and how they follow a machine."""

import json

import numpy as np
import pytest

from ddtree.errors import ConfigError
from ddtree.policy import nonnegative
from ddtree.policy.latency import LatencyModel, Sample

# Seconds of an A800 running Qwen3-8B, by context and nodes (CaDDTree, arXiv 2606.01813, published cost model).
A800 = {
    1: {1: 34.8, 64: 34.8, 128: 34.8, 256: 38.5, 512: 55.2},
    1000: {1: 35.0, 64: 35.0, 128: 35.0, 256: 41.4, 512: 63.2},
    4000: {1: 34.4, 64: 37.5, 128: 41.7, 256: 55.2, 512: 86.0},
    8000: {1: 47.9, 64: 52.3, 128: 57.0, 256: 73.6, 512: 117.0},
}


def known(width, rows, context):
    """20 ms and 0.5 ms a node, 1 ms beyond 64 nodes; attention on top."""
    nodes = rows * width
    seconds = 0.02 + 0.0005 * nodes + 0.0005 * max(0, nodes - 64)
    return seconds + 2e-6 * rows * context + 1e-8 * nodes * (context + width)


def grid(seconds, widths=(2, 3, 5, 9, 17, 33, 64, 65, 129), rows=(1, 2, 4), contexts=(0, 64, 512, 2048)):
    return [Sample(w, r, c, seconds(w, r, c)) for w in widths for r in rows for c in contexts]


def fitted(verify, draft=None, **machine):
    return LatencyModel.fit(verify, draft or {}, machine=machine)


def noisy(seed, bursts=0.1):
    """Measurements of a machine that is noisy and now and then ten times as slow."""
    random = np.random.default_rng(seed)
    return [
        Sample(s.width, s.rows, s.context,
               s.seconds * random.lognormal(0, 0.2) * (10 if random.random() < bursts else 1))
        for s in grid(known)
    ]  # fmt: skip


def test_a_known_curve_is_recovered_also_between_and_beyond_what_was_measured():
    model = fitted(grid(known))
    for width, rows, context in [
        (2, 1, 0),
        (7, 2, 300),
        (50, 1, 1000),
        (100, 1, 64),
        (40, 3, 64),
        (513, 1, 8000),
    ]:
        assert model.verify(width, rows, context) == pytest.approx(known(width, rows, context), rel=1e-6)


def test_the_published_a800_curve_is_met_within_a_few_percent():
    points = [Sample(n, 1, context, ms / 1000) for context, row in A800.items() for n, ms in row.items()]
    model = fitted(points)
    errors = [abs(model.verify(p.width, 1, p.context) / p.seconds - 1) for p in points]
    assert np.median(errors) <= 0.02
    assert max(errors) <= 0.10


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_measured_the_curve_never_falls_and_never_bends_down(seed):
    model = fitted(noisy(seed))
    for rows, context in [(1, 0), (1, 5000), (3, 100), (8, 64)]:
        curve = model.curve(1025, rows, context)
        steps = np.diff(curve)
        assert curve[0] > 0
        assert (steps >= -1e-12).all()
        assert (np.diff(steps[1:]) >= -1e-12).all()
        longer = model.curve(1025, rows, context + 1000)
        assert (longer >= curve - 1e-12).all()


def test_bursts_and_noise_hardly_move_the_fit():
    repeated = [sample for seed in range(7) for sample in noisy(seed)]
    model = fitted(repeated)
    errors = [abs(model.verify(s.width, s.rows, s.context) / s.seconds - 1) for s in grid(known)]
    assert np.median(errors) <= 0.05


def test_a_point_that_was_slow_every_time_is_outvoted():
    points = grid(known)
    points[40] = Sample(points[40].width, points[40].rows, points[40].context, points[40].seconds * 10)
    model = fitted(points)
    errors = [abs(model.verify(s.width, s.rows, s.context) / s.seconds - 1) for s in grid(known)]
    assert max(errors) <= 0.02


def test_repeated_measurements_count_by_their_median():
    points = [Sample(2, 1, 0, 0.03), Sample(2, 1, 0, 0.02), Sample(2, 1, 0, 9.0)]
    model = fitted(points)
    assert model.points == (Sample(2, 1, 0, 0.03),)
    assert model.verify(2) == pytest.approx(0.03)


def test_the_root_alone_has_a_cost_of_its_own_for_each_number_of_rows():
    alone = [Sample(1, 1, c, 0.4 * known(2, 1, c)) for c in (0, 64, 512)]
    alone += [Sample(1, 4, c, 0.9 * known(1, 4, c)) for c in (0, 64, 512)]
    model = fitted([*grid(known), *alone])
    assert model.verify(1, 1, 64) == pytest.approx(0.4 * known(2, 1, 64), rel=1e-6)
    assert model.verify(1, 4, 64) == pytest.approx(0.9 * known(1, 4, 64), rel=1e-6)
    assert model.verify(2, 1, 64) == pytest.approx(known(2, 1, 64), rel=1e-6)


def test_the_root_alone_is_never_dearer_than_two_nodes():
    model = fitted([*grid(known), Sample(1, 1, 0, 1.0)])
    assert model.verify(1) <= model.verify(2)


def test_what_was_cut_short_does_not_take_nodes_beyond_it_to_be_free():
    flat = [Sample(width, 1, 32, 0.05) for width in (2, 9, 17)]
    model = fitted(flat, cut_short=True)
    assert model.verify(17, 1, 32) == pytest.approx(0.05)
    assert model.verify(34, 1, 32) == pytest.approx(0.10)
    assert fitted(flat).verify(34, 1, 32) == pytest.approx(0.05)


def test_more_rows_than_were_measured_cost_what_a_tree_of_as_many_nodes_does():
    model = fitted([*grid(known, rows=(1,)), Sample(1, 1, 0, 0.5 * known(2, 1, 0))])
    assert model.verify(1, 8, 0) == pytest.approx(known(1, 8, 0), rel=1e-6)


def test_the_curve_is_the_single_predictions_in_a_row():
    model = fitted([*grid(known), Sample(1, 1, 0, 0.01)])
    for _ in range(9):
        model.observe("verify", model.verify(9), 1.7 * known(9, 1, 0))
    curve = model.curve(40, 2, 333.0)
    assert curve.shape == (40,)
    assert curve == pytest.approx([model.verify(width, 2, 333.0) for width in range(1, 41)], rel=1e-12)


def test_drafters_add_up_unless_they_were_measured_merged():
    def flat(seconds):
        return [Sample(w, 1, c, seconds) for w in (5, 17) for c in (0, 100)]

    model = fitted(grid(known), {"dflash": flat(0.006), "lookup": flat(0.002), "draft": flat(0.001)})
    assert model.draft(["dflash"], 9) == pytest.approx(0.006)
    assert model.draft(["dflash", "lookup"], 9) == pytest.approx(0.008)
    assert model.draft([], 9) == 0
    whole = fitted(grid(known), {"dflash": flat(0.006), "lookup": flat(0.002), "dflash+lookup": flat(0.009)})
    assert whole.draft(["dflash", "lookup"], 9) == pytest.approx(0.009)
    assert whole.draft(["lookup", "dflash"], 9) == pytest.approx(0.009)
    with pytest.raises(ConfigError, match="'draft' was not measured: run ddtree calibrate"):
        whole.draft(["dflash", "draft"], 9)


def test_draft_time_follows_rows_width_and_context():
    def seconds(width, rows, context):
        return 0.004 + 0.001 * (rows - 1) + 1e-4 * rows * width + 1e-6 * rows * context

    model = fitted(grid(known), {"dflash": grid(seconds)})
    assert model.draft(["dflash"], 40, 2, 700.0) == pytest.approx(seconds(40, 2, 700.0), rel=1e-6)


def rounds(model, part, factors):
    """Rounds of a machine that is `factors` times as slow as when it was measured; the predictions made."""
    predictions = []
    for factor in factors:
        predicted = {"verify": lambda: model.verify(17), "draft": lambda: model.draft(["lookup"], 17),
                     "overhead": model.overhead}[part]()  # fmt: skip
        truth = {"verify": known(17, 1, 0), "draft": 0.002, "overhead": 0.001}[part] * factor
        model.observe(part, predicted, truth, ["lookup"] if part == "draft" else [])
        predictions.append(predicted)
    return predictions


@pytest.mark.parametrize("part", ["verify", "draft"])
def test_a_lasting_slowdown_is_followed_within_twenty_rounds(part):
    model = fitted(grid(known), {"lookup": [Sample(9, 1, 0, 0.002)]})
    before = rounds(model, part, [1.0] * 40)[-1]
    assert rounds(model, part, [2.0] * 21)[-1] == pytest.approx(2 * before, rel=1e-6)
    assert model.factor(part, ["lookup"] if part == "draft" else []) == pytest.approx(2.0)
    assert rounds(model, part, [1.0] * 21)[-1] == pytest.approx(before, rel=1e-6)


def test_bursts_are_ignored():
    model = fitted(grid(known))
    before = model.verify(17)
    for prediction in rounds(model, "verify", ([1.0] * 9 + [10.0]) * 10 + [10.0] * 6):
        assert prediction == pytest.approx(before, rel=1e-6)


def test_a_burst_in_the_first_rounds_is_ignored():
    model = fitted(grid(known))
    rounds(model, "verify", [10.0, 1.0, 1.0, 10.0, 1.0])
    assert model.drift["verify"] == pytest.approx(1.0)


def test_overhead_starts_small_and_is_learnt():
    model = fitted(grid(known))
    assert 0 < model.overhead() <= 0.1 * model.verify(1)
    rounds(model, "overhead", [1.0] * 10)
    assert model.overhead() == pytest.approx(0.001)


@pytest.mark.parametrize("measured", [0.0, -1.0, float("nan"), float("inf")])
def test_clocks_that_went_wrong_are_passed_over(measured):
    model = fitted(grid(known))
    for _ in range(50):
        model.observe("verify", model.verify(17), measured)
    assert model.drift["verify"] == 1.0


def test_each_set_of_drafters_drifts_for_itself_and_an_unseen_one_with_the_machine():
    model = fitted(grid(known), {name: [Sample(9, 1, 0, 0.002)] for name in ("lookup", "dflash")})
    for _ in range(20):
        model.observe("draft", model.draft(["lookup"], 9), 0.008, ["lookup"])
    assert model.draft(["lookup"], 9) == pytest.approx(0.008)
    assert model.draft(["dflash"], 9) == pytest.approx(0.002)
    rounds(model, "verify", [2.0] * 20)
    assert model.draft(["dflash"], 9) == pytest.approx(0.004)
    assert model.draft(["lookup"], 9) == pytest.approx(0.008)


def test_parts_drift_apart():
    model = fitted(grid(known), {"lookup": [Sample(9, 1, 0, 0.002)]})
    rounds(model, "draft", [3.0] * 10)
    assert model.drift == pytest.approx({"draft lookup": 3.0})


def test_json_keeps_the_fit_and_what_it_was_made_of():
    model = fitted([*noisy(3), Sample(1, 1, 0, 0.01)], {"lookup": grid(known)}, device="a machine", threads=2)
    text = json.dumps(model.as_dict())
    again = LatencyModel.from_dict(json.loads(text))
    assert again.machine == {"device": "a machine", "threads": 2}
    assert again.points == model.points
    assert again.draft_points == model.draft_points
    assert (again.curve(300, 2, 77.0) == model.curve(300, 2, 77.0)).all()
    assert again.draft(["lookup"], 9, 2, 77.0) == model.draft(["lookup"], 9, 2, 77.0)
    assert again.overhead() == model.overhead()


def test_what_rounds_told_is_not_kept():
    model = fitted(grid(known))
    before = json.dumps(model.as_dict())
    rounds(model, "verify", [2.0] * 30)
    assert json.dumps(model.as_dict()) == before


def damaged(change):
    values = json.loads(json.dumps(fitted(grid(known), {"lookup": grid(known)}).as_dict()))
    change(values)
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format=99), "format 99, not 1"),
        (lambda v: v.pop("format"), "format None"),
        (lambda v: v.pop("machine"), "machine is missing"),
        (lambda v: v.pop("verify"), "no curve"),
        (lambda v: v.pop("measured"), "measured is missing"),
        (lambda v: v["verify"].update(constant=0, terms=[]), "passes that take no time"),
        (lambda v: v["root_alone"].update({"1": 0}), "passes that take no time"),
        (lambda v: v["verify"].update(constant=10**400), "too large"),
        (lambda v: v["verify"].update(constant=-1.0), "constant=-1.0"),
        (lambda v: v["verify"].update(constant="fast"), "constant='fast'"),
        (lambda v: v["verify"].update(terms=[{"quantity": "moons", "beyond": 0, "slope": 1}]), "moons"),
        (lambda v: v["draft"]["lookup"]["terms"][0].update(slope=float("nan")), "slope=nan"),
        (lambda v: v["root_alone"].update(one=0.5), "invalid literal"),
        (lambda v: v["measured"]["verify"][0].pop("width"), "width=None"),
        (lambda v: v["measured"].update(verify="none"), "list of measurements"),
    ],
)
def test_damaged_json_is_named_with_the_remedy(change, message):
    with pytest.raises(ConfigError, match=f"{message}.*run ddtree calibrate"):
        LatencyModel.from_dict(damaged(change))


def test_what_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="no JSON object: run ddtree calibrate"):
        LatencyModel.from_dict([1, 2])


@pytest.mark.parametrize(
    "sample",
    [Sample(0, 1, 0, 1.0), Sample(1, 0, 0, 1.0), Sample(1, 1, -1, 1.0), Sample(1, 1, 0, 0.0),
     Sample(1, 1, 0, float("nan"))],
)  # fmt: skip
def test_impossible_measurements_are_refused(sample):
    with pytest.raises(ConfigError, match="is no measurement"):
        fitted([*grid(known), sample])


def test_nothing_measured_is_refused():
    with pytest.raises(ConfigError, match="no measurement"):
        fitted([])


def test_a_single_measurement_is_a_flat_curve():
    model = fitted([Sample(1, 1, 0, 0.02)])
    assert model.curve(3, 2, 100.0) == pytest.approx([0.02] * 3)


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_without_negative_coefficients_meets_the_conditions_of_optimality(seed):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(25, 8)) * random.uniform(1e-6, 1e3, size=8)
    matrix[:, 7] = matrix[:, 3]
    wanted = random.normal(size=25)
    solution = nonnegative.solve(matrix, wanted)
    gradient = matrix.T @ (matrix @ solution - wanted) / np.linalg.norm(matrix, axis=0)
    assert (solution >= 0).all()
    assert gradient.min() >= -1e-8
    assert np.abs(gradient[solution > 0]).max(initial=0) <= 1e-8


def test_a_single_context_says_nothing_of_others():
    model = fitted([Sample(width, 1, 64, 0.01 * width) for width in (2, 3, 9)])
    assert model.verify(9, 1, 0) == pytest.approx(0.09)
    assert model.verify(9, 1, 6400) == pytest.approx(0.09)
