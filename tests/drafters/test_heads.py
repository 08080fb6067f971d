"""First-order heads: what they compute, how they begin, and their files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.files import is_head, misfits, read_head, write_head
from ddtree.drafters.dflash.heads import Markov, TreeFlash, create
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target

HIDDEN, KEPT = 32, [3, 5, 7, 11, 13, 17, 40, 41]


@pytest.fixture
def trunk():
    model = tiny.model().requires_grad_(False)
    return Backbone(tiny.network(model), Target(model), draft_ids=torch.tensor(KEPT))


def heads(seed=0, scale=1.0):
    """Heads of every form, with random weights."""
    made = [
        Markov(len(KEPT), rank=4),
        Markov(len(KEPT), tiny.VOCAB, rank=4, confidence=HIDDEN),
        TreeFlash(HIDDEN, 24),
    ]
    torch.manual_seed(seed)
    for head in made:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=scale)
    return made


def block(trunk):
    torch.manual_seed(1)
    return torch.randn(2, 5, HIDDEN), torch.randint(0, tiny.VOCAB, (2, 5))


@pytest.mark.parametrize("kind", ["markov", "treeflash"])
def test_an_untrained_head_corrects_nothing(trunk, kind):
    head = create(kind, **({"size": len(KEPT)} if kind == "markov" else {"hidden_size": HIDDEN}))
    states, previous = block(trunk)
    base = trunk.logits(trunk.norm(states))
    assert torch.equal(head(trunk, states, previous), base)
    assert torch.equal(head(trunk, states, previous, base), base)


def test_an_untrained_head_can_be_trained(trunk):
    """A correction of zero must not be a dead end: gradients reach the part that was zeroed."""
    for head in (Markov(len(KEPT)), TreeFlash(HIDDEN)):
        states, previous = block(trunk)
        head(trunk, states, previous).log_softmax(-1)[..., 0].sum().backward()
        last = head.w2 if isinstance(head, Markov) else head.down
        assert last.weight.grad.abs().sum() > 0


def test_markov_adds_the_product_of_its_rows(trunk):
    small, whole, _ = heads()
    states, previous = block(trunk)
    base = trunk.logits(trunk.norm(states))
    for head in (small, whole):
        got = head(trunk, states, previous, base)
        for a, d in ((0, 0), (1, 4), (0, 3)):
            token = int(previous[a, d])
            row = token if head is whole else KEPT.index(token) if token in KEPT else len(KEPT)
            torch.testing.assert_close(got[a, d], base[a, d] + head.w2.weight @ head.w1.weight[row])


def test_the_small_markov_form_has_one_row_for_all_outside_tokens(trunk):
    small, whole, _ = heads()
    states = torch.zeros(1, 2, HIDDEN)
    outside = small(trunk, states, torch.tensor([[0, 1]]))[0]
    assert torch.equal(outside[0], outside[1])
    apart = whole(trunk, states, torch.tensor([[0, 1]]))[0]
    assert not torch.equal(apart[0], apart[1])


def test_treeflash_moves_the_state_by_a_gated_layer(trunk):
    head = heads()[2]
    states, previous = block(trunk)
    got = head(trunk, states, previous)
    token, state = trunk.embed(previous)[0, 2], states[0, 2]
    normed = token / (token.pow(2).mean() + 1e-6).sqrt() * head.embed_norm.weight
    inner = head.gate_up.weight @ torch.cat([normed, trunk.norm(state)]) + head.gate_up.bias
    gate, up = inner[:24], inner[24:]
    moved = state + head.down.weight @ (gate * gate.sigmoid() * up)
    torch.testing.assert_close(got[0, 2], trunk.logits(trunk.norm(moved)), rtol=1e-4, atol=1e-4)


def test_a_slot_depends_on_its_own_state_and_previous_token_alone(trunk):
    for head in heads():
        states, previous = block(trunk)
        whole = head(trunk, states, previous)
        part = head(trunk, states[:, 2:3], previous[:, 2:3])
        torch.testing.assert_close(whole[:, 2:3], part)


def test_several_predecessors_of_a_slot_share_its_state(trunk):
    for head in heads():
        states, _ = block(trunk)
        many = torch.randint(0, tiny.VOCAB, (2, 5, 3))
        base = trunk.logits(trunk.norm(states))[:, :, None]
        got = head(trunk, states[:, :, None], many, base)
        for place in range(3):
            torch.testing.assert_close(got[:, :, place], head(trunk, states, many[:, :, place]))


def test_confidence_reads_state_and_previous_token(trunk):
    _, head, _ = heads()
    states, previous = block(trunk)
    got = head.confidence(trunk, states, previous)
    assert got.shape == (2, 5) and got.dtype == torch.float32
    joined = torch.cat([trunk.norm(states[0, 1]), head.w1.weight[previous[0, 1]]])
    torch.testing.assert_close(got[0, 1], head.confidence_proj(joined)[0])
    with pytest.raises(ConfigError, match="no confidence head"):
        heads()[0].confidence(trunk, states, previous)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("attention", {}, "head kind 'attention' is unknown: .*markov, treeflash"),
        ("markov", {"rank": 4}, "a markov head cannot be made of"),
        ("markov", {"size": 0}, "size=0 must be a whole number"),
        ("treeflash", {"hidden_size": -1}, "hidden_size=-1 must be a whole number"),
        ("treeflash", {"hidden_size": 8, "depth": 2}, "a treeflash head cannot be made of"),
    ],
)
def test_heads_that_cannot_be_made_are_named(kind, config, message):
    with pytest.raises(CheckpointError, match=message):
        create(kind, **config)


def saved(tmp_path, head, **options):
    (tmp_path / "dflash").mkdir(exist_ok=True)
    (tmp_path / "dflash" / "config.json").write_text("{}")
    return write_head(tmp_path / head.kind, head, **options)


def test_a_head_comes_back_from_its_files(trunk, tmp_path):
    states, previous = block(trunk)
    for head in heads():
        folder = saved(tmp_path, head, coupling=(0.7, 1.1), dtype=torch.float32)
        again, backbone, coupling = read_head(folder)
        assert backbone == (tmp_path / "dflash").resolve() and coupling == (0.7, 1.1)
        assert again.config() == head.config() and not again.training and is_head(folder)
        assert torch.equal(again(trunk, states, previous), head(trunk, states, previous))
    assert not is_head(tmp_path / "dflash") and not is_head(tmp_path)


def test_int8_storage_is_small_and_close(trunk, tmp_path):
    head = Markov(len(KEPT), tiny.VOCAB, rank=64, confidence=HIDDEN)
    torch.nn.init.normal_(head.w2.weight)
    sizes = {}
    for dtype in (torch.bfloat16, "int8"):
        folder = saved(tmp_path, head, dtype=dtype)
        sizes[dtype] = (folder / "model.safetensors").stat().st_size
        again = read_head(folder)[0]
        for name, tensor in head.state_dict().items():
            most = tensor.abs().amax(dim=-1, keepdim=True)
            assert ((again.state_dict()[name] - tensor).abs() <= most / 127).all()
    assert sizes["int8"] < 0.75 * sizes[torch.bfloat16]


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_damaged_head_files_are_named(tmp_path):
    head = heads()[0]
    with pytest.raises(ConfigError, match='must be a torch dtype or "int8"'):
        write_head(tmp_path / "x", head, dtype="int4")
    for changes, message in (
        ({"head": {"kind": "attention"}}, "head kind 'attention' is unknown"),
        ({"head": {"kind": "markov", "size": 9, "rank": 4}}, r"tensor w1.weight is \[9, 4\], not \[10, 4\]"),
        (
            {"head": {"kind": "treeflash", "hidden_size": 32}},
            "unknown tensors w1.weight, w2.weight and missing",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "is no DDTreeHead's"),
        ({"backbone": None}, "names no backbone"),
        ({"backbone": "../other"}, "its backbone ../other is not there"),
        ({"coupling": {"beta": 1}}, "must have numbers beta and kappa"),
        ({"coupling": {"beta": -1, "kappa": 1}}, "beta from 0 up"),
    ):
        folder = saved(tmp_path, head)
        edited(folder, **changes)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_head(folder)
        assert str(caught.value).startswith(str(folder))


def test_int8_without_its_scales_is_named(tmp_path):
    folder = saved(tmp_path, heads()[0], dtype="int8")
    tensors = load_file(folder / "model.safetensors")
    del tensors["w1.weight.scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w1\.weight is int8, but its scales"):
        read_head(folder)


def test_a_head_of_another_backbone_is_told_what_differs():
    small, whole, flash = heads()
    assert misfits(whole, HIDDEN, len(KEPT), tiny.VOCAB) == []
    assert misfits(small, 64, 9, 50) == ["size 8 is not the draft vocabulary's size 9"]
    assert len(misfits(whole, 64, 9, 50)) == 3
    assert misfits(flash, 64, 8, 48) == ["hidden_size 32 is not the backbone's hidden size 64"]
