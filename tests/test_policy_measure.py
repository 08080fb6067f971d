"""Measuring: which path is taken, what is left behind, and what comes of it on slow machines."""

import json
import math

import pytest
import torch
import transformers

import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.engine.engine import Engine
from ddtree.errors import CacheMemoryError, ConfigError, UnsupportedModelError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from ddtree.policy import measure, stands
from ddtree.policy.curve import Sample
from ddtree.policy.heldout import held_out
from ddtree.policy.latency import LatencyModel
from ddtree.sampling.sampler import SamplingParams
from ddtree.tree import MAX_DEPTH

GRID = {"rows": (1, 3), "contexts": (8, 40), "widths": (1, 2, 5, 12), "turns": 2}


@pytest.fixture(scope="module")
def tiny_model():
    return tiny.model()


class Watched:
    """A drafter that notes what it is told."""

    name = "watched"
    feature_layers = (1,)
    max_depth = 5

    def __init__(self, fails_after=math.inf):
        self.rows = []
        self.most_rows = 0
        self.asked = []
        self.fails_after = fails_after

    def add_row(self):
        self.rows.append([])
        self.most_rows = max(self.most_rows, len(self.rows))

    def drop_row(self, row):
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def observe(self, row, tokens, features):
        assert features.shape == (len(tokens), 32)
        assert features.isfinite().all() and features.abs().sum() > 0
        self.rows[row] += tokens

    def draft(self, rows, clock):
        if len(self.asked) >= self.fails_after:
            raise RuntimeError("out of order")
        assert len(rows) == len(self.rows)
        for row, known in zip(rows, self.rows, strict=True):
            assert row.tokens[:-1] == known
            assert row.depth == 5
        self.asked.append((len(rows), len(rows[0].tokens) - 1, rows[0].budget))
        return stands.binary_tree(2, len(rows), [1, 2], torch.device("cpu"))


def test_every_point_is_measured_as_often_as_asked(tiny_model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        LatencyModel, "fit", staticmethod(lambda verify, draft, machine: seen.extend([verify, draft]))
    )
    measure.calibrate(Target(tiny_model), Watched(), **GRID)
    verify, draft = seen
    points = [(s.width, s.rows, s.context) for s in verify]
    assert set(points) == {(w, r, c) for w in (1, 2, 5, 12) for r in (1, 3) for c in (8, 40)}
    assert all(points.count(point) == 2 for point in set(points))
    drafts = [(s.width, s.rows, s.context) for s in draft["watched"]]
    assert sorted(drafts) == sorted(point for point in points if point[0] > 1)
    assert all(s.seconds > 0 for s in [*verify, *draft["watched"]])


