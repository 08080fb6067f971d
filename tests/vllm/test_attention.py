"""Attention over paged keys and values, against the plain formula; slots that move."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm import tree_attention as attention
from ddtree.integrations.vllm.request_state import StepRow, as_scheduled
from ddtree.tree import DraftTree

HEADS, KEPT, SIZE, BLOCK = 6, 2, 32, 32
TREE = DraftTree(
    torch.tensor([[5, 6, 7, 8, 9, 10]]),
    torch.tensor([[0, 0, 0, 1, 3, 2]]),
    torch.tensor([[0, 1, 1, 2, 3, 2]]),
    -torch.tensor([[0.0, 1, 1, 2, 3, 2]]),
    [6],
)


def written(lengths, dtype=torch.float32, seed=0):
    """A cache of several texts in scattered blocks; keys and values [length, KEPT, SIZE] of each; the block table."""
    torch.manual_seed(seed)
    blocks = torch.randperm(40)[: len(lengths) * 5].view(len(lengths), 5)
    cache = torch.zeros((40, KEPT, BLOCK, 2 * SIZE), dtype=dtype)
    texts = []
    for row, length in enumerate(lengths):
        key, value = (torch.randn(length, KEPT, SIZE).to(dtype) for _ in range(2))
        places = torch.arange(length)
        slots = blocks[row, places // BLOCK] * BLOCK + places % BLOCK
        halves = cache.view(40, KEPT, 2 * BLOCK, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, *halves, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        texts.append((key, value))
    return cache, texts, blocks


def plain(query, key, value, base, parents):
    """Node by node: softmax over what it sees."""
    out = []
    for node in range(len(parents)):
        seen, at = [], node
        while True:
            seen.append(base + at)
            if at == 0:
                break
            at = parents[at]
        columns = torch.tensor([*range(base), *seen])
        heads = []
        for head in range(HEADS):
            own = head // (HEADS // KEPT)
            scores = key[columns, own].double() @ query[node, head].double() * 0.2
            heads.append(scores.softmax(dim=0) @ value[columns, own].double())
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("bases", [[7], [70], [7, 70], [60, 61, 3], [0, 120]])
def test_each_node_sees_the_text_and_its_ancestors(bases):
    trees = [TREE if row % 2 == 0 else as_scheduled(TREE, 5, [6, 7, 8]) for row in range(len(bases))]
    check(bases, trees, torch.float32, 1e-5)


def test_in_half_precision():
    check([33, 70], [TREE, TREE], torch.bfloat16, 2e-2)


def check(bases, trees, dtype, tolerance):
    lengths = [base + tree.sizes[0] for base, tree in zip(bases, trees, strict=True)]
    cache, texts, table = written(lengths, dtype)
    rows, start = [], 3
    for index, (base, tree) in enumerate(zip(bases, trees, strict=True)):
        rows.append(StepRow(None, index, start, 0, base, tree))
        start += tree.sizes[0] + 1
    query = torch.randn(start, HEADS, SIZE).to(dtype)
    out = torch.full_like(query, 7.0)
    for batch in attention.batches(rows, table, BLOCK):
        out[batch.places] = attention.attend(query, cache, batch, 0.2)
    touched = torch.zeros(start, dtype=torch.bool)
    for row, (key, value) in zip(rows, texts, strict=True):
        own = slice(row.start, row.start + row.size)
        touched[own] = True
        expected = plain(query[own], key, value, row.base, row.tree.parents[0].tolist())
        assert (out[own].double() - expected).abs().max() < tolerance
    assert (out[~touched] == 7.0).all()


def test_slots_move_all_at_once():
    cache, [(key, value)], table = written([40])
    before = cache.clone()
    slots = table[0, torch.arange(40) // BLOCK] * BLOCK + torch.arange(40) % BLOCK
    attention.move(cache, slots[[31, 33, 32]], slots[[30, 31, 32]])
    keys, values = attention.keys_of(cache), attention.values_of(cache)
    for place, source in enumerate([*range(30), 31, 33, 32, *range(33, 40)]):
        block, at = int(slots[place]) // BLOCK, int(slots[place]) % BLOCK
        assert torch.equal(keys[block, :, :, at], key[source])
        assert torch.equal(values[block, :, at], value[source])
    assert not torch.equal(before, cache)


def test_another_order_in_the_cache_is_refused(monkeypatch):
    cache = torch.zeros((4, KEPT, BLOCK, 2 * SIZE))
    attention.check_layout(cache, "vec")
    monkeypatch.setattr(attention, "keys_of", lambda kv: attention.values_of(kv).transpose(2, 3))
    with pytest.raises(UnsupportedModelError, match="vec"):
        attention.check_layout(cache, "vec")
