"""The equality matrix has power: each of these one-line faults fails a case of it.

`MUTANTS` names for each fault the method that it changes and the smallest case that notices. A fault that leaves the
texts as they are (features of another layer) shows in the acceptance, which `matrix.check` asserts as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import matrix
from ddtree.model.attention import Visibility
from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.processors import Processors
from matrix import Case


class Mutant(NamedTuple):
    """A fault: `change` makes the faulty method of `owner.name` out of the right one."""

    owner: type
    name: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]
    case: Case


def causal_mask(right):
    def extend(self, cache, tokens, depths, visible, *args, **kwargs):
        if visible is not None:
            visible = torch.ones_like(visible).tril()
        return right(self, cache, tokens, depths, visible, *args, **kwargs)

    return extend


def sequential_positions(right):
    def extend(self, cache, tokens, depths, *args, **kwargs):
        return right(self, cache, tokens, torch.arange(tokens.shape[1]).expand_as(depths), *args, **kwargs)

    return extend


def committed_in_reverse(right):
    return lambda self, paths: right(self, [path[::-1] for path in paths])


def dropped_without_the_swap(right):
    def drop_row(self, row):
        del self.lengths[row]

    return drop_row


def noise_of_the_next_position(right):
    return lambda self, position, tokens=None: right(self, position + 1, tokens)


def features_of_the_next_layer(right):
    def use_features(self, layers):
        right(self, tuple((layer + 1) % self.num_layers for layer in layers))

    return use_features


def window_by_column(right):
    def init(self, visible, query_positions, key_positions, *args, **kwargs):
        columns = torch.arange(key_positions.shape[1]).expand_as(key_positions)
        queries = columns[:, columns.shape[1] - query_positions.shape[1] :]
        right(self, visible, queries, columns, *args, **kwargs)

    return init


def penalties_of_the_prompt_only(right):
    def call(self, logits, prefix, committed):
        return right(self, logits, prefix[: self._prompt_length], self._prompt_length)

    return call


def grown_without_what_it_held(right):
    def restack(self, rows, tokens):
        right(self, rows, tokens)
        for stack in self._stacks:
            stack.zero_()

    return restack


MUTANTS = {
    "causal instead of ancestor mask": Mutant(
        Target, "extend", causal_mask, Case("llama", "scripted", "greedy", 15, 1)
    ),
    "sequential positions": Mutant(
        Target, "extend", sequential_positions, Case("llama", "scripted", "greedy", 15, 1)
    ),
    # Attention sums keys in any order; only a sliding window asks where a committed one lies.
    "commit in wrong order": Mutant(
        KVCache, "commit", committed_in_reverse, Case("mistral", "scripted", "greedy", 15, 1)
    ),
    "drop_row without the swap": Mutant(
        KVCache, "drop_row", dropped_without_the_swap, Case("llama", "scripted", "greedy", 15, 3)
    ),
    "noise position off by one": Mutant(
        Noise, "gumbel", noise_of_the_next_position, Case("llama", "scripted", "min-p", 15, 1)
    ),
    "features off by one layer": Mutant(
        Target, "use_features", features_of_the_next_layer, Case("mistral", "informed", "greedy", 15, 1)
    ),
    "window by column instead of position": Mutant(
        Visibility, "__init__", window_by_column, Case("mistral", "scripted", "greedy", 64, 1)
    ),
    "penalties seeing the prompt only": Mutant(
        Processors,
        "__call__",
        penalties_of_the_prompt_only,
        Case("llama", "scripted", "penalties-and-bias", 15, 1),
    ),
    "buffers that grow without what they held": Mutant(
        KVCache, "_restack", grown_without_what_it_held, Case("llama", "scripted", "greedy", 15, 3)
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_is_noticed(fault, monkeypatch):
    mutant = MUTANTS[fault]
    # The expected tokens are made before the fault is there, and the case passes without it.
    matrix.check(mutant.case)
    # The probe of a target notices some when it is loaded; the texts shall tell all the same.
    monkeypatch.setattr(Target, "_probe", lambda self: None)
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.change(getattr(mutant.owner, mutant.name)))
    with pytest.raises(AssertionError):
        matrix.check(mutant.case)


def test_every_case_that_notices_a_fault_is_in_the_matrix():
    whole = set(matrix.true_paths()) | set(matrix.covering())
    assert {mutant.case for mutant in MUTANTS.values()} <= whole
