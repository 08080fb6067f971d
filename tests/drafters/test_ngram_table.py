import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddtree.drafters import ngram_builder, ngram_table
from ddtree.drafters.ngram_builder import build_table
from ddtree.drafters.ngram_table import LEVELS, NgramTable
from ddtree.errors import CheckpointError, ConfigError

SETTINGS = {"format": ngram_table.FORMAT, "max_order": "5", "beta": "0", "kappa": "1"}


def texts(count, length, vocab, seed=0):
    rng = np.random.default_rng(seed)
    # Squared, so that some tokens are frequent and others rare.
    return [(rng.random(length) ** 2 * vocab).astype(int).tolist() for _ in range(count)]


def counted(sequences, max_order):
    """Successor counts of every context, the plain way."""
    counts = defaultdict(Counter)
    for sequence in sequences:
        for at in range(1, len(sequence)):
            for order in range(1, min(max_order, at) + 1):
                counts[tuple(sequence[at - order : at])][sequence[at]] += 1
    return counts


def near(number):
    """To the nearest level."""
    return pytest.approx(number, rel=0.046)


def check_counts(table, counts, max_successors=64, whole=True):
    """Each context that the table knows has the plain counts, to the nearest level; returns how many it knows.

    Args:
        whole: all successors are there.
    """
    known = 0
    for context, expected in counts.items():
        found = table.successors(context)
        if found is None:
            continue
        known += 1
        assert found.total == near(expected.total())
        assert found.different == near(min(len(expected), 64))
        assert found.known == sum(found.counts) <= found.total
        assert len(set(found.tokens)) == len(found.tokens) <= max_successors
        assert all(near(expected[token]) == n for token, n in zip(found.tokens, found.counts, strict=True))
        assert found.counts == sorted(found.counts, reverse=True)
        if whole:
            assert found.counts == [near(n) for n in sorted(expected.values(), reverse=True)[:max_successors]]
    assert known == table.contexts
    return known


def test_levels_are_exact_where_they_are_small_and_near_everywhere():
    assert LEVELS[:23] == list(range(1, 24)) and LEVELS[-1] >= 2**32
    assert len(LEVELS) == 256
    assert all(low < high <= max(low + 1, low * 1.09) for low, high in pairwise(LEVELS))


@pytest.mark.parametrize("max_order", [1, 3, 5])
@pytest.mark.parametrize("vocab", [7, 300, 70_000])
def test_counts_are_those_of_a_plain_counter(tmp_path, vocab, max_order):
    sequences = [*texts(6, 300, vocab), [5], []]
    table = build_table(sequences, tmp_path / "t.safetensors", max_order=max_order)
    counts = counted(sequences, max_order)
    assert check_counts(table, counts) == len(counts)
    assert table.vocab_size == 1 + max(map(max, filter(None, (s[:] for s in sequences))))
    assert table.max_order == max_order


def test_no_ngram_crosses_from_one_text_to_the_next(tmp_path):
    table = build_table([[1, 2, 3], [4, 5, 6]], tmp_path / "t.safetensors")
    assert table.successors([3]) is None
    assert table.successors([2, 3, 4]) is None
    assert table.successors([4, 5]).tokens == [6]


def test_a_context_never_seen_is_unknown(tmp_path):
    table = build_table(texts(3, 200, 9), tmp_path / "t.safetensors")
    assert table.successors([9]) is None
    assert table.successors([1, 10, 1]) is None


FIXED = 4 * (2**16 + 1) + 1024
"""Bytes of a table that knows nothing, at most."""


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_smaller_table_fits_and_its_counts_are_true(tmp_path, share):
    sequences = texts(20, 500, 60)
    whole = tmp_path / "whole.safetensors"
    build_table(sequences, whole)
    limit = FIXED + int((whole.stat().st_size - FIXED) * share)
    small = tmp_path / "small.safetensors"
    table = build_table(sequences, small, max_bytes=limit)
    assert (limit - FIXED) * 0.5 < small.stat().st_size - FIXED
    assert small.stat().st_size <= limit
    assert check_counts(table, counted(sequences, 5), whole=False) > 0


