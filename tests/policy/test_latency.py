"""The latency table: what it interpolates, and how rounds correct it."""

import json

import numpy as np
import pytest

from ddtree.errors import ConfigError
from ddtree.policy.latency import LatencyTable, Sample

# Seconds of an A800 running Qwen3-8B, by context and nodes (CaDDTree, arXiv 2606.01813, published cost model).
A800 = {
    1: {1: 34.8, 64: 34.8, 128: 34.8, 256: 38.5, 512: 55.2},
    1000: {1: 35.0, 64: 35.0, 128: 35.0, 256: 41.4, 512: 63.2},
    4000: {1: 34.4, 64: 37.5, 128: 41.7, 256: 55.2, 512: 86.0},
    8000: {1: 47.9, 64: 52.3, 128: 57.0, 256: 73.6, 512: 117.0},
}
WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65, 129)


def known(width, rows=1, context=0.0):
    """20 ms and 0.5 ms a node; attention on top."""
    return 0.02 + 0.0005 * rows * width + 1e-8 * rows * width * context


def grid(seconds=known, widths=WIDTHS, rows=(1, 2, 4), contexts=(0, 512, 2048)):
    return [Sample(w, r, c, seconds(w, r, c)) for w in widths for r in rows for c in contexts]


def table(verify, draft=None, **machine):
    return LatencyTable(verify, draft or {}, machine=machine)


def flat(seconds):
    return [Sample(width, 1, 0, seconds) for width in (5, 17)]


def test_measurements_are_interpolated_and_continued():
    model = table(grid())
    for width, rows, context in [(2, 1, 32), (7, 2, 288), (50, 1, 992), (100, 8, 96), (513, 1, 8032)]:
        assert model.verify(width - 1, rows, context) == pytest.approx(known(width, rows, context), rel=1e-6)


def test_the_published_a800_curve_is_met_within_15_percent():
    points = [Sample(n, 1, context, ms / 1000) for context, row in A800.items() for n, ms in row.items()]
    errors = [abs(table(points).verify(p.width - 1, 1, p.context) / p.seconds - 1) for p in points]
    assert np.median(errors) <= 0.03 and max(errors) <= 0.15


@pytest.mark.parametrize("seed", range(10))
def test_predictions_never_fall_with_the_nodes_or_the_context(seed):
    random = np.random.default_rng(seed)
    noisy = [Sample(s.width, s.rows, s.context, s.seconds * random.lognormal(0, 0.5)) for s in grid()]
    model = table(noisy)
    for _number in range(60):
        model.observe_verify(int(random.choice([0, 1, 7, 40])), 1, 64.0, random.lognormal(-3, 1))
    for rows, context in [(1, 0), (1, 5000), (3, 100), (8, 64)]:
        seconds = model.verify_up_to(1024, rows, context)
        assert seconds.shape == (1025,) and seconds[0] > 0 and (np.diff(seconds) >= 0).all()
        assert model.verify(40, rows, context + 1000) >= seconds[40]


def test_repeated_measurements_count_by_their_median():
    model = table([Sample(2, 1, 0, 0.03), Sample(2, 1, 0, 0.02), Sample(2, 1, 0, 9.0)])
    assert model.points == [Sample(2, 1, 0, 0.03)]
    assert model.verify(1) == pytest.approx(0.03)


def test_a_batch_that_was_not_measured_costs_what_one_tree_of_as_many_nodes_does():
    assert table(grid(rows=(1,))).verify(0, 8, 32) == pytest.approx(known(8, 1, 32))


def test_where_few_points_were_measured_nodes_beyond_them_are_not_free():
    points = [Sample(width, 1, 32, 0.05) for width in (2, 9, 17)]
    assert table(points, cut_short=True).verify(33, 1, 32) == pytest.approx(0.10)
    assert table(points).verify(33, 1, 32) == pytest.approx(0.05)


def test_a_single_context_says_nothing_of_others():
    model = table([Sample(width, 1, 64, 0.01 * width) for width in (2, 3, 9)])
    assert model.verify(8, 1, 0) == model.verify(8, 1, 6400) == pytest.approx(0.09)


def test_drafting_is_the_sum_of_its_drafters_and_is_followed_for_each_set():
    model = table(grid(), {"dflash": flat(0.006), "lookup": flat(0.002)})
    assert model.draft(["dflash", "lookup"], 8) == pytest.approx(0.008)
    for _ in range(20):
        model.observe_draft(["dflash", "lookup"], 8, 1, 0.0, False, 0.012)
    assert model.draft(["lookup", "dflash"], 8) == pytest.approx(0.012)
    assert model.draft(["dflash"], 8) == pytest.approx(0.006)
    assert model.draft(["dflash", "lookup"], 8, sampled=True) == pytest.approx(0.008)
    with pytest.raises(ConfigError, match="'draft' was not measured: run ddtree calibrate"):
        model.draft(["dflash", "draft"], 8)


def test_a_machine_that_slows_down_is_followed_within_ten_rounds_and_bursts_are_not():
    model = table(grid(), {"lookup": flat(0.002)})
    before = model.verify(16)
    for number in range(40):
        model.observe_verify(16, 1, 0.0, before * (10 if number % 5 == 0 else 1))
        assert model.verify(16) == pytest.approx(before, rel=0.02) or number < 5
    for _ in range(10):
        model.observe_verify(16, 1, 0.0, 2 * before)
    assert model.verify(16) == pytest.approx(2 * before, rel=1e-6)
    assert model.verify(1) == pytest.approx(2 * table(grid()).verify(1), rel=0.05), "all sizes slow down"
    assert model.draft(["lookup"], 8) == pytest.approx(0.004, rel=0.05), "and so does drafting"


