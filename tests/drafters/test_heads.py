"""Heads: every kind equals its published forward, comes back from its files, and starts as no correction at all."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.head_checkpoint import (
    incompatibilities,
    is_head,
    read_head,
    read_published,
    write_head,
)
from ddtree.drafters.dflash.heads import DominoHead, Markov, TreeFlash, create
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from drafting import GRU, HIDDEN, RANK, published_head

H, V, R = HIDDEN, tiny.VOCAB, RANK
KEPT = [3, 5, 7, 11, 13, 17, 40, 41]
KINDS = ["markov", "treeflash", "domino"]


@pytest.fixture
def backbone():
    model = tiny.model().requires_grad_(False)
    return Backbone(tiny.network(model), Target(model), draft_ids=torch.tensor(KEPT))


def block(rows=2):
    """States and previous tokens of five slots of some rows."""
    torch.manual_seed(1)
    return torch.randn(rows, 5, H), torch.randint(0, V, (rows, 5))


UNTRAINED = {
    "markov": lambda: Markov(len(KEPT), V, R),
    "small markov": lambda: Markov(len(KEPT), rank=R),
    "confident markov": lambda: Markov(len(KEPT), V, R, confidence=H),
    "treeflash": lambda: TreeFlash(H, 24),
    "domino": lambda: DominoHead(H, len(KEPT), GRU, R, pure_prefix=0),
    "domino from depth 3": lambda: DominoHead(H, len(KEPT), GRU, R, pure_prefix=2),
}
every_form = pytest.mark.parametrize("form", UNTRAINED)
every_kind = pytest.mark.parametrize("kind", KINDS)


def head_of(form):
    """A head of a form with random weights."""
    head = UNTRAINED[form]()
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return head


# What a head computes


def published_forward(kind, tensors, backbone, states, previous):
    """Logits by the formulas of the papers, from the published tensors; Domino's first depth is the backbone's."""
    base, embedded = backbone.logits(backbone.norm(states)), backbone.embed(previous)
    if kind == "markov":
        rows = tensors["markov_head.markov_w1.weight"][previous]
        return base + rows @ tensors["markov_head.markov_w2.weight"].T
    if kind == "treeflash":
        known = embedded / (embedded.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        known = known * tensors["ar_approximation.norm.weight"]
        inner = torch.cat([known, backbone.norm(states)], dim=-1) @ tensors["ar_approximation.ug.weight"].T
        up, gate = (inner + tensors["ar_approximation.ug.bias"]).chunk(2, dim=-1)
        moved = states + (gate * gate.sigmoid() * up) @ tensors["ar_approximation.d.weight"].T
        return backbone.logits(backbone.norm(moved))
    logits, state = [base[:, 0]], torch.zeros(len(states), GRU)
    for slot in range(states.shape[1]):
        reset, update, new = (embedded[:, slot] @ tensors["prefix_gru.weight_ih_l0"].T).chunk(3, dim=-1)
        h_reset, h_update, h_new = (state @ tensors["prefix_gru.weight_hh_l0"].T).chunk(3, dim=-1)
        candidate = (new + (reset + h_reset).sigmoid() * h_new).tanh()
        update = (update + h_update).sigmoid()
        state = (1 - update) * candidate + update * state
        inner = torch.cat([backbone.norm(states[:, slot]), state], dim=-1) @ tensors["embed_proj.0.weight"].T
        if slot:
            correction = (inner * inner.sigmoid()) @ tensors["embed_proj.2.weight"].T
            logits.append(base[:, slot] + correction)
    return torch.stack(logits, dim=1)


SETTINGS = {"emb_dim": R, "gru_hidden_dim": GRU, "pure_draft_prefix_len": 1}


@every_kind
@torch.no_grad()
def test_every_head_equals_the_published_forward(backbone, kind):
    tensors, (states, previous) = published_head(kind, len(KEPT)), block()
    others = {"fc.weight": torch.zeros(2, 2)}
    head = read_published(kind, {"dflash_config": SETTINGS}, {**tensors, **others})
    assert head.kind == kind
    got = head(backbone, states, previous)
    assert got.dtype == torch.float32
    expected = published_forward(kind, tensors, backbone, states, previous)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    base = backbone.logits(backbone.norm(states))
    torch.testing.assert_close(head(backbone, states, previous, base), got)
    assert not torch.allclose(got, base, atol=0.1)


@every_form
def test_an_untrained_head_corrects_nothing_and_can_be_trained(backbone, form):
    """A correction of zero must not be a dead end: gradients reach the part that was zeroed."""
    head, (states, previous) = UNTRAINED[form](), block()
    base = backbone.logits(backbone.norm(states))
    assert torch.equal(head(backbone, states, previous), base)
    assert torch.equal(head(backbone, states, previous, base), base)
    head(backbone, states, previous).log_softmax(-1)[..., 0].sum().backward()
    last = {"markov": "w2.weight", "treeflash": "down.weight", "domino": "embed_proj.2.weight"}[head.kind]
    assert dict(head.named_parameters())[last].grad.abs().sum() > 0


@every_form
@torch.no_grad()
def test_a_slot_depends_on_its_own_path_alone(backbone, form):
    """Markov's and TreeFlash's on the token before it, Domino's on all tokens before it from its first depth on."""
    head, (states, previous) = head_of(form), block()
    logits = head(backbone, states, previous)
    for changed in range(5):
        other = previous.clone()
        other[:, changed] = torch.where(other[:, changed] == 5, 7, 5)  # both of them draft tokens
        moved = (head(backbone, states, other) - logits).abs().amax(dim=(0, 2)) > 1e-5
        if head.kind == "domino":
            assert moved.tolist() == [slot >= max(changed, head.pure_prefix) for slot in range(5)]
        else:
            assert moved.tolist() == [slot == changed for slot in range(5)]