def test_contexts_go_first_whose_shorter_suffix_says_the_same(tmp_path):
    # 3 comes after 2 whatever stood before; what comes after 5 depends on what stood before it.
    sequences = [text for text in ([0, 2, 3], [1, 2, 3], [4, 5, 6], [8, 5, 7]) for _ in range(20)]
    whole = tmp_path / "whole.safetensors"
    build_table(sequences, whole)
    size = 1024 + sum(array.nbytes for array in load_file(whole).values())
    table = build_table(sequences, tmp_path / "t.safetensors", max_bytes=size - 12)
    lost = [
        context for context in ([2], [5], [0, 2], [1, 2], [4, 5], [8, 5]) if not table.successors(context)
    ]
    assert lost == [[0, 2], [1, 2]]


def test_what_is_kept_is_worth_its_bytes():
    """The gains by their formula, and theta's two conditions, counted from the start."""
    sequences = texts(6, 400, 12)
    text, lengths = ngram_builder._concatenated(sequences)
    counts, unigram = counted(sequences, 3), Counter(token for s in sequences for token in s)
    frequencies = {token: n / unigram.total() for token, n in unigram.items()}

    def chance(context, token):
        if not context:
            return frequencies[token]
        seen = counts[context]
        doubt = 4 * len(seen)
        return (seen[token] + doubt * chance(context[1:], token)) / (seen.total() + doubt)

    orders = ngram_builder._count_orders(text, lengths, 3, 255)
    for order, found in enumerate(orders, 1):
        expected = {
            (context, token): max(
                0,
                (seen.total() - 0.5)
                * (p := chance(context, token))
                * math.log(p / chance(context[1:], token)),
            )
            for context, seen in counts.items()
            if len(context) == order
            for token in seen
        }
        assert sorted(found.gains.tolist()) == pytest.approx(sorted(expected.values()), rel=1e-3, abs=1e-4)
        theta = float(np.median(found.gains)) / 3
        worth = {}
        for (context, _), gain in expected.items():
            if gain >= 3 * theta:
                worth[context] = worth.get(context, 0.0) + gain - 3 * theta
        kept = found.prune(theta, 3)
        assert len(kept.keys) == sum(own >= 5 * theta for own in worth.values())
        assert found.file_bytes(theta, 3) == 5 * len(kept.keys) + 3 * len(kept.tokens)


def test_only_the_most_frequent_successors_are_kept(tmp_path):
    sequences = texts(4, 500, 40)
    table = build_table(sequences, tmp_path / "t.safetensors", max_successors=3)
    check_counts(table, counted(sequences, 5), max_successors=3)


def test_counts_beyond_16_bits_are_kept(tmp_path):
    table = build_table([[1] * 70_000], tmp_path / "t.safetensors", max_order=2)
    assert table.successors([1, 1]).counts == [near(69_998)]


def test_nothing_counted_gives_a_table_that_knows_nothing(tmp_path):
    table = build_table([], tmp_path / "t.safetensors")
    assert table.contexts == 0
    assert table.successors([1]) is None


def test_contexts_that_collide_share_an_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_table, "MULTIPLIER", 1)  # now every context has key 0
    table = build_table(texts(3, 100, 9), tmp_path / "t.safetensors")
    assert table.contexts == 1
    assert table.successors([1, 2]).total == near(3 * 99)
    assert table.successors([1, 2]) == table.successors([7])


def test_what_was_found_before_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_table, "_REMEMBERED", 3)
    sequences = texts(3, 200, 9)
    table, counts = build_table(sequences, tmp_path / "t.safetensors"), counted(sequences, 5)
    for _ in range(2):
        assert check_counts(table, counts) == len(counts)
    word = ngram_table.extend_hash(0, sequences[0][0])
    assert len(table.find(word, 2).tokens) == 2 < len(table.find(word).tokens)