def test_a_burst_that_met_a_rare_width_does_not_make_wider_ones_dear_for_good():
    """The rare width is not tried again while it seems dear, so that nothing else would correct it."""
    model = table(grid())
    wide, narrow = model.verify(16), model.verify(1)
    for _ in range(6):
        model.observe_verify(16, 1, 0.0, wide)
        model.observe_verify(1, 1, 0.0, 4 * narrow)
    for _ in range(80):
        model.observe_verify(16, 1, 0.0, wide)
    assert model.verify(1) <= model.verify(16) == pytest.approx(wide, rel=0.01)


def test_widths_are_corrected_against_each_other_whatever_the_pace():
    """Measured flat; in rounds the root alone, 2 and 9 nodes take 57, 66 and 208 ms, at two rows twice as much."""
    model = table([Sample(width, rows, 0, 0.05) for width in (1, 2, 17, 33) for rows in (1, 2)])
    took = {0: 0.057, 1: 0.066, 8: 0.208}
    for rows in (1, 2):
        for number in range(90):
            nodes = (0, 8, 1)[number % 3]
            model.observe_verify(nodes, rows, 100.0, rows * took[nodes] * (3 if 30 < number < 50 else 1))
        for nodes, seconds in took.items():
            assert model.verify(nodes, rows, 100.0) == pytest.approx(rows * seconds, rel=0.1)
        between = model.verify(3, rows, 100.0) / rows
        assert took[1] < between < took[8]


def test_a_correction_is_kept_while_one_width_alone_is_used():
    model = table([Sample(width, 1, 0, 0.05) for width in (1, 9, 33)])
    for number in range(40):
        model.observe_verify(8 * (number % 2), 1, 0.0, 0.15 if number % 2 else 0.05)
    for _ in range(500):
        model.observe_verify(8, 1, 0.0, 0.15)
    assert model.verify(8) / model.verify(0) == pytest.approx(3, rel=0.05)


def test_noise_corrects_little():
    """Spells in which a machine is several times as slow, and rounds that scatter by a tenth."""
    random = np.random.default_rng(1)
    model, slow = table(grid()), 1.0
    for number in range(1000):
        slow = random.choice([1.0, 3.0, 10.0]) if number % 40 == 0 else slow
        nodes = int(random.choice([0, 1, 2, 8]))
        model.observe_verify(nodes, 1, 0.0, known(nodes + 1) * slow * random.lognormal(0, 0.1))
    ratios = [model.verify(nodes) / known(nodes + 1) for nodes in (0, 1, 2, 8)]
    assert max(ratios) / min(ratios) < 1.3


def test_the_overhead_starts_small_and_is_learnt():
    model = table(grid())
    assert 0 < model.overhead() <= 0.1 * model.verify(0)
    for _ in range(10):
        model.observe_overhead(0.001)
    assert model.overhead() == pytest.approx(0.001)
    assert model.round_seconds([], 4) == pytest.approx(model.verify_up_to(4) + 0.001)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_ignored(seconds):
    model, same = (table(grid(), {"lookup": flat(0.002)}) for _ in range(2))
    model.observe_verify(16, 1, 0.0, seconds)
    model.observe_draft(["lookup"], 8, 1, 0.0, False, seconds)
    model.observe_overhead(seconds)
    assert (model.round_seconds(["lookup"], 50) == same.round_seconds(["lookup"], 50)).all()


def test_json_keeps_the_measurements_and_not_the_corrections():
    model = table(grid(), {"lookup": flat(0.002)}, device="a machine", threads=2)
    expected = model.verify_up_to(300, 2, 77.0)
    for _ in range(30):
        model.observe_verify(16, 1, 0.0, 1.0)
    again = LatencyTable.from_dict(json.loads(json.dumps(model.as_dict())))
    assert again.machine == {"device": "a machine", "threads": 2}
    assert (again.points, again.draft_points) == (model.points, model.draft_points)
    assert (again.verify_up_to(300, 2, 77.0) == expected).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format=1),
        lambda v: v.pop("format"),
        lambda v: v.pop("machine"),
        lambda v: v.pop("verify"),
        lambda v: v.update(verify=[]),
        lambda v: v.update(draft={"lookup": []}),
        lambda v: v.update(draft=[]),
        lambda v: v["verify"][0].pop(),
        lambda v: v["verify"].append([1, 1, 0, "fast"]),
        lambda v: v["verify"].append([1, 1, 0, 10**400]),
    ],
)
def test_damaged_json_is_named_with_the_remedy(change):
    values = json.loads(json.dumps(table(grid(), {"lookup": flat(0.002)}).as_dict()))
    change(values)
    with pytest.raises(ConfigError, match=r"run ddtree calibrate|is no measurement"):
        LatencyTable.from_dict(values)


@pytest.mark.parametrize(
    "sample", [(0, 1, 0, 1.0), (1, 0, 0, 1.0), (1, 1, -1, 1.0), (1, 1, 0, 0.0), (1, 1, 0, float("nan"))]
)
def test_impossible_measurements_are_refused(sample):
    with pytest.raises(ConfigError, match="is no measurement"):
        Sample(*sample)
