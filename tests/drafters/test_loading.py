"""Drafters by name: parts of a folder, published checkpoints, and every name that stands for none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import build

import talker
import tiny
from ddtree.drafters import DraftRow, loading
from ddtree.drafters.dflash import DFlash, checkpoint
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.head_checkpoint import read_published, write_head
from ddtree.drafters.dflash.heads import DominoHead, Markov, TreeFlash
from ddtree.drafters.merged import Mixed
from ddtree.drafters.ngram import Lookup
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError, UnsupportedModelError
from ddtree.model import demo
from ddtree.model.target import Target
from ddtree.stats import Clock
from drafting import GRU, HIDDEN, RANK, published_head

V, H, R = tiny.VOCAB, HIDDEN, RANK


@pytest.fixture
def target():
    return Target(tiny.model())


@pytest.fixture
def network(tmp_path, target):
    return checkpoint.write(tmp_path / "drafter", tiny.network(target.model), coupling=(0.8, 1.2))


def exported(folder, target):
    """A folder as `ddtree train` exports it: network, table and a head of each kind, side by side."""
    checkpoint.write(folder / loading.NETWORK, tiny.network(target.model))
    build_table([tiny.prompt(50)], folder / loading.TABLE)
    for head in (Markov(V, rank=R), TreeFlash(H), DominoHead(H, V, 16, 8)):
        write_head(folder / head.kind, head, coupling=(0.5, 1.5))
    return folder


@pytest.fixture
def folder(tmp_path, target):
    return exported(tmp_path / "own", target)


@pytest.mark.parametrize(("spec", "kind"), [(None, type(None)), ("none", type(None)), ("lookup", Lookup)])
def test_names_that_need_no_files(target, spec, kind):
    assert isinstance(loading.load_drafter(spec, target), kind)


def test_a_folder_of_a_checkpoint_is_its_network_with_its_coupling(target, network):
    drafter = loading.load_drafter(str(network), target)
    assert (drafter.name, drafter.feature_layers, drafter.coupling) == ("dflash", (0, 1), (0.8, 1.2))
    assert loading.load_drafter(network, target).name == "dflash"


def test_an_exported_folder_is_network_and_table_mixed(target, folder):
    drafter = loading.load_drafter(folder, target)
    assert isinstance(drafter, Mixed) and drafter.name == "dflash+lookup"
    assert drafter.drafters[1].table is not None


def test_a_folder_with_a_table_alone_is_a_lookup(target, tmp_path):
    build_table([tiny.prompt(50)], tmp_path / loading.TABLE)
    drafter = loading.load_drafter(tmp_path, target)
    assert drafter.name == "lookup" and drafter.table is not None


def test_demo_without_a_table_is_mixed_with_the_text_alone(target, monkeypatch, network):
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


# Parts of a folder


@pytest.mark.parametrize("kind", ["markov", "treeflash", "domino"])
def test_a_head_is_loaded_on_its_backbone_with_its_coupling(target, folder, kind):
    drafter = loading.load_drafter(folder / kind, target)
    assert drafter.name == kind and drafter.coupling == (0.5, 1.5)
    assert drafter.feature_layers == (0, 1) and isinstance(
        drafter, Domino if kind == "domino" else FirstOrder
    )
    assert loading.folder_of(folder / kind) == folder / kind


def test_the_network_in_two_passes_is_named_like_a_part(target, folder):
    second = loading.load_drafter(folder / "d2sd", target)
    assert isinstance(second, D2SD) and second.name == "d2sd"
    assert loading.folder_of(folder / "d2sd") == loading.folder_of(folder) == folder
    with pytest.raises(CheckpointError, match=r"markov/d2sd needs a network, and .*markov holds none"):
        loading.load_drafter(folder / "markov" / "d2sd", target)


def test_parts_of_the_demo_drafter_have_names(target, folder, monkeypatch):
    monkeypatch.setattr(demo, "demo_drafter", lambda: folder)
    whole = loading.load_drafter("demo", target)
    assert whole.name == "dflash+lookup" and whole.drafters[1].table is not None
    assert isinstance(loading.load_drafter("demo/dflash", target), DFlash)
    assert loading.load_drafter("demo/treeflash", target).name == "treeflash"
    table = loading.load_drafter("demo/ngrams", target)
    assert table.name == "lookup" and table.table is not None
    assert loading.load_drafter(["demo/markov", "demo/ngrams"], target).name == "markov+lookup"
    assert loading.folder_of("demo/treeflash") == folder / "treeflash"
    assert loading.folder_of("demo/ngrams") is None
    with pytest.raises(
        CheckpointError, match="has no part eagle: it holds dflash, domino, markov, treeflash, ngrams"
    ):
        loading.load_drafter("demo/eagle", target)


def test_drafters_of_one_list_share_their_backbones_weights(target, folder):
    merged = loading.load_drafter([folder / "dflash", folder / "treeflash"], target)
    first, second = (part.backbone.network.state_dict() for part in merged.drafters)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)
    assert merged.drafters[0].backbone is not merged.drafters[1].backbone


def test_a_part_on_the_hub_is_found_in_its_repository(target, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert loading.load_drafter("some/drafter/treeflash", target).name == "treeflash"
    assert loading.load_drafter("some/drafter", target).name == "dflash+lookup"


def test_a_head_whose_backbone_is_another_is_refused(target, folder):
    write_head(folder / "markov", Markov(V - 1, rank=R))
    with pytest.raises(
        CheckpointError, match=r"does not fit its backbone .*size 47 is not the draft vocabulary's"
    ):
        loading.load_drafter(folder / "markov", target)
    write_head(folder / "treeflash", TreeFlash(16))
    with pytest.raises(CheckpointError, match="hidden_size 16 is not the backbone's hidden size 32"):
        loading.load_drafter(folder / "treeflash", target)
    write_head(folder / "treeflash", TreeFlash(H), backbone="../gone")
    with pytest.raises(CheckpointError, match=r"its backbone \.\./gone is not there"):
        loading.load_drafter(folder / "treeflash", target)


def test_a_head_of_another_target_is_refused(folder):
    with pytest.raises(CheckpointError, match="does not fit the target"):
        loading.load_drafter(folder / "treeflash", Target(tiny.model(vocab_size=64)))


# Published checkpoints


def published(folder, target, own, tensors, **top):
    """A checkpoint of a DFlash network with further settings and tensors."""
    checkpoint.write(folder, tiny.network(target.model))
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"] |= own
    (folder / "config.json").write_text(json.dumps({**raw, **top}))
    kept = load_file(folder / "model.safetensors")
    save_file({**kept, **tensors}, folder / "model.safetensors")
    return folder


TREEFLASH = {
    "architectures": ["TreeFlashDraftModel"],
    "treeflash_config": {"ar_approximation": "swiglu", "candidate_tokens": 64},
}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": R, "markov_head_type": "vanilla"}
DOMINO = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": GRU, "pure_draft_prefix_len": 1}


@pytest.mark.parametrize(
    ("own", "top", "kind", "depth"),
    [
        ({}, DSPARK, "markov", 8),  # its anchor slot predicts
        ({"markov_rank": R}, {}, "markov", 7),
        ({}, TREEFLASH, "treeflash", 7),
        (DOMINO, {}, "domino", 7),
        ({**DOMINO, "shift_label": True}, {}, "domino", 8),
    ],
)
def test_a_published_drafter_drafts_with_its_head(target, tmp_path, own, top, kind, depth):
    tensors = published_head(kind)
    expected = read_published(kind, {**own, **top}, tensors).state_dict()
    for prefix in ("", "model."):
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        drafter = loading.load_drafter(
            published(tmp_path / f"with {prefix}", target, own, named, **top), target
        )
        assert (drafter.name, drafter.head.kind, drafter.max_depth) == (kind, kind, depth)
        found = drafter.head.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[part], expected[part]) for part in expected)
    drafter.add_row()
    drafter.observe(0, tiny.prompt(5), torch.randn(5, 2 * H))
    tree = drafter.draft([DraftRow([*tiny.prompt(5), 9], budget=12, depth=7)], Clock())
    assert tree.sizes == [13]


MARKOV_W2 = "markov_head.markov_w2.weight"
RNN = {**DSPARK, "markov_head_type": "rnn"}
LINEAR = {**TREEFLASH, "treeflash_config": {"ar_approximation": "linear"}}


@pytest.mark.parametrize(
    ("own", "top", "kind", "changes", "message"),
    [
        ({}, RNN, "markov", {}, "markov_head_type='rnn' is not supported"),
        ({}, LINEAR, "treeflash", {}, "ar_approximation='linear' is not supported"),
        ({}, DSPARK, "domino", {}, "this Markov head lacks markov_head.markov_w1.weight, " + MARKOV_W2),
        ({}, TREEFLASH, "markov", {}, "this TreeFlash head lacks ar_approximation.norm.weight"),
        ({}, DSPARK, "markov", {"markov_head.gate": torch.zeros(1)}, "unknown tensors markov_head.gate"),
        (
            {},
            DSPARK,
            "markov",
            {MARKOV_W2: torch.zeros(9, R)},
            "its markov head does not fit: size 9 is not the draft vocabulary's size 48",
        ),
        (
            {},
            DSPARK,
            "markov",
            {"confidence_head.proj.weight": torch.zeros(1, 8 + R)},
            "confidence 8 is not the backbone's hidden size 32",
        ),
        ({"selector_rank": 4}, DSPARK, "markov", {}, "DFlash2 drafter"),
        ({"projector_type": "mystery"}, {}, "markov", {}, "projector_type 'mystery' is unknown"),
    ],
)
def test_forms_of_heads_that_are_not_known_are_refused_by_name(
    target, tmp_path, own, top, kind, changes, message
):
    folder = published(tmp_path, target, own, {**published_head(kind), **changes}, **top)
    with pytest.raises(CheckpointError) as caught:
        loading.load_drafter(folder, target)
    assert message in str(caught.value)


# Names that stand for none


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


def test_a_language_model_as_drafter_is_told_how_to_be_one(target, tmp_path):
    folder = talker.save(tmp_path)
    with pytest.raises(CheckpointError, match=f'write drafter="draft:{folder}" to draft with it'):
        loading.load_drafter(folder, target)


def test_a_draft_model_with_another_vocabulary_is_refused(target, tmp_path):
    folder = talker.save(tmp_path)
    with pytest.raises(CheckpointError, match="260 tokens and the target 48"):
        loading.load_drafter(f"draft:{folder}", target)


def test_a_draft_model_on_which_no_tree_can_be_grown_is_refused(target, tmp_path):
    build("mamba").model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        loading.load_drafter(f"draft:{tmp_path}", target)