@pytest.mark.parametrize("form", [form for form in UNTRAINED if "domino" not in form])
def test_several_predecessors_of_a_slot_share_its_state(backbone, form):
    head, (states, _) = head_of(form), block()
    many = torch.randint(0, V, (2, 5, 3))
    base = backbone.logits(backbone.norm(states))[:, :, None]
    got = head(backbone, states[:, :, None], many, base)
    for place in range(3):
        torch.testing.assert_close(got[:, :, place], head(backbone, states, many[:, :, place]))


@every_form
@pytest.mark.parametrize("states_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_close_to_single_and_has_gradients(backbone, form, states_dtype):
    head, (states, previous) = head_of(form), block()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.3)
    exact = head(backbone, states, previous)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = head(backbone, states.to(states_dtype), previous)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=0.05, atol=0.3)
    mixed.square().mean().backward()
    used = {name: p.grad for name, p in head.named_parameters() if not name.startswith("confidence")}
    assert all(torch.isfinite(grad).all() and grad.dtype == torch.float32 for grad in used.values())


# Single kinds


def test_the_small_markov_form_has_one_row_for_all_outside_tokens(backbone):
    states, outside = torch.zeros(1, 2, H), torch.tensor([[0, 1]])
    small, apart = (head_of(form)(backbone, states, outside)[0] for form in ("small markov", "markov"))
    assert torch.equal(small[0], small[1])
    assert not torch.equal(apart[0], apart[1])
    head, (states, previous) = head_of("small markov"), block()
    got, base = head(backbone, states, previous), backbone.logits(backbone.norm(states))
    for row, slot in product(range(2), range(5)):
        token = int(previous[row, slot])
        line = KEPT.index(token) if token in KEPT else len(KEPT)
        torch.testing.assert_close(got[row, slot], base[row, slot] + head.w2.weight @ head.w1.weight[line])


