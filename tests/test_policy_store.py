"""Latency models on disk: found again by what they hold for, and by nothing else."""

import json
import os
import re

import pytest
import torch

import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.policy import store
from ddtree.policy.curve import Sample
from ddtree.policy.latency import LatencyModel


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddtree" / "latency"


@pytest.fixture
def target():
    return Target(tiny.model())


def model(seconds=0.02, **machine):
    return LatencyModel.fit([Sample(w, 1, 8, seconds * w) for w in (1, 2, 9)], {}, machine=machine)


def test_what_was_saved_is_found_again(target, cache):
    key = store.key(target)
    assert store.load(key) is None
    file = store.save(key, model(device="this one"))
    assert file.parent == cache
    assert [path.name for path in cache.iterdir()] == [file.name]
    found = store.load(store.key(target))
    assert found.machine == {"device": "this one"}
    assert found.verify(9) == model().verify(9)


def test_the_file_is_readable_json_that_names_the_machine(target):
    text = store.save(store.key(target), model(device="a machine of ours")).read_text()
    values = json.loads(text)
    assert values["key"]["torch"] == torch.__version__
    assert values["model"]["machine"] == {"device": "a machine of ours"}
    assert len(text.splitlines()) > 20


def test_the_later_of_two_is_kept(target):
    store.save(store.key(target), model(0.02))
    store.save(store.key(target), model(0.04))
    assert store.load(store.key(target)).verify(9) == pytest.approx(0.36)


def other_threads(target):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        return store.key(target)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "other",
    [
        lambda target: store.key(Target(tiny.model(hidden_size=64))),
        lambda target: store.key(Target(tiny.model("qwen3"))),
        lambda target: store.key(Target(tiny.model().to(torch.bfloat16))),
        lambda target: store.key(target, Lookup()),
        lambda target: store.key(target, DFlash(Backbone(tiny.network(target.model), target))),
        other_threads,
    ],
    ids=["shape", "family", "dtype", "drafter", "network", "threads"],
)
def test_another_pair_dtype_or_number_of_threads_is_another_model(target, other):
    store.save(store.key(target), model())
    assert store.load(other(target)) is None


def test_another_device_is_another_model(target, monkeypatch):
    store.save(store.key(target), model())
    monkeypatch.setattr(store, "device_name", lambda device: "a faster one")
    assert store.load(store.key(target)) is None


def test_drafters_of_one_name_and_other_sizes_differ(target):
    small, large = (DFlash(Backbone(tiny.network(target.model), target)) for _ in range(2))
    assert store.key(target, small) == store.key(target, large)
    large.backbone.network.layers = large.backbone.network.layers[:1]
    assert store.key(target, small) != store.key(target, large)
    merged = store.key(target, Merged([small, Lookup()]))
    assert merged["drafters"] == [store.key(target, small)["drafters"][0], "lookup (0 weights)"]


def test_other_weights_of_the_same_shape_are_the_same_model(target):
    store.save(store.key(target), model())
    assert store.load(store.key(Target(tiny.model(seed=5)))) is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: "\x00" + text,
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"constant"', '"constance"'),
        lambda text: text.replace('"threads"', '"strands"'),
        lambda text: 200_000 * "[",
        lambda text: re.sub('"constant": [^,]*', f'"constant": 1{400 * "0"}', text),
        lambda text: re.sub('"root_alone": {[^}]*}', '"root_alone": {"1": 0}', text),
    ],
)
def test_a_damaged_or_foreign_file_counts_as_none_and_is_replaced(target, spoil):
    key = store.key(target)
    file = store.save(key, model())
    text = file.read_text()
    assert spoil(text) != text
    file.write_text(spoil(text))
    assert store.load(key) is None
    assert store.obtain(key, lambda: model(0.5)).verify(2) == pytest.approx(1.0)
    assert store.load(key).verify(2) == pytest.approx(1.0)


def test_a_model_that_lacks_a_drafter_of_its_pair_counts_as_none(target):
    key = store.key(target, Lookup())
    store.save(key, model())
    assert store.load(key) is None
    verify = [Sample(w, 1, 8, 0.02 * w) for w in (1, 2, 9)]
    store.save(key, LatencyModel.fit(verify, {"lookup": verify}, machine={}))
    assert store.load(key) is not None


def test_what_was_measured_at_short_contexts_alone_does_not_serve_long_ones(target):
    store.save(store.key(Target(tiny.model(), max_context=24)), model())
    assert store.load(store.key(target)) is None


def test_a_file_that_is_not_text_counts_as_none(target):
    store.path(store.key(target)).parent.mkdir(parents=True)
    store.path(store.key(target)).write_bytes(b"\xff\xfe\xfa")
    assert store.load(store.key(target)) is None


def test_measuring_is_done_once(target):
    measured = []

    def measure():
        measured.append(1)
        return model()

    for _ in range(3):
        assert store.obtain(store.key(target), measure).verify(2) == pytest.approx(0.04)
    assert len(measured) == 1


def test_what_was_cut_short_serves_once(target, cache):
    found = store.obtain(store.key(target), lambda: model(0.3, cut_short=True))
    assert found.verify(2) == pytest.approx(0.6)
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_named_when_asked_to_save(target, cache):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"latency.*cannot be written"):
        store.save(store.key(target), model())
    assert store.obtain(store.key(target), lambda: model(0.3)).verify(2) == pytest.approx(0.6)


def test_a_failed_write_leaves_the_old_file_and_no_litter(target, cache, monkeypatch):
    store.save(store.key(target), model())
    before = sorted(os.listdir(cache))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        store.save(store.key(target), model(0.5))
    assert sorted(os.listdir(cache)) == before
    assert store.load(store.key(target)).verify(2) == pytest.approx(0.04)
