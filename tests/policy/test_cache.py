"""Latency and acceptance on disk: found again for the pair and the machine they hold for, and for no other."""

import json
import os

import numpy as np
import pytest
import torch

import ddtree
import talker
import tiny
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.policy import cache
from ddtree.policy.acceptance import Acceptance
from ddtree.policy.latency import LatencyTable, Sample


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddtree" / "latency"


@pytest.fixture
def target():
    return Target(tiny.model())


def table(seconds=0.02, draft=(), **machine):
    points = [Sample(w, 1, 8, seconds * w) for w in (1, 2, 9)]
    return LatencyTable(points, dict.fromkeys(draft, points), machine=machine)


def dflash(target, seed=0):
    return DFlash(Backbone(tiny.network(target.model, seed=seed), target))


def test_a_saved_table_is_found_again_and_names_the_machine(target, folder):
    key = cache.key(target)
    assert cache.load(key) is None
    file = cache.save(key, table(device="this one"))
    assert [file] == list(folder.iterdir())
    assert json.loads(file.read_text())["model"]["machine"] == {"device": "this one"}
    assert cache.load(cache.key(target)).verify(8) == table().verify(8)
    cache.save(key, table(0.04))
    assert cache.load(key).verify(8) == pytest.approx(0.36)


@pytest.mark.parametrize(
    "other",
    [
        lambda target: cache.key(Target(tiny.model(hidden_size=64))),
        lambda target: cache.key(Target(tiny.model("qwen3"))),
        lambda target: cache.key(Target(tiny.model().to(torch.bfloat16))),
        lambda target: cache.key(Target(tiny.model(), max_context=24)),
        lambda target: cache.key(target, Lookup()),
        lambda target: cache.key(target, dflash(target)),
    ],
    ids=["shape", "family", "dtype", "context", "drafter", "network"],
)
def test_another_pair_or_dtype_is_measured_anew(target, other):
    cache.save(cache.key(target), table())
    assert cache.load(other(target)) is None


@pytest.mark.parametrize(
    ("where", "name", "value"), [(cache, "device_name", "a faster one"), (torch, "get_num_threads", 77)]
)
def test_another_device_or_number_of_threads_is_measured_anew(target, monkeypatch, where, name, value):
    cache.save(cache.key(target), table())
    monkeypatch.setattr(where, name, lambda *_: value)
    assert cache.load(cache.key(target)) is None


def test_drafters_of_one_name_and_other_sizes_differ(target):
    small, large = dflash(target), dflash(target)
    assert cache.key(target, small) == cache.key(target, large)
    large.backbone.network.layers = large.backbone.network.layers[:1]
    assert cache.key(target, small) != cache.key(target, large)
    merged = cache.key(target, Merged([small, Lookup()]))
    assert merged["drafters"] == [cache.key(target, small)["drafters"][0], "lookup (0 weights)"]


def test_latency_does_not_depend_on_the_weights_and_acceptance_does(target):
    def keys(of_target, of_drafter):
        other = Target(tiny.model(seed=of_target))
        return cache.key(other, dflash(other, of_drafter))

    own = keys(0, 0)
    assert len({cache.latency_file(key) for key in (own, keys(5, 0), keys(0, 5))}) == 1
    assert len({cache.acceptance_file(key) for key in (own, keys(0, 0), keys(5, 0), keys(0, 5))}) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: "\x00" + text,
        lambda text: text.replace('"format": 2', '"format": 1'),
        lambda text: text.replace('"threads"', '"strands"'),
        lambda text: 200_000 * "[",
    ],
)
def test_a_damaged_or_foreign_file_counts_as_none_and_is_replaced(target, spoil):
    key = cache.key(target)
    file = cache.save(key, table())
    text = file.read_text()
    assert spoil(text) != text
    file.write_text(spoil(text))
    assert cache.load(key) is None
    assert cache.obtain(key, lambda: table(0.5)).verify(1) == cache.load(key).verify(1) == pytest.approx(1.0)


def test_a_table_that_lacks_a_drafter_of_its_pair_counts_as_none(target):
    key = cache.key(target, Lookup())
    cache.save(key, table())
    assert cache.load(key) is None
    cache.save(key, table(draft=["lookup"]))
    assert cache.load(key) is not None


