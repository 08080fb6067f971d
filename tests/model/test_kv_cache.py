"""The cache: rows, growth and commits in place; what rows of it will take, before they are there."""

import pytest
import torch

import tiny
from ddtree.errors import CacheMemoryError
from ddtree.model import kv_cache as cache_module
from ddtree.model.kv_cache import KVCache, KVFootprint, token_bytes
from ddtree.model.target import Target


def columns(rows, values):
    """Keys [R, 2, n, 3] whose entries are the value of the column they stand for."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(rows, 2, len(values[0]), 3)


def append(cache, start, stop, values, pending=0):
    cache.open(start, stop, len(values[0]), pending)
    states = columns(stop - start, values)
    return cache.update(states, states, 0)[0]


def filled(*texts, max_tokens=64):
    """A cache that holds one row for each list of values."""
    cache = KVCache(max_tokens)
    for text in texts:
        row = cache.add_row()
        append(cache, row, row + 1, [text])
        cache.commit([list(range(len(text)))])
    return cache


def contents(cache, row):
    return cache._buffers[0][row, 0, : cache.lengths[row], 0].tolist()


def test_commit_moves_the_accepted_path_to_the_front_and_forgets_the_rest():
    cache = filled([])
    append(cache, 0, 1, [[1, 2, 3, 4, 5]])
    cache.commit([[0, 2, 4]])
    append(cache, 0, 1, [[6, 7]])
    cache.commit([[0]])
    assert contents(cache, 0) == [1, 3, 5, 6]


def test_what_is_not_committed_leaves_no_trace():
    cache = filled([1, 2])
    append(cache, 0, 1, [[7, 8, 9]])
    append(cache, 0, 1, [[3, 4]])
    cache.commit([[0, 1]])
    assert contents(cache, 0) == [1, 2, 3, 4]


def test_a_forward_may_follow_the_pending_columns_of_earlier_ones():
    cache = filled([1], [5])
    append(cache, 0, 2, [[2, 3], [6, 7]])
    keys = append(cache, 0, 2, [[4], [8]], pending=2)
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(RuntimeError, match="pending columns are those of another window"):
        cache.open(0, 1, 1, pending=3)
    cache.commit([[0, 2], [1]])
    assert contents(cache, 0) == [1, 2, 4] and contents(cache, 1) == [5, 7]


def test_a_contiguous_path_copies_nothing(monkeypatch):
    cache = filled([])
    append(cache, 0, 1, [[1, 2, 3, 4]])
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("an index was built"))
    cache.commit([[0, 1, 2]])
    assert contents(cache, 0) == [1, 2, 3]


def test_ragged_rows_append_behind_their_own_tokens():
    cache = filled([1, 2, 3], [4])
    keys = append(cache, 0, 2, [[10, 11], [20, 21]])
    assert keys.shape == (2, 2, 5, 3)
    cache.commit([[0, 1], [1]])
    assert contents(cache, 0) == [1, 2, 3, 10, 11]
    assert contents(cache, 1) == [4, 21]


def test_dropping_a_row_moves_the_last_one_into_its_place():
    cache = filled([1, 2], [3], [5, 6, 7])
    cache.drop_row(0)
    assert cache.rows == 2
    assert contents(cache, 0) == [5, 6, 7]
    assert contents(cache, 1) == [3]


def test_growth_keeps_contents_and_stays_linear_in_tokens(monkeypatch):
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 4)
    cache = filled([], max_tokens=1000)
    for value in range(100):
        append(cache, 0, 1, [[value]])
        cache.commit([[0]])
    assert contents(cache, 0) == list(range(100))
    assert cache.capacity == cache._buffers[0].shape[2] <= 2 * 100


def test_capacity_never_exceeds_what_a_row_may_need(monkeypatch):
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 4)
    assert filled(list(range(9)), max_tokens=10).capacity == 10


def test_a_cache_that_does_not_fit_says_how_much_is_missing(monkeypatch):
    cache = filled([1], max_tokens=10**9)
    monkeypatch.setattr(cache_module, "available_bytes", lambda device: 2**20)
    with pytest.raises(CacheMemoryError, match=r"needs \d+ MiB more, 1 MiB are free; use fewer sequences"):
        cache.open(0, 1, 10**6)
    assert contents(cache, 0) == [1]


@torch.inference_mode()
def test_layers_of_one_shape_share_a_stack_and_others_have_their_own():
    """Heads or head sizes may differ between layers, and more layers may come than were announced."""
    shapes = [(2, 4), (2, 4), (1, 6), (2, 4)]
    states = [torch.randn(1, heads, 5, size) for heads, size in shapes]
    cache = KVCache(1000, layers=2)
    cache.add_row()
    cache.open(0, 1, 5)
    for layer, own in enumerate(states):
        cache.update(own, -own, layer)
    cache.commit([[0, 2, 4]])
    cache.open(0, 1, 500)
    for layer, (heads, size) in enumerate(shapes):
        keys, values = cache.update(torch.zeros(1, heads, 500, size), torch.ones(1, heads, 500, size), layer)
        kept = states[layer][:, :, [0, 2, 4]]
        assert torch.equal(keys[:, :, :3], kept) and torch.equal(values[:, :, :3], -kept)
    copy = KVCache(1000)
    copy.add_row()
    copy.write(0, cache.read(0, 0, 3))
    for own, (keys, values) in zip(states, copy.read(0, 0, 3), strict=True):
        assert torch.equal(keys, own[0][:, [0, 2, 4]]) and torch.equal(values, -keys)


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


def test_shrunk_buffers_grow_to_what_was_told_and_slack_leaves_them_alone():
    own = footprint()
    fill(own.cache, 1, 600)
    own.cache.drop_row(0)
    own.shrink_to(1, 100, slack=800 * TOKEN)
    assert own.cache.capacity == 1000
    own.shrink_to(4, 100)
    fill(own.cache, 4, 110)
    assert own.cache.reserved_bytes == own.bytes(4, 100) == 4 * 256 * TOKEN


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_targets_token_is_measured(family):
    assert token_bytes(Target(tiny.model(family))) == 2 * 2 * 2 * 8 * 4
