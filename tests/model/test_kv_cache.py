"""The cache: rows, growth and commits in place."""

import pytest
import torch

from ddtree.errors import CacheMemoryError
from ddtree.model import kv_cache as cache_module
from ddtree.model.kv_cache import KVCache


def columns(rows, values):
    """Keys [R, 2, n, 3] whose entries tell the column they stand for."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(rows, 2, len(values[0]), 3)


def append(cache, start, stop, values):
    cache.open(start, stop, len(values[0]))
    keys, _ = cache.update(columns(stop - start, values), columns(stop - start, values), 0)
    return keys


def contents(cache, row):
    return cache._buffers[0][row, 0, : cache.lengths[row], 0].tolist()


def test_commit_moves_the_accepted_path_to_the_front_and_forgets_the_rest():
    cache = KVCache(64)
    cache.add_row()
    append(cache, 0, 1, [[1, 2, 3, 4, 5]])
    cache.commit([[0, 2, 4]])
    append(cache, 0, 1, [[6, 7]])
    cache.commit([[0]])
    assert contents(cache, 0) == [1, 3, 5, 6]


def test_a_contiguous_path_copies_nothing(monkeypatch):
    cache = KVCache(64)
    cache.add_row()
    append(cache, 0, 1, [[1, 2, 3, 4]])
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("an index was built"))
    cache.commit([[0, 1, 2]])
    assert contents(cache, 0) == [1, 2, 3]


def test_ragged_rows_append_behind_their_own_tokens():
    cache = KVCache(64)
    for row, values in enumerate([[1, 2, 3], [4]]):
        cache.add_row()
        append(cache, row, row + 1, [values])
        cache.commit([list(range(len(values)))])
    keys = append(cache, 0, 2, [[10, 11], [20, 21]])
    assert keys.shape == (2, 2, 5, 3)
    cache.commit([[0, 1], [1]])
    assert contents(cache, 0) == [1, 2, 3, 10, 11]
    assert contents(cache, 1) == [4, 21]


def test_dropping_a_row_moves_the_last_one_into_its_place():
    cache = KVCache(64)
    for row, values in enumerate([[1, 2], [3], [5, 6, 7]]):
        cache.add_row()
        append(cache, row, row + 1, [values])
        cache.commit([list(range(len(values)))])
    cache.drop_row(0)
    assert cache.rows == 2
    assert contents(cache, 0) == [5, 6, 7]
    assert contents(cache, 1) == [3]


def test_growth_keeps_contents_and_stays_linear_in_tokens(monkeypatch):
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 4)
    cache = KVCache(1000)
    cache.add_row()
    for value in range(100):
        append(cache, 0, 1, [[value]])
        cache.commit([[0]])
    assert contents(cache, 0) == list(range(100))
    assert cache._buffers[0].shape[2] <= 2 * 100


def test_capacity_never_exceeds_what_a_row_may_need(monkeypatch):
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 4)
    cache = KVCache(10)
    cache.add_row()
    append(cache, 0, 1, [list(range(9))])
    cache.commit([list(range(9))])
    assert cache._buffers[0].shape[2] == 10


def test_a_cache_that_does_not_fit_says_how_much_is_missing(monkeypatch):
    cache = KVCache(10**9)
    cache.add_row()
    append(cache, 0, 1, [[1]])
    cache.commit([[0]])
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