def test_drafts_and_verifications_alternate(tiny_model, monkeypatch):
    order = []
    for stand, name in ((stands.TargetStand, "verify"), (stands.DrafterStand, "draft")):
        plain = getattr(stand, name)
        monkeypatch.setattr(
            stand, name, lambda *args, name=name, plain=plain: order.append(name) or plain(*args)
        )
    measure.calibrate(Target(tiny_model), Watched(), **{**GRID, "widths": (2, 5, 12)})
    assert order == ["draft", "verify"] * (len(order) // 2)


def test_points_take_turns(tiny_model, monkeypatch):
    order = []
    plain = stands.TargetStand.verify

    def noted(self, width):
        order.append((width, tuple(self._cache.lengths)))
        return plain(self, width)

    monkeypatch.setattr(stands.TargetStand, "verify", noted)
    measure.calibrate(Target(tiny_model), **{**GRID, "turns": 6})
    timed = order[-6 * 16 :]
    for turn in range(6):
        assert len(set(timed[16 * turn : 16 * turn + 16])) == 16


def test_verification_is_a_target_s_own_on_rows_that_hold_the_context(tiny_model, monkeypatch):
    calls = []
    plain = Target.verify

    def noted(self, cache, tree):
        calls.append((tree.tokens.shape[1], cache.rows, sum(cache.lengths) / cache.rows))
        assert int(tree.depths.max()) <= MAX_DEPTH
        return plain(self, cache, tree)

    monkeypatch.setattr(Target, "verify", noted)
    model = measure.calibrate(Target(tiny_model), **GRID)
    assert set(calls) == {(p.width, p.rows, p.context) for p in model.points}


def test_the_tree_that_is_verified_is_well_formed():
    tree = stands.binary_tree(12, 2, [5, 6, 7], torch.device("cpu"))
    parents, depths = tree.parents[0].tolist(), tree.depths[0].tolist()
    assert parents[0] == depths[0] == 0
    assert all(parents[node] < node and depths[node] == depths[parents[node]] + 1 for node in range(1, 12))
    assert tree.sizes == [12, 12]
    assert tree.tokens.shape == tree.parents.shape == tree.depths.shape == tree.logprobs.shape == (2, 12)


@pytest.mark.parametrize(("rows", "spread"), [(1, 0), (2, 2), (3, 2), (4, 2)])
def test_rows_differ_in_length_around_the_context(tiny_model, rows, spread):
    stand = stands.TargetStand(Target(tiny_model), 40)
    stand.occupy(rows, 20)
    before = list(stand._cache.lengths)
    assert sum(before) == 20 * rows
    assert max(before) - min(before) == spread
    assert stand.verify(7) > 0
    assert stand._cache.lengths == before


def test_a_drafter_gets_the_target_s_features_and_grows_as_in_rounds(tiny_model):
    drafter = Watched()
    measure.calibrate(Target(tiny_model), drafter, **GRID)
    assert drafter.most_rows == 3
    assert drafter.rows == []
    assert {rows for rows, _, _ in drafter.asked} == {1, 3}
    for _, length, _ in drafter.asked:
        # The text grows by a round's tokens, and starts anew before it has left its context.
        assert any(context <= length <= context + 20 for context in (8, 40))
    assert {budget + 1 for _, _, budget in drafter.asked} == {2, 5, 12}


@pytest.mark.parametrize("fails_after", [0, 1, 7])
def test_a_drafter_that_fails_is_left_without_rows(tiny_model, fails_after):
    drafter, target = Watched(fails_after), Target(tiny_model, feature_layers=(0,))
    with pytest.raises(RuntimeError, match="out of order"):
        measure.calibrate(target, drafter, **GRID)
    assert drafter.rows == []
    assert target.feature_layers == (0,)


@pytest.mark.parametrize("way", [measure.calibrate, measure.quick])
def test_nothing_is_left_behind(tiny_model, way):
    """What is decoded before and after is the same, and the drafter starts from nothing."""
    target = Target(tiny_model)
    parts = [DFlash(Backbone(tiny.network(tiny_model), target)), Lookup(vocab_size=target.vocab_size)]
    drafter = Merged(parts)
    engine = Engine(target, drafter)

    def answer():
        sequence = engine.add(
            tiny.prompt(9), SamplingParams(temperature=0.0, max_tokens=24), method="tree", budget=8, depth=8
        )
        while sequence.finish_reason is None:
            engine.step()
        return sequence.output, dict(sequence.stats.accepted)

    before = answer()
    layers = target.feature_layers
    way(target, drafter, **(GRID if way is measure.calibrate else {}))
    assert target.feature_layers == layers
    assert len(parts[1]._rows) == 0
    assert parts[0].backbone.rows == 0 and parts[0].backbone._cache.rows == 0
    assert answer() == before


def test_each_part_of_a_merged_drafter_is_measured_and_the_whole(tiny_model):
    target = Target(tiny_model)
    drafter = Merged(
        [DFlash(Backbone(tiny.network(tiny_model), target)), Lookup(vocab_size=target.vocab_size)]
    )
    model = measure.calibrate(target, drafter, **GRID)
    assert set(model.draft_points) == {"dflash+lookup", "dflash", "lookup"}
    whole = model.draft(["dflash", "lookup"], 17, 1, 40)
    assert whole > model.draft(["lookup"], 17, 1, 40)
    assert whole > 0.5 * model.draft(["dflash"], 17, 1, 40)


def test_every_part_drafts_at_every_point(tiny_model):
    target = Target(tiny_model)
    drafter = Merged(
        [DFlash(Backbone(tiny.network(tiny_model), target)), Lookup(vocab_size=target.vocab_size)]
    )
    model = measure.calibrate(target, drafter, **{**GRID, "turns": 3})
    for samples in model.draft_points.values():
        points = {(s.width, s.rows, s.context) for s in samples}
        assert points == {(w, r, c) for w in (2, 5, 12) for r in (1, 3) for c in (8, 40)}


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (measure.calibrate, {"widths": (17,), "turns": 1, "contexts": (8,)}),
        (measure.calibrate, {"widths": (1, 2), "turns": 1, "contexts": (8,)}),
        (measure.quick, {"seconds": 0.0}),
    ],
)
def test_no_drafter_is_left_unmeasured_however_little_is_measured(tiny_model, way, options):
    target = Target(tiny_model)
    parts = [Lookup(vocab_size=target.vocab_size) for _ in range(6)]
    for number, part in enumerate(parts):
        part.name = f"lookup{number}"
    model = way(target, Merged(parts), **options)
    assert model.covers([part.name for part in parts])
    assert set(model.draft_points) == {part.name for part in parts} | {"+".join(p.name for p in parts)}
    assert all(len(part._rows) == 0 for part in parts)


