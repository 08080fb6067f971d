"""Drafters by name, and every name that stands for none."""

import pytest

import talker
import tiny
from ddtree.drafters import loading
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.ngram import Lookup
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError, UnsupportedModelError
from ddtree.model import demo
from ddtree.model.target import Target


@pytest.fixture
def target():
    return Target(tiny.model())


@pytest.fixture
def network(tmp_path, target):
    return checkpoint.write(tmp_path / "drafter", tiny.network(target.model), coupling=(0.8, 1.2))


def exported(folder, target):
    """What `ddtree train` exports."""
    checkpoint.write(folder / loading.NETWORK, tiny.network(target.model))
    build_table([tiny.prompt(50)], folder / loading.TABLE)
    return folder


@pytest.mark.parametrize("spec", [None, "none"])
def test_none_is_no_drafter(target, spec):
    assert loading.load_drafter(spec, target) is None


def test_lookup_needs_nothing(target):
    assert isinstance(loading.load_drafter("lookup", target), Lookup)


def test_a_folder_of_a_checkpoint_is_its_network_with_its_coupling(target, network):
    drafter = loading.load_drafter(str(network), target)
    assert (drafter.name, drafter.feature_layers, drafter.coupling) == ("dflash", (0, 1), (0.8, 1.2))
    assert loading.load_drafter(network, target).name == "dflash"


def test_an_exported_folder_is_network_and_table_merged(target, tmp_path):
    drafter = loading.load_drafter(exported(tmp_path, target), target)
    assert drafter.name == "dflash+lookup"
    assert drafter.drafters[1].table is not None


def test_a_folder_with_a_table_alone_is_a_lookup(target, tmp_path):
    build_table([tiny.prompt(50)], tmp_path / loading.TABLE)
    drafter = loading.load_drafter(tmp_path, target)
    assert drafter.name == "lookup" and drafter.table is not None


def test_demo_is_the_drafter_that_ships_with_lookup(target, tmp_path, monkeypatch, network):
    monkeypatch.setattr(demo, "demo_drafter", lambda: exported(tmp_path, target))
    drafter = loading.load_drafter("demo", target)
    assert drafter.name == "dflash+lookup" and drafter.drafters[1].table is not None
    monkeypatch.setattr(demo, "demo_drafter", lambda: network)
    drafter = loading.load_drafter("demo", target)
    assert drafter.name == "dflash+lookup" and drafter.drafters[1].table is None


def test_a_draft_model_is_loaded_in_the_targets_dtype(tmp_path):
    folder = talker.save(tmp_path)
    target = Target(talker.model().bfloat16(), talker.tokenizer())
    drafter = loading.load_drafter(f"draft:{folder}", target)
    assert drafter.name == "draft-model" and drafter.model.dtype == target.dtype


def test_a_list_is_merged_flat(target, network, tmp_path):
    drafter = loading.load_drafter(["lookup", exported(tmp_path, target), network], target)
    assert drafter.name == "lookup+dflash+lookup+dflash"
    assert loading.load_drafter(["lookup"], target).name == "lookup"


def test_a_drafter_is_taken_as_it_is(target):
    own = Lookup(vocab_size=target.vocab_size)
    assert loading.load_drafter(own, target) is own


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "must hold drafters to merge"),
        (["lookup", "none"], "must hold drafters to merge"),
        (7, "drafter=7 is not a drafter: give lookup"),
        ("draft:", "names no model: write draft:FOLDER"),
    ],
)
def test_a_spec_that_stands_for_nothing_is_named(target, spec, message):
    with pytest.raises(ConfigError, match=message):
        loading.load_drafter(spec, target)


def test_a_missing_drafter_is_named(target, tmp_path):
    with pytest.raises(CheckpointError, match="/no/such/drafter does not exist: name the drafter's folder"):
        loading.load_drafter("/no/such/drafter", target)
    with pytest.raises(CheckpointError, match="holds no drafter"):
        loading.load_drafter(tmp_path, target)


def test_a_drafter_on_the_hub_that_cannot_be_reached_gives_one_line(target, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("offline\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        loading.load_drafter("some/drafter", target)
    assert "the Hugging Face hub does not give it (offline)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_another_target_is_refused_with_the_reason(network):
    with pytest.raises(CheckpointError, match=r"does not fit the target: .*vocabulary of 48 tokens"):
        loading.load_drafter(network, Target(tiny.model(vocab_size=64)))


def test_a_language_model_as_drafter_is_told_how_to_be_one(target, tmp_path):
    folder = talker.save(tmp_path)
    with pytest.raises(CheckpointError, match=f'write drafter="draft:{folder}" to draft with it'):
        loading.load_drafter(folder, target)


def test_a_draft_model_with_another_vocabulary_is_refused(target, tmp_path):
    folder = talker.save(tmp_path)
    with pytest.raises(CheckpointError, match="260 tokens and the target 48"):
        loading.load_drafter(f"draft:{folder}", target)


def test_a_draft_model_on_which_no_tree_can_be_grown_is_refused(target, tmp_path):
    import transformers as hf

    hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=tiny.VOCAB, hidden_size=16, num_hidden_layers=1)
    ).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        loading.load_drafter(f"draft:{tmp_path}", target)
