"""Packed weights: the same bits, copies that follow their weights, and a model that is left as it was."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import tiny
from ddtree.model import packed_weights
from ddtree.model.packed_weights import PackedProduct, PackedWeights, pack, pack_own, products_of, suits

pytestmark = pytest.mark.skipif(
    not suits(torch.device("cpu"), torch.bfloat16), reason="weights are packed on x86 alone"
)
native = pytest.mark.skipif(
    not packed_weights.computes(torch.bfloat16), reason="this core has no bfloat16 arithmetic"
)


def linear(inputs, outputs, dtype=torch.bfloat16, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def rows(count, width, dtype=torch.bfloat16):
    return torch.randn((1, count, width), generator=torch.Generator().manual_seed(count)).to(dtype)


@native
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 31, 40, 300])
def test_layers_side_by_side_have_the_bits_of_each_alone(count, bias):
    layers = [linear(64, size, bias=bias, seed=size) for size in (96, 32, 48)]
    product, x = pack(*layers), rows(count, 64)
    assert product is not None
    with torch.inference_mode():
        assert torch.equal(product(x), torch.cat([layer(x) for layer in layers], dim=-1))
        assert torch.equal(product.part(1, x), layers[1](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_such_arithmetic_a_float32_copy_rounds_once_and_knows_no_neighbours(dtype, monkeypatch):
    monkeypatch.setattr(packed_weights, "computes", lambda dtype: False)
    layer, x = linear(64, 96, dtype), rows(40, 64, dtype)
    product = pack(layer)
    assert product is not None and product.bytes == 64 * 96 * 4
    with torch.inference_mode():
        whole = product(x)
        exact = (x.double() @ layer.weight.double().T).to(dtype)
        assert (whole == exact).double().mean() > 0.98
        assert all(torch.equal(product(x[:, at : at + 1]), whole[:, at : at + 1]) for at in range(40))


def test_a_shape_whose_bits_differ_is_not_packed(monkeypatch):
    layer = linear(64, 80)
    monkeypatch.setattr(packed_weights, "_exact", {})
    monkeypatch.setattr(PackedProduct, "is_exact", lambda self: False)
    assert pack(layer) is None


def test_processors_on_which_it_was_not_measured_run_plainly(monkeypatch):
    monkeypatch.setattr(packed_weights.platform, "machine", lambda: "aarch64")
    assert pack(linear(64, 120)) is None


def test_a_machine_without_the_kernels_runs_plainly(monkeypatch):
    def missing(*_):
        raise RuntimeError("no such kernel")

    layer = linear(64, 112)
    monkeypatch.setattr(PackedProduct, "__init__", missing)
    assert pack(layer) is None


@pytest.mark.parametrize(
    "layers",
    [
        [linear(64, 32, torch.float32)],
        [linear(64, 32), linear(32, 32)],
        [linear(64, 32), linear(64, 32, bias=True)],
        [nn.Embedding(4, 4)],
        [nn.Linear(64, 32, device="meta", dtype=torch.bfloat16)],
    ],
    ids=["float32", "widths", "bias", "kind", "device"],
)
def test_what_cannot_be_packed_is_told_by_none(layers):
    assert pack(*layers) is None


def test_a_layer_used_twice_has_one_copy_until_its_weight_changes():
    layer = linear(64, 32)
    first = pack(layer)
    assert pack(layer) is first is not None
    with torch.no_grad():
        layer.weight.mul_(2)
    second = pack(layer)
    assert second is not first
    assert torch.equal(second(rows(3, 64)), layer(rows(3, 64)))


def test_copies_go_with_those_who_use_them():
    layer = linear(64, 32)
    product = pack(layer)
    gone = [weakref.ref(layer), weakref.ref(product)]
    del layer, product
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_module_runs_on_its_copies_inside_the_block_only():
    model = tiny.model().to(torch.bfloat16)
    before = {name: vars(part).copy() for name, part in model.named_modules()}
    packed = PackedWeights(products_of(model))
    layer = model.model.layers[0].mlp.up_proj
    with packed:
        assert isinstance(layer.forward, PackedProduct)
    assert {name: vars(part) for name, part in model.named_modules()} == before
    assert packed.bytes == packed_weights.packed_bytes(model) > 0
    with torch.no_grad():
        layer.weight.add_(1)
    assert not packed.current


def test_too_little_memory_leaves_the_weights_as_they_are_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(packed_weights, "available_bytes", lambda device: 1000)
    model = tiny.model().to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        pack_own(model)
    assert "runs on its weights as they are" in caplog.text
    assert not any("forward" in vars(part) for part in model.modules())