@torch.no_grad()
def test_confidence_reads_state_and_previous_token(backbone):
    tensors, (states, previous) = published_head("markov", len(KEPT)), block()
    got = read_published("markov", {}, tensors).confidence(backbone, states, previous)
    joined = torch.cat([backbone.norm(states), tensors["markov_head.markov_w1.weight"][previous]], dim=-1)
    weight, bias = (tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
    torch.testing.assert_close(got, joined @ weight[0] + bias)
    with pytest.raises(ConfigError, match="no confidence head"):
        head_of("small markov").confidence(backbone, states, previous)


def test_a_confidence_head_that_knows_no_predecessor_is_left_out():
    tensors = {**published_head("markov", len(KEPT)), "confidence_head.proj.weight": torch.randn(1, H)}
    head = read_published("markov", {"confidence_head_with_markov": False}, tensors)
    assert head.confidence_proj is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pure_prefix", [0, 1, 2, 5])
@torch.no_grad()
def test_dominos_steps_give_what_whole_paths_give(backbone, pure_prefix, dtype):
    torch.manual_seed(2)
    head = DominoHead(H, len(KEPT), GRU, R, pure_prefix)
    torch.nn.init.normal_(head.outer)
    head, (states, previous) = head.to(dtype), block(7)
    states = states.to(dtype)
    normed = backbone.norm(states)
    inner, state, steps = head.inner(normed), None, []
    for slot in range(5):
        token = previous[:, slot]
        state = head.start(backbone, token) if slot == 0 else head.step(backbone, state, token)
        correction = head.hidden(inner[:, slot], state) @ head.outer.T
        steps.append(correction.float() * (slot >= pure_prefix))
    base = backbone.logits(normed.float())
    whole = head(backbone, states, previous, base)
    exact = dtype == torch.float32
    expected = base + torch.stack(steps, dim=1)
    torch.testing.assert_close(whole, expected, rtol=0.05 * (not exact), atol=1e-5 if exact else 0.3)
    assert torch.equal(whole[:, :pure_prefix], base[:, :pure_prefix])


def test_domino_learns_what_depends_on_the_path(backbone):
    states, previous = block(32)
    labels = (previous.cumsum(1) * 7 + 1) % len(KEPT)
    head = DominoHead(H, len(KEPT), gru_hidden=32, rank=16, pure_prefix=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(300):
        logits = head(backbone, states, previous)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert all(parameter.grad is not None for parameter in head.parameters())


# Made by name


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("attention", {}, "head kind 'attention' is unknown: .*markov, treeflash"),
        ("markov", {"rank": 4}, "a markov head cannot be made of"),
        ("markov", {"size": 0}, "size must be at least 1, not 0"),
        ("markov", {"size": 8, "rank": "4"}, "rank must be a whole number, not '4'"),
        ("treeflash", {"hidden_size": -1}, "hidden_size must be at least 1, not -1"),
        ("treeflash", {"hidden_size": 8, "depth": 2}, "a treeflash head cannot be made of"),
        ("domino", {"hidden_size": 8, "size": 8, "rank": 0}, "rank must be at least 1"),
        ("domino", {"hidden_size": 8, "size": 8, "gru_hidden": -1}, "gru_hidden must be at least 1"),
        ("domino", {"hidden_size": 8, "size": 8, "pure_prefix": -1}, "pure_prefix must be at least 0"),
    ],
)
def test_heads_that_cannot_be_made_are_named(kind, config, message):
    with pytest.raises(CheckpointError, match=message):
        create(kind, **config)


# Our files


def saved(tmp_path, head, **options):
    (tmp_path / "dflash").mkdir(exist_ok=True)
    (tmp_path / "dflash" / "config.json").write_text("{}")
    return write_head(tmp_path / head.kind, head, **options)


@every_form
@torch.no_grad()
def test_every_head_comes_back_from_its_files(backbone, tmp_path, form):
    head, (states, previous) = head_of(form), block()
    folder = saved(tmp_path, head, coupling=(0.7, 1.1), dtype=torch.float32)
    again, place, coupling = read_head(folder)
    assert place == (tmp_path / "dflash").resolve() and coupling == (0.7, 1.1)
    assert again.config() == head.config() and not again.training and is_head(folder)
    assert torch.equal(again(backbone, states, previous), head(backbone, states, previous))
    assert not is_head(tmp_path / "dflash") and not is_head(tmp_path)


