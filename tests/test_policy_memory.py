import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ddtree
import talker
import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.policy import memory, store
from ddtree.policy.acceptance import Acceptance


def learn(acceptance):
    acceptance.learn(
        np.array([-0.1, -0.7, -2.0], np.float32), np.array([1, 1, 2]), np.array([True, False, True])
    )


@pytest.fixture
def target_and_drafter():
    def make(of_target, of_drafter):
        target = Target(tiny.model(seed=of_target))
        return target, DFlash(Backbone(tiny.network(target.model, seed=of_drafter), target))

    return make


def learnt():
    acceptance = Acceptance()
    learn(acceptance)
    return {"tree@lookup, greedy": acceptance, "chain@lookup, sampled": Acceptance()}


def test_what_is_kept_comes_back_without_arms_that_saw_nothing(tmp_path):
    memory.save(tmp_path / "a.json", learnt())
    again = memory.load(tmp_path / "a.json")
    assert set(again) == {"tree@lookup, greedy"}
    assert again["tree@lookup, greedy"].as_list() == learnt()["tree@lookup, greedy"].as_list()


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
def test_damaged_files_are_named_and_passed_over(tmp_path, text):
    file = tmp_path / memory.FILE
    file.write_text(text)
    with pytest.raises(ConfigError, match="delete"):
        memory.load(file)
    wanted = {"target": "none", "target_config": "x", "drafters": [], "weights": "w"}
    assert memory.recall(wanted, tmp_path) == {}
    assert memory.recall(wanted, Path(tmp_path, "missing")) == {}


def test_the_users_own_counts_come_before_those_of_the_drafters_folder(tmp_path):
    wanted = {"target": "tiny", "target_config": "y", "drafters": ["lookup"], "weights": "w", "threads": 1}
    memory.save(tmp_path / memory.FILE, learnt())
    assert set(memory.recall(wanted, tmp_path)) == {"tree@lookup, greedy"}
    memory.save(memory.cached(wanted), {"tree@own, greedy": learnt()["tree@lookup, greedy"]})
    assert set(memory.recall({**wanted, "threads": 8}, tmp_path)) == {"tree@own, greedy"}


def test_a_model_that_learnt_nothing_leaves_what_others_learnt(tmp_path):
    file = tmp_path / memory.FILE
    memory.save(file, learnt())
    before = file.read_text()
    memory.save(file, {})
    memory.save(file, {"tree@lookup, greedy": Acceptance()})
    assert file.read_text() == before


def test_two_models_that_learn_at_once_add_up_and_neither_counts_what_it_began_with_twice(tmp_path):
    file = tmp_path / memory.FILE
    memory.save(file, learnt())
    both = [memory.load(file) for _ in range(2)]
    for own in both:
        learn(own["tree@lookup, greedy"])
        memory.save(file, own)
    assert memory.load(file)["tree@lookup, greedy"].seen == 9


def test_counts_are_not_those_of_another_drafter_or_target_of_the_same_shape(target_and_drafter):
    target, drafter = target_and_drafter(0, 0)
    file = memory.cached(store.key(target, drafter))
    assert file == memory.cached(store.key(*target_and_drafter(0, 0)))
    assert file != memory.cached(store.key(*target_and_drafter(5, 0)))
    assert file != memory.cached(store.key(*target_and_drafter(0, 5)))
    for weight in drafter.backbone.network.parameters():
        with torch.no_grad():
            weight.add_(0.125)
            assert file != memory.cached(store.key(target, drafter))
            weight.sub_(0.125)


def test_a_closed_model_keeps_what_auto_has_learnt(tmp_path):
    folder = talker.save(tmp_path)
    with ddtree.load(folder, "lookup", device="cpu") as model:
        model.generate("the cat sat on the mat the cat sat on", temperature=0, max_tokens=60)
        wanted = store.key(model.target, model.engine.drafter)
        seen = model.engine.policy.state()["acceptance_seen"]
    kept = json.loads(memory.cached(wanted).read_text())["arms"]
    assert kept and set(kept) == {arm for arm, count in seen.items() if count}
    with ddtree.load(folder, "lookup", device="cpu") as again:
        again.generate("the cat", temperature=0, max_tokens=2)
        assert again.engine.policy.state()["acceptance_seen"] == pytest.approx(seen)