def test_measuring_is_done_once_unless_it_was_cut_short(target, folder):
    measured = []

    def measure(**machine):
        measured.append(1)
        return table(**machine)

    cache.obtain(cache.key(target), lambda: measure(cut_short=True))
    assert not folder.exists()
    for _ in range(3):
        cache.obtain(cache.key(target), measure)
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_named_when_asked_to_save(target, folder):
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"latency.*cannot be written"):
        cache.save(cache.key(target), table())
    assert cache.obtain(cache.key(target), lambda: table(0.3)).verify(1) == pytest.approx(0.6)


def test_a_failed_write_leaves_the_old_file_and_no_litter(target, folder, monkeypatch):
    cache.save(cache.key(target), table())
    before = sorted(os.listdir(folder))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        cache.save(cache.key(target), table(0.5))
    assert sorted(os.listdir(folder)) == before
    assert cache.load(cache.key(target)).verify(1) == pytest.approx(0.04)


def learn(acceptance):
    logprobs = np.array([-0.1, -0.7, -2.0], np.float32)
    acceptance.learn(logprobs, np.array([1, 1, 2]), np.array([True, False, True]))
    return acceptance


def learnt():
    return {"tree@lookup, greedy": learn(Acceptance()), "chain@lookup, sampled": Acceptance()}


def test_acceptance_comes_back_without_arms_that_saw_nothing(tmp_path):
    cache.save_acceptance(tmp_path / "a.json", learnt())
    again = cache.load_acceptance(tmp_path / "a.json")
    assert {arm: own.as_list() for arm, own in again.items()} == {
        "tree@lookup, greedy": learnt()["tree@lookup, greedy"].as_list()
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 9, "arms": {}}',
        '{"format": 1}',
        '{"format": 1, "arms": {"a": [[1]]}}',
        '{"format": 1, "arms": {"a": [[1, 1, 1' + 400 * "0" + ", 1, 1]]}}",
        200_000 * "[",
    ],
    ids=["nothing", "list", "format", "arms", "short", "huge", "deep"],
)
def test_damaged_acceptance_is_named_and_passed_over(tmp_path, text):
    file = tmp_path / cache.ACCEPTANCE_FILE
    file.write_text(text)
    with pytest.raises(ConfigError, match="delete"):
        cache.load_acceptance(file)
    wanted = {"target": "none", "target_config": "x", "drafters": [], "weights": "w"}
    assert (
        cache.recall_acceptance(wanted, tmp_path) == cache.recall_acceptance(wanted, tmp_path / "none") == {}
    )


def test_the_users_own_counts_come_before_those_of_the_drafters_folder(tmp_path):
    wanted = {"target": "tiny", "target_config": "y", "drafters": ["lookup"], "weights": "w", "threads": 1}
    cache.save_acceptance(tmp_path / cache.ACCEPTANCE_FILE, learnt())
    assert set(cache.recall_acceptance(wanted, tmp_path)) == {"tree@lookup, greedy"}
    cache.save_acceptance(cache.acceptance_file(wanted), {"tree@own, greedy": learn(Acceptance())})
    assert set(cache.recall_acceptance({**wanted, "threads": 8}, tmp_path)) == {"tree@own, greedy"}


def test_runs_that_learn_at_once_add_up_and_none_counts_what_it_began_with_twice(tmp_path):
    file = tmp_path / cache.ACCEPTANCE_FILE
    cache.save_acceptance(file, learnt())
    cache.save_acceptance(file, {"tree@lookup, greedy": Acceptance()})
    both = [cache.load_acceptance(file) for _ in range(2)]
    for own in both:
        learn(own["tree@lookup, greedy"])
        cache.save_acceptance(file, own)
    assert cache.load_acceptance(file)["tree@lookup, greedy"].seen == 9


def test_a_closed_model_keeps_what_auto_has_learnt(tmp_path):
    folder = talker.save(tmp_path)
    with ddtree.load(folder, "lookup", device="cpu") as model:
        model.generate("the cat sat on the mat the cat sat on", temperature=0, max_tokens=60)
        wanted = cache.key(model.target, model.engine.drafter)
        seen = model.engine.policy.state()["acceptance_seen"]
    kept = json.loads(cache.acceptance_file(wanted).read_text())["arms"]
    assert kept and set(kept) == {arm for arm, count in seen.items() if count}
    with ddtree.load(folder, "lookup", device="cpu") as again:
        again.generate("the cat", temperature=0, max_tokens=2)
        assert {
            a: c for a, c in again.engine.policy.state()["acceptance_seen"].items() if c
        } == pytest.approx({a: c for a, c in seen.items() if c})