def test_memory_that_runs_out_while_measuring_is_named(tiny_model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no\nroom")

    monkeypatch.setattr(stands.TargetStand, "verify", full)
    with pytest.raises(CacheMemoryError, match="cpu ran out of memory while measuring: measure fewer rows"):
        measure.quick(Target(tiny_model))


def test_the_machine_is_named(tiny_model):
    model = measure.quick(Target(tiny_model))
    assert model.machine["threads"] == torch.get_num_threads()
    assert model.machine["torch"] == torch.__version__
    assert model.machine["dtype"] == "float32"
    assert model.machine["device"]
    assert model.machine["target"] == "llama, 2 layers of 32, 48 tokens"
    assert model.machine["drafter"] == "none"
    json.dumps(model.machine)


def test_contexts_are_cut_to_the_target_s(tiny_model):
    model = measure.calibrate(
        Target(tiny_model, max_context=64), contexts=(20, 500, 900), widths=(1, 2), turns=1
    )
    assert {point.context for point in model.points} == {20, 64 - MAX_DEPTH - 2}


def test_a_context_too_short_is_named(tiny_model):
    with pytest.raises(
        ConfigError, match="a context of 16 tokens is too short to calibrate: give 20 or more"
    ):
        measure.calibrate(Target(tiny_model, max_context=16), **GRID)
    assert measure.calibrate(Target(tiny_model, max_context=20), **GRID).points


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
def test_arguments_out_of_range_are_named(tiny_model, change, message):
    with pytest.raises(ConfigError, match=message):
        measure.calibrate(Target(tiny_model), **{**GRID, **change})


def test_a_target_without_trees_is_named():
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    target = AutoregressiveTarget(transformers.MambaForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM: there is nothing to calibrate"):
        measure.quick(target)


class Simulated:
    """A machine on which a pass takes known time and the clock stands still otherwise."""

    def __init__(self, monkeypatch, verify, draft=0.001):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        plain = Target.verify

        def slow(target, cache, tree):
            result = plain(target, cache, tree)
            self.now += verify(tree.tokens.shape[1], cache.rows, sum(cache.lengths) / cache.rows)
            return result

        monkeypatch.setattr(Target, "verify", slow)
        prefill = Target.prefill

        def slow_prefill(*args, **kwargs):
            for part in prefill(*args, **kwargs):
                self.now += verify(len(part[0]), 1, 0)
                yield part

        monkeypatch.setattr(Target, "prefill", slow_prefill)
        asked = Watched.draft

        def slow_draft(drafter, rows, clock):
            self.now += draft
            return asked(drafter, rows, clock)

        monkeypatch.setattr(Watched, "draft", slow_draft)


def seconds(width, rows, context):
    return 0.02 + 0.0006 * rows * width + 4e-6 * rows * context


def test_on_a_machine_of_known_costs_the_model_is_exact(tiny_model, monkeypatch):
    Simulated(monkeypatch, seconds)
    model = measure.calibrate(Target(tiny_model), Watched(), rows=(1, 2), contexts=(16, 64, 200), turns=1)
    for width, rows, context in [(2, 1, 16), (40, 1, 100), (11, 2, 300), (200, 1, 400)]:
        assert model.verify(width, rows, context) == pytest.approx(seconds(width, rows, context), rel=1e-6)
    assert model.draft(["watched"], 9) == pytest.approx(0.001)
    widest = max(point.width for point in model.points if point.rows == 1 and point.context == 16)
    root, wide = seconds(1, 1, 16), seconds(widest, 1, 16)
    assert 4 * root < wide < 6 * root, "trees are measured up to where they cost four times the root"


def test_the_brief_form_keeps_its_time_and_finds_the_slope_nonetheless(tiny_model, monkeypatch):
    machine = Simulated(monkeypatch, seconds, 0.008)
    model = measure.quick(Target(tiny_model), Watched(), rows=4)
    assert machine.now <= 3.0
    assert not model.machine["cut_short"]
    assert model.verify(40, 1, 100) == pytest.approx(seconds(40, 1, 100), rel=1e-6)
    assert model.verify(1, 8, 100) == pytest.approx(seconds(1, 8, 100), rel=1e-3)


def test_on_a_slow_machine_the_brief_form_is_cut_short_and_says_so(tiny_model, monkeypatch):
    machine = Simulated(monkeypatch, lambda *point: 40 * seconds(*point), 0.3)
    model = measure.quick(Target(tiny_model), Watched(), rows=4)
    assert machine.now <= 12
    assert model.machine["cut_short"]
    assert model.verify(17, 1, 48) == pytest.approx(40 * seconds(17, 1, 48), rel=0.1)
    assert model.draft(["watched"], 17) == pytest.approx(0.3)


def test_progress_reaches_its_end(tiny_model):
    told = []
    measure.calibrate(Target(tiny_model), Watched(), progress=lambda *call: told.append(call), **GRID)
    total = told[-1][1]
    assert told == [(done, total) for done in range(1, total + 1)]


def test_held_out_points_are_not_in_the_fit():
    """Points that break every rule are predicted as if they kept it."""
    widths, contexts = (1, 2, 5, 9, 17, 33, 65), (16, 64, 256, 1024)
    points = [Sample(w, 1, c, seconds(w, 1, c)) for w in widths for c in contexts]
    held = held_out(points)
    assert held.widths == (5, 33)
    assert held.contexts == (64,)
    assert len(held.errors) == 2 * 4 + 7 - 2
    assert held.worst <= 0.01
    spoilt = [
        Sample(p.width, 1, p.context, p.seconds * (2 if p.width in (5, 33) or p.context == 64 else 1))
        for p in points
    ]
    assert held_out(spoilt).median == pytest.approx(0.5)


def test_too_few_points_to_hold_some_out():
    assert held_out([Sample(w, 1, 8, 0.1) for w in (1, 2, 5)]) is None