def test_a_table_is_memory_mapped(tmp_path):
    path = tmp_path / "t.safetensors"
    table = build_table(texts(8, 500, 60), path)
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        pytest.skip("this system does not tell what is mapped")
    assert str(path) in maps
    assert table.contexts


def saved(tmp_path):
    path = tmp_path / "t.safetensors"
    build_table(texts(3, 200, 20), path)
    return path


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no n-gram table at .*none\.safetensors: build one"):
        NgramTable.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_cut_table_is_named(tmp_path, size):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"t\.safetensors is damaged: .*build it again"):
        NgramTable.load(path)


def test_another_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(CheckpointError, match="is no n-gram table of this version"):
        NgramTable.load(path)


def put(values, place, value):
    """A copy of an array with another value at a place."""
    values = values.copy()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        # All keys in the first bucket, so that two of them are in one for sure.
        (
            lambda a: {
                "starts": put(a["starts"], slice(1, None), len(a["keys"])),
                "keys": a["keys"][::-1].copy(),
            },
            "keys is not in order",
        ),
        (lambda a: {"starts": put(a["starts"], -1, a["starts"][-1] + 7)}, "starts and keys do not fit"),
        (lambda a: {"starts": put(a["starts"], 5, 2**31)}, "starts and keys do not fit"),
        (lambda a: {"totals": a["totals"][:-1]}, "keys, sizes, totals and kinds differ in length"),
        (lambda a: {"tokens": a["tokens"][:-1]}, "sizes, tokens and counts do not fit together"),
        (lambda a: {"sizes": put(a["sizes"], 0, 200)}, "sizes, tokens and counts do not fit together"),
        (lambda a: {"counts": None}, "it has no counts"),
        (lambda a: {"tokens": a["tokens"].astype(np.float32)}, "tokens is float32"),
    ],
)
def test_damage_that_a_lookup_would_trip_over_is_found_at_load(tmp_path, damage, fault):
    path = saved(tmp_path)
    arrays = load_file(path)
    arrays |= damage(arrays)
    save_file({name: a for name, a in arrays.items() if a is not None}, path, metadata=SETTINGS)
    with pytest.raises(CheckpointError, match=fault):
        NgramTable.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_order", "0"),
        ("max_order", "nine"),
        ("beta", "-1"),
        ("beta", "nan"),
        ("kappa", "0"),
        ("kappa", "inf"),
    ],
)
def test_bad_settings_are_named(tmp_path, name, value):
    path = saved(tmp_path)
    save_file(load_file(path), path, metadata=SETTINGS | {name: value})
    with pytest.raises(CheckpointError, match=r"its settings .*: .*; build it again"):
        NgramTable.load(path)


def test_the_coupling_is_stored(tmp_path):
    path = tmp_path / "t.safetensors"
    build_table([[1, 2]], path, coupling=(0.25, 1.5))
    assert NgramTable.load(path).coupling == (0.25, 1.5)


def test_a_table_may_be_read_by_all_users(tmp_path):
    assert saved(tmp_path).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_order": 0}, "max_order must be from 1 to 8, not 0"),
        ({"max_order": 9}, "max_order must be from 1 to 8, not 9"),
        ({"max_successors": 0}, "max_successors must be from 1 to 255, not 0"),
        ({"max_successors": 256}, "max_successors must be from 1 to 255, not 256"),
        ({"coupling": (-0.5, 1.0)}, "beta must be finite and not negative, not -0.5"),
        ({"max_bytes": 100}, "max_bytes=100 holds no n-gram"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_table(texts(2, 50, 9), tmp_path / "t.safetensors", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_are_no_tokens_are_named(tmp_path, token):
    with pytest.raises(ConfigError, match="token id is outside"):
        build_table([[1, token]], tmp_path / "t.safetensors")
