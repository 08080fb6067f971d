"""Padded passes over fixed buffers give what free ones give; on a CUDA device they are recorded (test_cuda.py)."""

import pytest
import torch

import tiny
from ddtree.engine.engine import Engine
from ddtree.model import kv_cache as cache_module
from ddtree.model.cuda_graphs import CudaGraphs, _padded
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from ddtree.tree import DraftTree

PROMPTS = [tiny.prompt(n, seed=n) for n in (6, 31, 14)]


def texts(family, padded, rows, monkeypatch):
    model = tiny.model(family)
    target = Target(model)
    if padded:
        target._graphs = CudaGraphs(target.run, target.dtype, record=False)
    monkeypatch.setattr(cache_module, "_FIRST_TOKENS", 64)
    engine = Engine(target, tiny.drafter("merged", model))
    sequences = [
        engine.add(
            PROMPTS[i], SamplingParams(temperature=i, seed=i, max_tokens=60 + i), budget=9 + i, depth=4
        )
        for i in range(rows)
    ]
    while not engine.idle:
        engine.step()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_padded_passes_change_no_token(family, rows, monkeypatch):
    """Sliding windows, sinks, ragged rows that leave one by one, buffers that grow on the way."""
    assert texts(family, True, rows, monkeypatch) == texts(family, False, rows, monkeypatch)


def test_padding_is_less_than_half_of_a_pass():
    steps = [_padded(nodes) for nodes in range(1, 600)]
    assert steps[:8] == [1, 2, 3, 4, 6, 6, 8, 8]
    assert all(nodes <= step < 1.5 * nodes + 1 for nodes, step in enumerate(steps, 1))
    assert len(set(steps)) < 22


def test_a_new_set_of_features_is_gathered_at_once():
    target = Target(tiny.model(), feature_layers=(0,))
    target._graphs = CudaGraphs(target.run, target.dtype, record=False)
    target.use_features((0, 1))
    cache = target.new_cache()
    cache.add_row()
    for _ in target.prefill(cache, 0, PROMPTS[0]):
        pass
    forward = target.verify(cache, DraftTree.root([5], torch.device("cpu")))
    assert forward.features.shape == (1, 1, 64)
