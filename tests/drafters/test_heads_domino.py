"""Domino's head: whole paths and single steps agree, mixed precision, and the published layout."""

import pytest
import torch

from ddtree.drafters.dflash.heads import Domino, public
from ddtree.errors import CheckpointError, ConfigError

H, VD, V = 16, 12, 20


class Trunk:
    """A backbone's and target's parts, random; the draft vocabulary is every target token below Vd."""

    size = VD

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(5)
        self._embedding = torch.randn(V, H).to(dtype)
        self._head = torch.randn(VD, H).to(dtype)

    def embed(self, tokens):
        return self._embedding[tokens]

    def norm(self, states):
        return torch.nn.functional.rms_norm(states, (H,))

    def logits(self, normed):
        return (normed @ self._head.T).float()

    def index(self, tokens):
        return torch.where(tokens < VD, tokens, -1)

    def tokens(self, index):
        return index


def head_of(pure_prefix=1, seed=0):
    torch.manual_seed(seed)
    head = Domino(H, VD, gru_hidden=10, rank=6, pure_prefix=pure_prefix)
    with torch.no_grad():
        head.outer.normal_()
    return head


def paths(count=7, length=5):
    torch.manual_seed(3)
    return torch.randn(count, length, H), torch.randint(V, (count, length))


def stepwise(head, trunk, states, previous):
    """Logits [A, L, Vd] by one step a depth."""
    normed, out, state = trunk.norm(states), [], None
    inner = head.inner(normed)
    for slot in range(states.shape[1]):
        token = previous[:, slot]
        state = head.start(trunk, token) if state is None else head.step(trunk, state, token)
        base = trunk.logits(normed[:, slot])
        correction = head.hidden(inner[:, slot], state) @ head.outer.T
        out.append(base if slot < head.pure_prefix else base + correction)
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("pure_prefix", [0, 1, 2, 5])
@torch.no_grad()
def test_steps_give_what_whole_paths_give(pure_prefix):
    head, trunk, (states, previous) = head_of(pure_prefix), Trunk(), paths()
    whole = head(trunk, states, previous)
    assert whole.dtype == torch.float32 and whole.shape == (7, 5, VD)
    torch.testing.assert_close(whole, stepwise(head, trunk, states, previous), rtol=0, atol=1e-5)
    base = trunk.logits(trunk.norm(states))
    torch.testing.assert_close(whole[:, :pure_prefix], base[:, :pure_prefix])
    torch.testing.assert_close(head(trunk, states, previous, base), whole)
    corrected = (whole - base).abs().amax(dim=(0, 2)) > 1e-3
    assert corrected.tolist() == [slot >= pure_prefix for slot in range(5)]


@torch.no_grad()
def test_a_slot_depends_on_its_whole_path_and_on_nothing_after_it():
    head, trunk, (states, previous) = head_of(0), Trunk(), paths()
    logits = head(trunk, states, previous)
    for changed in range(5):
        other = previous.clone()
        other[:, changed] = (other[:, changed] + 1) % V
        moved = (head(trunk, states, other) - logits).abs().amax(dim=(0, 2)) > 1e-5
        assert moved.tolist() == [slot >= changed for slot in range(5)]


@torch.no_grad()
def test_untrained_it_changes_nothing():
    trunk, (states, previous) = Trunk(), paths()
    head = Domino(H, VD, pure_prefix=0)
    assert torch.equal(head(trunk, states, previous), trunk.logits(trunk.norm(states)))


def test_it_learns_what_depends_on_the_path():
    trunk, (states, previous) = Trunk(), paths(count=32)
    labels = (previous.cumsum(1) * 7 + 1) % VD
    head = Domino(H, VD, gru_hidden=32, rank=16, pure_prefix=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(
            head(trunk, states, previous).flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("trunk_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_close_to_single_and_has_gradients(trunk_dtype):
    head, (states, previous) = head_of(), paths()
    exact = head(Trunk(), states, previous)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = head(Trunk(trunk_dtype), states.to(trunk_dtype), previous)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=0, atol=0.3)
    mixed.square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())
    assert all(parameter.grad.dtype == torch.float32 for parameter in head.parameters())


@torch.no_grad()
def test_in_bfloat16_it_scores_paths_and_steps():
    head, trunk, (states, previous) = head_of().bfloat16(), Trunk(torch.bfloat16), paths()
    states = states.bfloat16()
    whole = head(trunk, states, previous)
    torch.testing.assert_close(whole, stepwise(head, trunk, states, previous).float(), rtol=0.05, atol=0.3)


def test_its_config_makes_it_again():
    head = head_of(2)
    again = Domino(**head.config())
    again.load_state_dict(head.state_dict())
    assert (
        again.config()
        == head.config()
        == {
            "hidden_size": H,
            "size": VD,
            "gru_hidden": 10,
            "rank": 6,
            "pure_prefix": 2,
        }
    )


@pytest.mark.parametrize("changes", [{"rank": 0}, {"gru_hidden": -1}, {"pure_prefix": -1}])
def test_sizes_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}="):
        Domino(H, VD, **changes)


# The published layout


def published(prefix="", outer="embed_proj."):
    state = head_of().state_dict()
    return {
        prefix + (name if not name.startswith("embed_proj.") else name.replace("embed_proj.", outer)): tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(
    "tensors",
    [
        published(),
        published("draft_model."),
        published("logit_head."),
        published(outer="logit_head."),
        published("model."),
    ],
)
@torch.no_grad()
def test_published_tensors_are_read(tensors):
    config = {
        "block_size": 5,
        "dflash_config": {
            "projector_type": "domino",
            "emb_dim": 6,
            "gru_hidden_dim": 10,
            "pure_draft_prefix_len": 1,
            "shift_label": True,
        },
    }
    head = public(config, {**tensors, "fc.weight": torch.zeros(2, 2)})
    states, previous = paths()
    torch.testing.assert_close(head(Trunk(), states, previous), head_of()(Trunk(), states, previous))
    assert head.config() == head_of().config()


def test_without_a_word_about_it_no_depth_is_the_backbones_alone():
    assert public({"dflash_config": {}}, published()).pure_prefix == 0


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"prefix_gru.weight_hh_l0": None}, {}, "lacks prefix_gru.weight_hh_l0"),
        ({"embed_proj.0.weight": torch.zeros(6, 3)}, {}, r"embed_proj.0.weight is \[6, 3\], not \[6, 26\]"),
        ({}, {"gru_hidden_dim": 11}, "gru_hidden_dim=11"),
        ({}, {"emb_dim": 7}, "emb_dim=7"),
        ({}, {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len=-1"),
        ({}, {"pure_draft_prefix_len": "one"}, "whole number"),
    ],
)
def test_what_does_not_fit_together_is_named(changes, settings, message):
    tensors = {name: t for name, t in {**published(), **changes}.items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        public({"dflash_config": settings}, tensors)