def test_int8_storage_is_small_and_close(tmp_path):
    head = Markov(len(KEPT), V, rank=64, confidence=H)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": {"kind": "attention"}}, "head kind 'attention' is unknown"),
        ({"head": {"kind": "markov", "size": 9, "rank": R}}, r"tensor w1.weight is \[9, 6\], not \[10, 6\]"),
        (
            {"head": {"kind": "treeflash", "hidden_size": 32}},
            "unknown tensors w1.weight, w2.weight and missing",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "is no DDTreeHead's"),
        ({"backbone": None}, "names no backbone"),
        ({"backbone": "../other"}, "its backbone ../other is not there"),
        ({"coupling": {"beta": 1}}, "must have numbers beta and kappa"),
        ({"coupling": {"beta": -1, "kappa": 1}}, "beta from 0 up"),
        ({"coupling": {"beta": "x", "kappa": 1}}, "beta='x' must be a number"),
    ],
)
def test_damaged_head_configs_are_named(tmp_path, changes, message):
    folder = saved(tmp_path, head_of("small markov"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_head(folder)
    assert str(caught.value).startswith(str(folder))


def test_int8_without_its_scales_is_named(tmp_path):
    folder = saved(tmp_path, head_of("small markov"), dtype="int8")
    tensors = load_file(folder / "model.safetensors")
    del tensors["w1.weight.scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w1\.weight is int8, but its scales"):
        read_head(folder)


def test_storage_in_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='must be a torch dtype or "int8"'):
        write_head(tmp_path / "x", head_of("markov"), dtype="int4")


def test_a_head_of_another_backbone_is_told_what_differs():
    small, whole, flash = (head_of(form) for form in ("small markov", "confident markov", "treeflash"))
    assert incompatibilities(whole, H, len(KEPT), V) == []
    assert incompatibilities(small, 64, 9, 50) == ["size 8 is not the draft vocabulary's size 9"]
    assert len(incompatibilities(whole, 64, 9, 50)) == 3
    assert incompatibilities(flash, 64, 8, 48) == ["hidden_size 32 is not the backbone's hidden size 64"]


# Published files


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"logit_head.{name}",
        lambda name: name.replace("embed_proj.", "logit_head."),
    ],
)
@torch.no_grad()
def test_older_names_of_dominos_tensors_are_read(backbone, rename):
    tensors, (states, previous) = published_head("domino", len(KEPT)), block()
    head = read_published("domino", SETTINGS, {rename(name): t for name, t in tensors.items()})
    expected = published_forward("domino", tensors, backbone, states, previous)
    torch.testing.assert_close(head(backbone, states, previous), expected, rtol=1e-4, atol=1e-3)


def test_a_domino_config_that_names_no_pure_prefix_has_none():
    assert (
        read_published("domino", {"dflash_config": {}}, published_head("domino", len(KEPT))).pure_prefix == 0
    )


@pytest.mark.parametrize(
    ("kind", "changes", "settings", "message"),
    [
        (
            "markov",
            {"markov_head.markov_w1.weight": None},
            {},
            "Markov head lacks markov_head.markov_w1.weight",
        ),
        ("markov", {"confidence_head.proj.bias": None}, {}, "Markov head lacks confidence_head.proj.bias"),
        (
            "markov",
            {"markov_head.gate.weight": torch.zeros(1)},
            {},
            "unknown tensors markov_head.gate.weight",
        ),
        (
            "treeflash",
            {"ar_approximation.norm.weight": None},
            {},
            "TreeFlash head lacks ar_approximation.norm",
        ),
        ("treeflash", {"ar_approximation.ug.bias": torch.zeros(9)}, {}, r"ug.bias is \[9\], not \[48\]"),
        ("domino", {"prefix_gru.weight_hh_l0": None}, {}, "Domino head lacks prefix_gru.weight_hh_l0"),
        ("domino", {"embed_proj.0.weight": torch.zeros(R, 3)}, {}, r"0.weight is \[6, 3\], not \[6, 44\]"),
        ("domino", {}, {"gru_hidden_dim": 11}, "gru_hidden_dim=11"),
        ("domino", {}, {"emb_dim": 7}, "emb_dim=7"),
        ("domino", {}, {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len=-1"),
        ("domino", {}, {"pure_draft_prefix_len": "one"}, "whole number"),
    ],
)
def test_parts_of_a_published_head_that_do_not_fit_together_are_named(kind, changes, settings, message):
    tensors = {name: t for name, t in {**published_head(kind, len(KEPT)), **changes}.items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        read_published(kind, {"dflash_config": settings}, tensors)
