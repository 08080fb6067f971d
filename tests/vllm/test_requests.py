"""Requests: trees as the scheduler sends them back, and the fields that may be set."""

from __future__ import annotations

import torch
from vllm import SamplingParams

from ddtree.integrations.vllm.request_state import StepRow, as_scheduled, chain
from ddtree.integrations.vllm.settings import REFUSED_FIELDS
from ddtree.tree import DraftTree

TREE = DraftTree(
    torch.tensor([[5, 6, 7, 8]]),
    torch.tensor([[0, 0, 0, 1]]),
    torch.tensor([[0, 1, 1, 2]]),
    torch.tensor([[0.0, -1.0, -1.0, -2.0]]),
    [4],
)
KEPT = {
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "max_tokens", "n", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "output_kind", "skip_clone", "skip_reading_prefix_cache", "stream_interval",
    "output_text_buffer_length", "extra_args",
}  # fmt: skip


def shape(tree):
    return tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.sizes


def branched(tree):
    return StepRow(None, 0, 0, 0, 0, tree).branched


def test_a_whole_list_is_the_tree():
    assert shape(as_scheduled(TREE, 5, [6, 7, 8])) == shape(TREE) and branched(TREE)


def test_a_cut_list_is_a_smaller_tree():
    cut = as_scheduled(TREE, 5, [6, 7])
    assert shape(cut) == ([[5, 6, 7]], [[0, 0, 0]], [[0, 1, 1]], [3]) and branched(cut)
    assert not branched(as_scheduled(TREE, 5, [6]))
    assert shape(as_scheduled(TREE, 5, [])) == shape(chain([5])) and not branched(chain([5]))


def test_another_list_is_a_chain():
    for tree, root, drafted in (
        (TREE, 4, [6, 7, 8]), (TREE, 5, [6, 8]), (TREE, 5, [0, 0, 0, 0]), (TREE, 5, [6, 7, 8, 9]), (None, 5, [6, 7]),
    ):  # fmt: skip
        found = as_scheduled(tree, root, drafted)
        places = list(range(len(drafted) + 1))
        assert shape(found) == (
            [[root, *drafted]],
            [[max(0, at - 1) for at in places]],
            [places],
            [len(places)],
        )
        assert not branched(found)


def test_every_field_of_a_request_is_kept_exact_or_refused():
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == KEPT | REFUSED_FIELDS.keys() and not KEPT & REFUSED_FIELDS.keys()
