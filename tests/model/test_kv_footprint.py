"""What rows of a cache will come to, told before they are there."""

import pytest
import torch

import tiny
from ddtree.model.kv_cache import KVCache, KVFootprint, token_bytes
from ddtree.model.target import Target

# Two layers of keys and values, one head of 4 floats.
TOKEN = 2 * 2 * 4 * 4


def footprint(**changes):
    return KVFootprint(
        **{"cache": KVCache(1000, 2), "measure": lambda: TOKEN, "spare": 10, "longest": 900, **changes}
    )


@torch.inference_mode()
def fill(cache, rows, columns):
    for row in range(rows):
        cache.add_row()
        cache.open(row, row + 1, columns)
        for layer in range(2):
            cache.update(torch.ones(1, 1, columns, 4), torch.ones(1, 1, columns, 4), layer)
        cache.commit([list(range(columns))])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 246), (2, 247), (3, 300), (5, 600), (1, 900)])
def test_bytes_are_those_of_buffers_that_grew_to_it(rows, tokens):
    own = footprint()
    fill(own.cache, rows, tokens + own.spare)
    stored = sum(stack.untyped_storage().nbytes() for stack in own.cache._stacks)
    assert own.bytes(rows, tokens) == own.cache.reserved_bytes == stored
    assert own.token == own.cache.token_bytes


def test_a_row_keeps_no_more_tokens_than_it_can_and_what_is_kept_beside_them():
    assert footprint(longest=40).bytes(1, 800) == footprint().bytes(1, 40)
    assert footprint(row=7).bytes(3, 40) == footprint().bytes(3, 40) + 3 * 7


def test_the_size_of_a_token_is_asked_for_once():
    asked = []
    own = footprint(measure=lambda: asked.append(1) or TOKEN)
    assert not asked
    assert own.bytes(1, 1) < own.bytes(2, 1)
    assert len(asked) == 1


def test_shrunk_buffers_grow_to_what_was_told():
    own = footprint()
    fill(own.cache, 1, 600)
    own.cache.drop_row(0)
    own.shrink_to(4, 100)
    fill(own.cache, 4, 110)
    assert own.cache.reserved_bytes == own.bytes(4, 100) == 4 * 256 * TOKEN


def test_slack_leaves_the_buffers_alone():
    own = footprint()
    fill(own.cache, 1, 600)
    own.cache.drop_row(0)
    own.shrink_to(1, 100, slack=800 * TOKEN)
    assert own.cache.capacity == 1000


@pytest.mark.parametrize(("family", "size"), [("llama", 2 * 2 * 2 * 8 * 4), ("gemma3", 2 * 2 * 2 * 8 * 4)])
def test_a_targets_token_is_measured(family, size):
    assert token_bytes(Target(tiny.model(family))) == size
