"""Drafters that read the target's features: those of the accepted path, in its order, whatever was cached."""

from __future__ import annotations

import pytest
import torch
from engines import FAMILIES, PROMPTS, TOKENS, answers, counters, drafted, engine, params

import tiny
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.merged import Merged
from ddtree.integrations.vllm import model_runner
from ddtree.model.target import Target
from scripted import Scripted

SHARED = (PROMPTS[3] * 3)[:100]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def known(request, checkpoints):
    """A model's folder, stock vLLM's answers to the prompts and to one that is longer than a block, and the model."""
    folder = checkpoints(request.param)
    with engine(folder) as stock:
        found = [answers(stock, [prompt], params(TOKENS))[0] for prompt in (*PROMPTS, SHARED)]
    return folder, found[:-1], tiny.model(request.param, **FAMILIES[request.param]), found[-1]


class Watched:
    """DFlash beside an oracle; keeps the log-probabilities that DFlash gave after each text."""

    def __init__(self, known) -> None:
        self.texts = [prompt + answer for prompt, answer in zip(PROMPTS, known[1], strict=True)]
        self.model = known[2]
        self.thought = {}

    def __call__(self, spec, target):
        dflash = DFlash(Backbone(tiny.network(self.model), target))
        dflash.trace = lambda row, logprobs: self.thought.update(
            {tuple(row.tokens): logprobs[: row.depth].clone()}
        )
        return Merged([Scripted(self.texts), dflash])

    @torch.inference_mode()
    def difference(self):
        """The most by which a log-probability differs from that of a network told everything anew."""
        target = Target(self.model)
        backbone = Backbone(tiny.network(self.model), target)
        target.use_features(backbone.feature_layers)
        most = 0.0
        for tokens, logprobs in self.thought.items():
            if not len(logprobs):
                continue
            cache = target.new_cache()
            cache.add_row()
            backbone.add_row()
            for _, forward in target.prefill(cache, 0, list(tokens[:-1])):
                backbone.observe(0, forward.features[0])
            states = backbone.states([tokens[-1]], len(logprobs))
            expected = backbone.logits(backbone.norm(states))[0].log_softmax(dim=-1)
            most = max(most, float((expected - logprobs).abs().max()))
            backbone.drop_row(0)
        return most


def test_a_network_thinks_what_it_would_of_the_same_text_told_anew(known):
    watched = Watched(known)
    found = drafted(known, watched)
    assert found["accepted"] > found["steps"]
    assert len(watched.thought) > 20
    assert watched.difference() < 1e-3


def test_features_of_rejected_nodes_would_show(known, monkeypatch):
    monkeypatch.setattr(
        model_runner, "_accepted", lambda row, found: list(range(row.start, row.start + len(found.path)))
    )
    watched = Watched(known)
    # The text stays right, as it does whatever is drafted.
    drafted(known, watched)
    assert watched.difference() > 0.1


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 11},
        {"num_gpu_blocks_override": 11, "enable_prefix_caching": True},
    ],
)
def test_also_in_chunks_and_after_preemption(known, arguments):
    watched = Watched(known)
    drafted(known, watched, **arguments)
    assert watched.difference() < 1e-3


@pytest.mark.parametrize("kept", [True, False])
def test_features_of_cached_prompts_are_kept_where_there_is_room(known, kept):
    watched = Watched(known)
    watched.texts = [SHARED + known[3]]
    room = {} if kept else {"feature_bytes": 0}
    with engine(known[0], watched, enable_prefix_caching=True, **room) as made:
        for _ in range(2):
            watched.thought.clear()
            assert answers(made, [SHARED], params(TOKENS)) == [known[3]]
        assert counters(made)["accepted"]
    assert (watched.difference() < 1e-3) == kept
