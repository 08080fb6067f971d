"""Engines for the tests: stock vLLM, and vLLM with draft trees, in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import tiny
from ddtree.integrations.vllm import model_runner
from ddtree.integrations.vllm.settings import DraftingSettings, PluginSettings
from scripted import Scripted

# vLLM's kernels for CPUs want heads of 32 at least.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "head_dim": 32},
    # Of other seeds its greedy texts hardly vary.
    "qwen3": {"seed": 1, "num_hidden_layers": 3, "head_dim": 32},
}
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((5, 11, 23, 40))]
NODES = 16
TOKENS = 64
"""Of each answer to the prompts that the fixture `known` holds."""

Load = Callable[[Any, Any], Any]
"""Makes a drafter of its name and target, in place of `ddtree.drafters.loading.load_drafter`."""


@contextmanager
def engine(model: Any, load: Load | None = None, **arguments: Any) -> Iterator[LLM]:
    """A tiny model in float32, stock where there is no drafter to load."""
    drafting = DraftingSettings(
        arguments.pop("method", "tree"), arguments.pop("budget", NODES), arguments.pop("depth", 16)
    )
    fields = {name: arguments.pop(name) for name in ("nodes", "feature_bytes") if name in arguments}
    own = PluginSettings(
        drafter=arguments.pop("drafter", "lookup"), drafting=drafting, **{"nodes": NODES, **fields}
    )
    given = {} if load is None else own.engine_arguments()
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "block_size": 32,
        "num_gpu_blocks_override": 128,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        if load is not None:
            patch.setattr(model_runner, "load_drafter", load)
        else:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()
        made = LLM(model=str(model), **{**defaults, **given, **arguments})
        try:
            yield made
        finally:
            made.llm_engine.engine_core.shutdown()
            del made
            gc.collect()
            cleanup_dist_env_and_memory()


def params(tokens: int = 48, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **fields}
    )


def answers(made: LLM, prompts: Sequence[Sequence[int]], asked: Any) -> list[list[int]]:
    """The tokens of each answer, of prompts that are decoded together."""
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(result.outputs[0].token_ids) for result in made.generate(given, asked, use_tqdm=False)]


def oracle(known: Any, kind: Callable[[list[list[int]]], Any] = Scripted) -> Load:
    """Return a loader of a drafter that knows the answers: hides them among wrong siblings, unless it is another kind.

    Args:
        known: a model's folder, and stock vLLM's answers to the prompts.
        kind: makes the drafter of the whole texts.
    """
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, known[1], strict=True)]
    return lambda spec, target: kind(texts)


def drafted(known: Any, load: Load | None = None, times: int = 1, **arguments: Any) -> dict[str, Any]:
    """Check that the answers to all prompts, decoded together, are those that are known; return the counters."""
    with engine(known[0], load or oracle(known), **arguments) as made:
        for _ in range(times):
            assert answers(made, PROMPTS, params(TOKENS)) == known[1]
        return counters(made)


def counters(made: LLM) -> dict[str, Any]:
    return made.collective_rpc("ddtree_counters")[0]
