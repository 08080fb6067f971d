"""Measuring: what is timed, what is left behind, and what becomes of it on slow machines."""

import math

import pytest
import torch
import transformers

import tiny
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.engine.engine import Engine
from ddtree.errors import CacheMemoryError, ConfigError, UnsupportedModelError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from ddtree.policy import calibration
from ddtree.sampling.params import SamplingParams
from ddtree.tree import MAX_DEPTH

GRID = {"rows": (1, 3), "contexts": (8, 40), "widths": (1, 2, 5, 12), "turns": 2}


@pytest.fixture(scope="module")
def model():
    return tiny.model()


class Watched:
    """A drafter that notes what it is told."""

    name = "watched"
    feature_layers = (1,)
    max_depth = 5

    def __init__(self, fails_after=math.inf):
        self.rows, self.most_rows, self.asked, self.fails_after = [], 0, [], fails_after

    def add_row(self):
        self.rows.append([])
        self.most_rows = max(self.most_rows, len(self.rows))

    def drop_row(self, row):
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def observe(self, row, tokens, features):
        assert features.shape == (len(tokens), 32) and features.isfinite().all()
        self.rows[row] += tokens

    def draft(self, rows, clock):
        if len(self.asked) >= self.fails_after:
            raise RuntimeError("out of order")
        for row, known in zip(rows, self.rows, strict=True):
            assert row.tokens[:-1] == known and row.depth == 5
        self.asked.append((len(rows), len(rows[0].tokens) - 1, rows[0].budget))
        return calibration.binary_tree(2, len(rows), [1, 2], torch.device("cpu"))


def merged(target, model):
    return Merged([DFlash(Backbone(tiny.network(model), target)), Lookup(vocab_size=target.vocab_size)])


def test_every_point_is_verified_in_every_turn_on_rows_that_hold_its_context(model, monkeypatch):
    order, plain = [], Target.verify

    def noted(self, cache, tree):
        assert int(tree.depths.max()) <= MAX_DEPTH
        order.append((tree.tokens.shape[1], cache.rows, sum(cache.lengths) / cache.rows))
        return plain(self, cache, tree)

    monkeypatch.setattr(Target, "verify", noted)
    table = calibration.thorough(Target(model), **GRID)
    points = {(w, r, c) for w in GRID["widths"] for r in GRID["rows"] for c in GRID["contexts"]}
    assert {(p.width, p.rows, p.context) for p in table.points} == points
    for turn in (order[-16:], order[-32:-16]):
        assert set(turn) == points


def test_the_tree_that_is_verified_is_well_formed():
    tree = calibration.binary_tree(12, 2, list(range(12)), torch.device("cpu"))
    parents, depths = tree.parents[0].tolist(), tree.depths[0].tolist()
    assert parents[0] == depths[0] == 0 and tree.sizes == [12, 12] and tree.tokens.shape == (2, 12)
    assert all(parents[node] < node and depths[node] == depths[parents[node]] + 1 for node in range(1, 12))


@pytest.mark.parametrize(("rows", "spread"), [(1, 0), (2, 2), (3, 2), (4, 2)])
def test_rows_differ_in_length_around_the_context(model, rows, spread):
    timer = calibration.TargetTimer(Target(model))
    timer.setup(rows, 20)
    before = list(timer._cache.lengths)
    assert sum(before) == 20 * rows and max(before) - min(before) == spread
    assert timer.verify(7) > 0
    assert timer._cache.lengths == before


def test_a_drafter_gets_features_and_grows_as_in_rounds(model):
    drafter = Watched()
    calibration.thorough(Target(model), drafter, **GRID)
    assert drafter.most_rows == 3 and drafter.rows == []
    assert {rows for rows, _, _ in drafter.asked} == {1, 3}
    for _, length, _ in drafter.asked:
        # The text grows by a round's tokens, and starts anew before it has left its context.
        assert any(context <= length <= context + 20 for context in GRID["contexts"])
    assert {budget + 1 for _, _, budget in drafter.asked} == {2, 5, 12}


@pytest.mark.parametrize("fails_after", [0, 1, 7])
def test_a_drafter_that_fails_is_left_without_rows(model, fails_after):
    drafter, target = Watched(fails_after), Target(model, feature_layers=(0,))
    with pytest.raises(RuntimeError, match="out of order"):
        calibration.thorough(target, drafter, **GRID)
    assert drafter.rows == [] and target.feature_layers == (0,)


@pytest.mark.parametrize("way", [calibration.thorough, calibration.quick])
def test_nothing_is_left_behind(model, way):
    """The text decoded before and after is the same, and the drafter starts from nothing."""
    target = Target(model)
    drafter = merged(target, model)
    engine = Engine(target, drafter)

    def answer():
        params = SamplingParams(temperature=0.0, max_tokens=24)
        sequence = engine.add(tiny.prompt(9), params, method="tree", budget=8, depth=8)
        while sequence.finish_reason is None:
            engine.step()
        return sequence.output, dict(sequence.stats.accepted)

    before, layers = answer(), target.feature_layers
    way(target, drafter, **(GRID if way is calibration.thorough else {}))
    assert target.feature_layers == layers
    assert drafter.drafters[0].backbone._cache.rows == len(drafter.drafters[1]._rows) == 0
    assert answer() == before


