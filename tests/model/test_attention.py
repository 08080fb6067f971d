"""Attention: in half precision on the CPU a query's result does not depend on what stands beside it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tiny
from ddtree.errors import UnsupportedModelError
from ddtree.model import attention
from ddtree.model.attention import Visibility

HEADS, GROUPS, SIZE = 2, 3, 64


def attend(query, keys, values, visible):
    positions = torch.zeros(1, query.shape[2], dtype=torch.int64)
    seen = Visibility(visible, positions, positions, query.dtype)
    out, _ = attention.attention(nn.Module(), query, keys, values, None, **{attention.KWARG: seen})
    return out


def moved_key(past, nodes, dtype):
    """One query's result with its own key next to the past, and with it behind the hidden keys of `nodes` others."""
    generator = torch.Generator().manual_seed(past + nodes)

    def random(heads, n):
        return torch.randn(1, heads, n, SIZE, generator=generator).to(dtype)

    query, keys, values = (
        random(HEADS * GROUPS, nodes),
        random(HEADS, past + nodes),
        random(HEADS, past + nodes),
    )
    visible = torch.zeros(1, nodes, past + nodes, dtype=torch.bool)
    visible[..., :past] = True
    visible[0, 0, -1] = True
    far = attend(query, keys, values, visible)[:, :1]
    near = [torch.cat([x[:, :, :past], x[:, :, -1:]], dim=2) for x in (keys, values)]
    return far, attend(query[:, :, :1], *near, None)


CASES = [(past, nodes) for past in (40, 130, 300, 700) for nodes in (2, 9, 17, 33)]


def share_equal(dtype):
    pairs = [moved_key(past, nodes, dtype) for past, nodes in CASES]
    return sum((far == near).double().mean().item() for far, near in pairs) / len(pairs)


def test_where_a_key_lies_hardly_ever_changes_the_result():
    assert share_equal(torch.bfloat16) > 0.999


def test_the_fused_kernel_changes_it_more_often(monkeypatch):
    steady = share_equal(torch.bfloat16)
    monkeypatch.setattr(attention, "needs_steadying", lambda device, dtype: False)
    assert 1 - share_equal(torch.bfloat16) > 5 * (1 - steady)


def test_steady_attention_is_attention():
    query, keys, values = (torch.randn(1, h, 20, SIZE).bfloat16() for h in (HEADS * GROUPS, HEADS, HEADS))
    visible = torch.ones(20, 20, dtype=torch.bool).tril()[None]
    repeated = [x.repeat_interleave(GROUPS, dim=1).float() for x in (keys, values)]
    exact = nn.functional.scaled_dot_product_attention(query.float(), *repeated, attn_mask=visible[:, None])
    ours = attend(query, keys, values, visible).transpose(1, 2).float()
    torch.testing.assert_close(ours, exact, atol=1e-2, rtol=1e-2)


def in_another_thread(call):
    """Return the exception that a call raises in a thread of its own, or None."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception(30)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_other_code_that_runs_the_model_meanwhile_is_told_what_to_do(family):
    model = tiny.model(family)
    ids = torch.tensor([tiny.prompt(6)])
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for inputs in ({}, {"attention_mask": torch.ones_like(ids)}):
        with attention.using(configs):
            error = in_another_thread(lambda given=inputs: model(ids, **given))
        assert isinstance(error, UnsupportedModelError)
        assert "is running this model object in another thread: load the model twice" in str(error)
        assert in_another_thread(lambda given=inputs: model(ids, **given)) is None


def test_a_model_that_hands_no_visibility_on_is_named_in_its_own_thread():
    states = torch.zeros(1, 2, 3, 4)
    with (
        attention.using([]),
        pytest.raises(UnsupportedModelError, match="Module does not forward keyword arguments"),
    ):
        attention.attention(nn.Module(), states, states, states, None)


def test_a_key_is_seen_when_it_is_committed_or_an_ancestor():
    """Two rows of 3 and 1 committed tokens; the tree is a root with two children, in 7 columns."""
    columns = attention.uncommitted_columns([3, 1], 3, torch.device("cpu"))
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    seen = attention.visible_keys(columns, tree, 7).int().tolist()
    assert seen[0] == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0]]
    assert seen[1] == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]


def test_siblings_share_a_position():
    columns = attention.uncommitted_columns([3, 1], 3, torch.device("cpu"))
    positions = torch.tensor([[3, 4, 4], [1, 2, 2]])
    assert attention.key_positions(columns, positions, 7).tolist() == [
        [0, 1, 2, 3, 4, 4, 6],
        [0, 1, 2, 2, 4, 5, 6],
    ]


def test_a_chunk_sees_itself_and_what_is_pending_before_it():
    assert attention.chain_mask(2, torch.device("cpu"), pending=1).int().tolist() == [[1, 1, 0], [1, 1, 1]]
