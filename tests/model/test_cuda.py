"""On an accelerator: the same tokens as on the CPU, for every family, drafter and rule. Skipped where there is none.

DDTREE_TEST_DEVICE names another than CUDA's first, such as cuda:1, xpu or mps.
"""

import copy
import functools
import os

import pytest
import torch

import reference
import tiny
from ddtree.engine.engine import Engine
from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams

DEVICE = os.environ.get("DDTREE_TEST_DEVICE", "cuda")
BACKEND = getattr(torch, DEVICE.partition(":")[0], None)

pytestmark = pytest.mark.skipif(not (BACKEND and BACKEND.is_available()), reason=f"needs the device {DEVICE}")

LENGTH = 100
PROMPTS = [tiny.prompt(n, seed=n) for n in (6, 31, 14)]
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalty-and-bias": {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 5: -1.5}},
}
KINDS = ("none", "chain", "tree", "lookup", "merged")
HEADS = ("markov", "treeflash", "domino")
PAIRS = [
    (family, kind) for family in tiny.FAMILIES for kind in (*KINDS, *(HEADS if family == "llama" else ()))
]


@functools.cache
def model_of(family, device):
    return copy.deepcopy(tiny.model(family)).to(device)


@functools.cache
def expected(family, sampling):
    return [
        reference.decode(
            model_of(family, "cpu"), prompt, SamplingParams(**SAMPLING[sampling], seed=seed), LENGTH
        )
        for seed, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_tokens_are_those_of_the_plain_loop_on_the_cpu(family, kind, sampling):
    model = model_of(family, DEVICE)
    for rows in (1, 3):
        drafter = None if kind == "none" else tiny.drafter(kind, model, coupled=True)
        engine = Engine(Target(model), drafter)
        sequences = [
            engine.add(
                PROMPTS[i],
                SamplingParams(**SAMPLING[sampling], seed=i, max_tokens=LENGTH),
                method="chain" if kind == "chain" else "tree",
                budget=15,
                depth=4,
            )
            for i in range(rows)
        ]
        while not engine.idle:
            engine.step()
        engine.target.close()
        for sequence, answer in zip(sequences, expected(family, sampling), strict=False):
            assert sequence.output == answer, f"{rows} rows"


def test_noise_is_that_of_the_cpu():
    here, there = (Noise(7, 50_000, torch.device(device)) for device in (DEVICE, "cpu"))
    for position in (0, 5, 10**6):
        torch.testing.assert_close(here.gumbel(position).cpu(), there.gumbel(position), rtol=1e-5, atol=1e-5)


def test_half_precision_answers_are_the_same_with_and_without_a_tree_but_for_near_ties():
    model = copy.deepcopy(model_of("llama", DEVICE)).bfloat16()
    answers = []
    for kind in ("none", "merged"):
        engine = Engine(Target(model), None if kind == "none" else tiny.drafter(kind, model))
        sequence = engine.add(PROMPTS[1], SamplingParams(max_tokens=LENGTH), budget=15, depth=4)
        while not engine.idle:
            engine.step()
        engine.target.close()
        answers.append(sequence.output)
    same = next((i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), LENGTH)
    assert same > 4


def test_a_cache_too_large_for_the_device_is_refused_by_name():
    from ddtree.errors import CacheMemoryError

    cache = KVCache(10**9)
    cache.add_row()
    cache.open(0, 1, 1)
    cache.update(*torch.zeros(2, 1, 2, 1, 64, device=DEVICE), 0)
    cache.commit([[0]])
    with pytest.raises(CacheMemoryError, match="MiB more"):
        cache.open(0, 1, 10**9 - 1)