def test_each_of_several_drafters_is_measured_at_every_point(model):
    target = Target(model)
    table = calibration.thorough(target, merged(target, model), **GRID)
    assert set(table.draft_points) == {"dflash", "lookup"}
    for samples in table.draft_points.values():
        points = {(s.width, s.rows, s.context) for s in samples}
        assert points == {(w, r, c) for w in (2, 5, 12) for r in (1, 3) for c in (8, 40)}


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (calibration.thorough, {"widths": (17,), "turns": 1, "contexts": (8,)}),
        (calibration.quick, {"seconds": 0.0}),
    ],
)
def test_no_drafter_is_left_unmeasured_however_little_is_measured(model, way, options):
    target = Target(model)
    table = way(target, merged(target, model), **options)
    assert table.draft(["dflash", "lookup"], 8) > 0


def test_memory_that_runs_out_while_measuring_is_named(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no\nroom")

    monkeypatch.setattr(calibration.TargetTimer, "verify", full)
    with pytest.raises(CacheMemoryError, match="cpu ran out of memory while measuring: give fewer rows"):
        calibration.quick(Target(model))


def test_contexts_are_cut_to_the_target_s_and_one_too_short_is_named(model):
    target = Target(model, max_context=64)
    table = calibration.thorough(target, contexts=(20, 500, 900), widths=(1, 2), turns=1)
    assert {point.context for point in table.points} == {20, 64 - MAX_DEPTH - 2}
    with pytest.raises(ConfigError, match="16 tokens is too short to calibrate: give 20 or more"):
        calibration.thorough(Target(model, max_context=16), **GRID)
    assert calibration.thorough(Target(model, max_context=20), **GRID).points


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (0,)}, "rows holds 0"),
        ({"rows": ()}, "rows is empty"),
        ({"contexts": (1,)}, "contexts holds 1"),
        ({"widths": (1026,)}, "widths holds 1026"),
        ({"widths": (True,)}, "widths holds True"),
        ({"widths": (2.5,)}, "widths holds 2.5"),
        ({"turns": 0}, "turns holds 0"),
        ({"widths": (1,), "drafter": Lookup()}, "widths holds 1 alone"),
    ],
)
def test_arguments_out_of_range_are_named(model, change, message):
    with pytest.raises(ConfigError, match=message):
        calibration.thorough(Target(model), **{**GRID, **change})


def test_a_target_without_trees_is_named():
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    target = AutoregressiveTarget(transformers.MambaForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM: there is nothing to calibrate"):
        calibration.quick(target)


class Simulated:
    """A machine on which a pass takes known time and the clock stands still otherwise."""

    def __init__(self, monkeypatch, verify, draft=0.001):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        plain, asked = Target.verify, Watched.draft

        def slow(target, cache, tree):
            result = plain(target, cache, tree)
            self.now += verify(tree.tokens.shape[1], cache.rows, sum(cache.lengths) / cache.rows)
            return result

        def slow_draft(drafter, rows, clock):
            self.now += draft
            return asked(drafter, rows, clock)

        monkeypatch.setattr(Target, "verify", slow)
        monkeypatch.setattr(Watched, "draft", slow_draft)


def seconds(width, rows, context):
    return 0.02 + 0.0006 * rows * width + 4e-6 * rows * context


def test_on_a_machine_of_known_costs_the_table_is_exact(model, monkeypatch):
    Simulated(monkeypatch, seconds)
    table = calibration.thorough(Target(model), Watched(), rows=(1, 2), contexts=(16, 64, 200), turns=1)
    for width, rows, context in [(2, 1, 32), (40, 1, 96), (11, 2, 288), (200, 1, 416)]:
        assert table.verify(width - 1, rows, context) == pytest.approx(
            seconds(width, rows, context), rel=1e-6
        )
    assert table.draft(["watched"], 8) == pytest.approx(0.001)
    widest = max(point.width for point in table.points if point.rows == 1 and point.context == 16)
    assert 4 < seconds(widest, 1, 16) / seconds(1, 1, 16) < 6, "trees are measured up to four times the root"


def test_the_brief_form_keeps_its_time_and_finds_the_slope(model, monkeypatch):
    machine = Simulated(monkeypatch, seconds, 0.008)
    table = calibration.quick(Target(model), Watched())
    assert machine.now <= 3.0 and not table.machine["cut_short"]
    assert table.verify(39, 1, 96) == pytest.approx(seconds(40, 1, 96), rel=1e-6)


def test_on_a_slow_machine_the_brief_form_is_cut_short_and_says_so(model, monkeypatch):
    machine = Simulated(monkeypatch, lambda *point: 40 * seconds(*point), 0.3)
    table = calibration.quick(Target(model), Watched())
    assert machine.now <= 12 and table.machine["cut_short"]
    assert table.verify(16, 1, 48) == pytest.approx(40 * seconds(17, 1, 48), rel=0.1)
    assert table.draft(["watched"], 16) == pytest.approx(0.3)


def test_progress_reaches_its_end(model):
    told = []
    calibration.thorough(Target(model), Watched(), progress=lambda *call: told.append(call), **GRID)
    assert told == [(done, 12) for done in range(1, 13)]
