"""Heads by name: parts of a drafter's folder, and published checkpoints that have one inside."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from ddtree.drafters import DraftRow, loading
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.dflash.files import write_head
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.heads import Domino as DominoHead
from ddtree.drafters.dflash.heads import Markov, TreeFlash, Trunk
from ddtree.drafters.mixed import Continuity
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError
from ddtree.model import demo
from ddtree.model.target import Target
from ddtree.stats import Clock

V, H, R = tiny.VOCAB, 32, 6


@pytest.fixture
def target():
    return Target(tiny.model())


@pytest.fixture
def folder(tmp_path, target):
    """Network, table and a head of each kind, side by side."""
    whole = tmp_path / "own"
    checkpoint.write(whole / loading.NETWORK, tiny.network(target.model))
    build_table([tiny.prompt(50)], whole / loading.TABLE)
    for head in (Markov(V, rank=R), TreeFlash(H), DominoHead(H, V, 16, 8)):
        write_head(whole / head.kind, head, coupling=(0.5, 1.5))
    return whole


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


def test_network_and_table_of_a_folder_are_mixed(target, folder):
    assert isinstance(loading.load_drafter(folder, target), Continuity)


def test_parts_of_the_demo_drafter_have_names(target, folder, monkeypatch):
    monkeypatch.setattr(demo, "demo_drafter", lambda: folder)
    assert loading.load_drafter("demo", target).name == "dflash+lookup"
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


def markov_tensors(rank=R, hidden=H):
    torch.manual_seed(0)
    return {
        "markov_head.markov_w1.weight": torch.randn(V, rank),
        "markov_head.markov_w2.weight": torch.randn(V, rank),
        "confidence_head.proj.weight": torch.randn(1, hidden + rank),
        "confidence_head.proj.bias": torch.randn(1),
    }


def treeflash_tensors(inner=24):
    torch.manual_seed(0)
    return {
        "ar_approximation.norm.weight": torch.rand(H),
        "ar_approximation.ug.weight": torch.randn(2 * inner, 2 * H),
        "ar_approximation.ug.bias": torch.randn(2 * inner),
        "ar_approximation.d.weight": torch.randn(H, inner),
    }


TREEFLASH = {
    "architectures": ["TreeFlashDraftModel"],
    "treeflash_config": {"ar_approximation": "swiglu", "candidate_tokens": 64},
}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": R, "markov_head_type": "vanilla"}


def block(trunk: Trunk):
    torch.manual_seed(1)
    return torch.randn(1, 4, H), torch.randint(0, V, (1, 4))


@torch.no_grad()
def test_a_published_dspark_drafter_is_a_markov_drafter_whose_anchor_slot_predicts(target, tmp_path):
    tensors = markov_tensors()
    drafter = loading.load_drafter(published(tmp_path, target, {}, tensors, **DSPARK), target)
    assert drafter.name == "markov" and drafter.max_depth == 8
    states, previous = block(drafter.backbone)
    base = drafter.backbone.logits(drafter.backbone.norm(states))
    w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    torch.testing.assert_close(drafter.head(drafter.backbone, states, previous), base + w1[previous] @ w2.T)
    joined = torch.cat([drafter.backbone.norm(states), w1[previous]], dim=-1)
    expected = joined @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"]
    torch.testing.assert_close(drafter.head.confidence(drafter.backbone, states, previous), expected)


def test_a_dflash_drafter_with_a_markov_head_keeps_its_slots(target, tmp_path):
    tensors = {name: tensor for name, tensor in markov_tensors().items() if "markov" in name}
    drafter = loading.load_drafter(published(tmp_path, target, {"markov_rank": R}, tensors), target)
    assert drafter.name == "markov" and drafter.max_depth == 7 and drafter.head.confidence_proj is None


def test_a_confidence_head_that_knows_no_predecessor_is_left_out(target, tmp_path):
    tensors = {**markov_tensors(), "confidence_head.proj.weight": torch.randn(1, H)}
    folder = published(tmp_path, target, {}, tensors, **DSPARK, confidence_head_with_markov=False)
    assert loading.load_drafter(folder, target).head.confidence_proj is None


@torch.no_grad()
def test_a_published_treeflash_drafter_has_its_gate_in_the_second_half(target, tmp_path):
    tensors = treeflash_tensors()
    drafter = loading.load_drafter(published(tmp_path, target, {}, tensors, **TREEFLASH), target)
    assert drafter.name == "treeflash" and drafter.max_depth == 7
    trunk = drafter.backbone
    states, previous = block(trunk)
    known = trunk.embed(previous)
    known = (
        known / (known.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * tensors["ar_approximation.norm.weight"]
    )
    inner = torch.cat([known, trunk.norm(states)], dim=-1) @ tensors["ar_approximation.ug.weight"].T
    up, gate = (inner + tensors["ar_approximation.ug.bias"]).chunk(2, dim=-1)
    moved = states + (gate * gate.sigmoid() * up) @ tensors["ar_approximation.d.weight"].T
    got = drafter.head(trunk, states, previous)
    torch.testing.assert_close(got, trunk.logits(trunk.norm(moved)), rtol=1e-4, atol=1e-4)


def test_a_published_domino_drafter_shifts_its_slots_when_it_says_so(target, tmp_path):
    torch.manual_seed(0)
    tensors = {
        "prefix_gru.weight_ih_l0": torch.randn(3 * 16, H),
        "prefix_gru.weight_hh_l0": torch.randn(3 * 16, 16),
        "embed_proj.0.weight": torch.randn(8, H + 16),
        "embed_proj.2.weight": torch.randn(V, 8),
    }
    own = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 16, "pure_draft_prefix_len": 1}
    drafter = loading.load_drafter(published(tmp_path / "a", target, own, tensors), target)
    assert drafter.name == "domino" and drafter.max_depth == 7
    own["shift_label"] = True
    assert loading.load_drafter(published(tmp_path / "b", target, own, tensors), target).max_depth == 8


def test_a_published_drafter_drafts(target, tmp_path):
    drafter = loading.load_drafter(published(tmp_path, target, {}, treeflash_tensors(), **TREEFLASH), target)
    drafter.add_row()
    drafter.observe(0, tiny.prompt(5), torch.randn(5, 2 * H))
    tree = drafter.draft([DraftRow([*tiny.prompt(5), 9], budget=12, depth=7)], Clock())
    assert tree.sizes == [13]


@pytest.mark.parametrize(
    ("own", "top", "tensors", "message"),
    [
        (
            {},
            {**DSPARK, "markov_head_type": "rnn"},
            markov_tensors,
            "markov_head_type='rnn' is not supported",
        ),
        (
            {},
            {**TREEFLASH, "treeflash_config": {"ar_approximation": "linear"}},
            treeflash_tensors,
            "ar_approximation='linear' is not supported",
        ),
        (
            {},
            DSPARK,
            dict,
            "this Markov head lacks markov_head.markov_w1.weight, markov_head.markov_w2.weight",
        ),
        ({}, TREEFLASH, dict, "this TreeFlash head lacks ar_approximation.norm.weight"),
        (
            {},
            DSPARK,
            lambda: {**markov_tensors(), "markov_head.gate_proj.weight": torch.zeros(1)},
            "unknown tensors markov_head.gate_proj.weight",
        ),
        (
            {},
            DSPARK,
            lambda: {**markov_tensors(), "markov_head.markov_w2.weight": torch.zeros(9, R)},
            "its markov head does not fit: size 9 is not the draft vocabulary's size 48",
        ),
        ({}, DSPARK, lambda: markov_tensors(hidden=8), "confidence 8 is not the backbone's hidden size 32"),
        ({"selector_rank": 4}, DSPARK, markov_tensors, "DFlash2 drafter"),
        ({"projector_type": "mystery"}, {}, dict, "projector_type 'mystery' is unknown"),
    ],
)
def test_forms_of_heads_that_are_not_known_are_refused_by_name(target, tmp_path, own, top, tensors, message):
    folder = published(tmp_path, target, own, tensors(), **top)
    with pytest.raises(CheckpointError) as caught:
        loading.load_drafter(folder, target)
    assert message in str(caught.value)


def test_without_asking_for_heads_a_successor_is_still_refused(target, tmp_path):
    folder = published(tmp_path, target, {}, markov_tensors(), **DSPARK)
    with pytest.raises(CheckpointError, match="this is a DSpark drafter"):
        checkpoint.read(folder)
