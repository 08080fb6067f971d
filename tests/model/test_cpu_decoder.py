"""The lean decoder: the bits of the model's own forward, and the model's own forward where it must step aside."""

import copy

import pytest
import torch

import tiny
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.engine.engine import Engine
from ddtree.model import attention, cpu_decoder
from ddtree.model.packed_weights import computes, suits
from ddtree.model.target import Target
from ddtree.tree import DraftTree
from driving import answered, greedy

pytestmark = pytest.mark.skipif(
    not suits(torch.device("cpu"), torch.bfloat16), reason="weights are packed on x86 alone"
)
native = pytest.mark.skipif(not computes(torch.bfloat16), reason="this core has no bfloat16 arithmetic")
LEAN = ["llama", "mistral", "qwen2", "qwen3"]


def model_of(family="llama", **changes):
    return tiny.model(family, **changes).to(torch.bfloat16)


def tree(rows=1):
    return DraftTree(
        torch.tensor([[5, 6, 7, 8, 9]]).repeat(rows, 1),
        torch.tensor([[0, 0, 0, 1, 3]]).repeat(rows, 1),
        torch.tensor([[0, 1, 1, 2, 3]]).repeat(rows, 1),
        torch.zeros(rows, 5),
        [5] * rows,
    )


def forwards(target, lengths=(40,), chunk=16):
    """Logits and features of prompts in chunks, of a tree after each, and of a lone root."""
    target.use_features((0, 1))
    cache, found = target.new_cache(), []
    for seed, length in enumerate(lengths):
        for _, forward in target.prefill(
            cache, cache.add_row(), tiny.prompt(length, seed), chunk, every=True
        ):
            found += [forward.logits, forward.features]
    roots = [DraftTree.root([5] * len(lengths), "cpu"), tree(len(lengths))]
    for one in roots:
        forward = target.verify(cache, one)
        found += [forward.logits, forward.features]
    return found


@native
@pytest.mark.parametrize("lengths", [(40,), (3, 70, 300)])
@pytest.mark.parametrize("family", LEAN)
def test_every_bit_is_that_of_the_models_own_forward(family, lengths):
    model = model_of(family)
    plain, lean = Target(model), Target(model, pack=True)
    assert lean._decoder is not None
    for chunk in (16, 512):
        for ours, theirs in zip(forwards(lean, lengths, chunk), forwards(plain, lengths, chunk), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["gemma3", "olmo", "phi3", "gpt_oss"])
def test_other_families_run_their_own_forward_on_packed_weights(family):
    model = model_of(family)
    target = Target(model, pack=True)
    assert target._decoder is None and target._packed is not None and target._packed.bytes
    if computes(torch.bfloat16):
        for ours, theirs in zip(forwards(target), forwards(Target(model)), strict=True):
            assert torch.equal(ours, theirs)


def test_a_replaced_part_is_not_taken_for_the_familys_own():
    class Own(torch.nn.SiLU):
        def forward(self, x):
            return super().forward(x) + 1

    model = model_of()
    model.model.layers[1].mlp.act_fn = Own()
    target = Target(model, pack=True)
    assert target._decoder is None
    assert all(map(torch.equal, forwards(target), forwards(Target(model))))


def test_a_decoder_whose_bits_differ_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_decoder, "_norm", lambda module, x: torch.zeros_like(x))
    model = model_of()
    target = Target(model, pack=True)
    assert target._decoder is None and target._packed is not None


def test_a_hook_of_the_users_counts_from_the_next_forward_on():
    model = model_of()
    target = Target(model, pack=True)
    assert target._decoder is not None
    before = forwards(target)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    hooked = forwards(target)
    assert not torch.equal(hooked[-2], before[-2])
    assert all(map(torch.equal, hooked, forwards(Target(model))))
    handle.remove()
    assert all(map(torch.equal, forwards(target), before))


def test_a_forward_that_is_replaced_counts_from_the_next_one_on():
    model = model_of()
    target = Target(model, pack=True)
    assert target._decoder is not None
    before = forwards(target)
    part = model.model.layers[1].mlp
    part.forward = lambda x: type(part).forward(part, x) * 2
    replaced = forwards(target)
    assert not torch.equal(replaced[-2], before[-2])
    assert all(map(torch.equal, replaced, forwards(Target(model))))


def _scaled(module):
    with torch.no_grad():
        next(module.parameters()).mul_(2)


def _replaced(model, name):
    parent, _, own = name.rpartition(".")
    fresh = copy.deepcopy(model.get_submodule(name))
    _scaled(fresh)
    setattr(model.get_submodule(parent), own, fresh)


CHANGES = {
    "weight": lambda model: _scaled(model.model.layers[0].mlp.down_proj),
    "bias": lambda model: model.model.layers[0].self_attn.o_proj.bias.add_(1),
    "norm": lambda model: _scaled(model.model.norm),
    "head": lambda model: _replaced(model, "lm_head"),
    "embedding": lambda model: _replaced(model, "model.embed_tokens"),
    "part": lambda model: _replaced(model, "model.layers.1.mlp"),
    "order": lambda model: model.model.layers.insert(1, model.model.layers.pop(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_after_loading_is_followed(change):
    model = model_of(attention_bias=True)
    target = Target(model, pack=True)
    before = forwards(target)[-2]
    with torch.no_grad():
        CHANGES[change](model)
    changed = forwards(target)[-2]
    assert not torch.equal(changed, before)
    assert torch.equal(changed, forwards(Target(model))[-2])


def test_two_targets_on_one_model_both_stay_lean(monkeypatch):
    model = model_of()
    one, other = Target(model, feature_layers=(0,), pack=True), Target(model, feature_layers=(1,), pack=True)

    def never(*_, **__):
        raise AssertionError("the model's own forward ran")

    monkeypatch.setattr(attention, "using", never)
    assert len(forwards(one)) == len(forwards(other)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_packed_unless_asked_nor_in_float32(dtype):
    model = tiny.model().to(dtype)
    assert Target(model)._packed is None
    assert (Target(model, pack=True)._packed is None) == (dtype == torch.float32)


@native
def test_texts_and_trees_are_those_without_packing():
    model, drafted = model_of(), []
    asked = [(tiny.prompt(length), greedy()) for length in (7, 30)]
    for pack in (False, True):
        target = Target(model, pack=pack)
        drafter = DFlash(Backbone(tiny.network(model), target))
        assert ("forward" in vars(drafter.backbone.network.fc)) == pack
        engine, trees = Engine(target, drafter), []
        engine.listener = lambda one, trees=trees: trees.append(one.tree.tokens.tolist())
        drafted.append(([one.tokens for one in answered(engine, *asked)], trees))
    assert drafted[0] == drafted[1]
    assert drafted[1][0] == [one.tokens for one in answered(Engine(Target(model)), *asked)]
