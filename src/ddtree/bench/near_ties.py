"""The near-tie check: two texts of one request differ; did the target's rounding decide, or is there a defect?

A forward pass over another number of tokens may add in another order. In bfloat16 that can flip the choice between two
tokens whose scores differ by less than that rounding: a near-tie. A wider gap means a defect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.model.kv_cache import KVCache
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams
from ddtree.tree import DraftTree

_WINDOW = 48  # positions over which the noise of the forward pass is measured


@dataclass(frozen=True)
class Difference:
    """The first token at which two texts differ.

    Attributes:
        index: place in the output.
        tokens: both texts' tokens there.
        gap: difference of the two tokens' scores, the smaller one of two shapes of the forward pass.
        noise: rounding of the forward pass: how far the gap between the two best scores changes from one shape to the
            other, at most, over the last 48 positions; at least the spacing of logits in the target's dtype, and
            `Target.noise`.
    """

    index: int
    tokens: tuple[int, int]
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Return whether rounding alone may have flipped the choice."""
        return self.gap <= self.noise


def verdict(
    target: Any, prompt: list[int], plain: list[int], other: list[int], params: SamplingParams
) -> dict[str, Any]:
    """Compare an output with plain decoding's; return the verdict as plain JSON values.

    Its `kind` is "equal", "near-tie" or "different"; where the outputs differ it also says at which token and by which
    gap. In float32 any difference counts, unless the target quantizes its activations.
    """
    found = first_difference(target, prompt, plain, other, params.temperature, params.seed or 0)
    if found is None:
        return {"kind": "equal"}
    return {
        "kind": "near-tie"
        if found.near_tie and (target.noise or target.dtype != torch.float32)
        else "different",
        "at": found.index,
        "tokens": list(found.tokens),
        "gap": None if math.isinf(found.gap) else round(found.gap, 6),
        "noise": round(found.noise, 6),
    }


def first_difference(
    target: Any, prompt: list[int], one: list[int], other: list[int], temperature: float = 0.0, seed: int = 0
) -> Difference | None:
    """Find and measure the first difference of two outputs of `prompt`.

    Args:
        target: the `Target` of both; one that verifies trees, unless the outputs are the same.
        prompt: token ids.
        one, other: output token ids.
        temperature, seed: of the request. Filters and penalties are not supported.

    Returns:
        None when the outputs are the same. Where one is the start of the other, no choice differs: the gap is infinite.
    """
    index = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if index is None:
        if len(one) == len(other):
            return None
        return Difference(min(len(one), len(other)), (-1, -1), float("inf"), 0.0)
    prefix = prompt + one[:index]
    size = min(_WINDOW, len(prefix) - 1)
    shapes = _one_at_a_time(target, prefix, size), _at_once(target, prefix, size)
    best = shapes[0].topk(2, dim=-1).indices
    noise = (_gaps(shapes[0], best) - _gaps(shapes[1], best)).abs().max()
    pair = torch.tensor([[one[index], other[index]]], device=best.device)
    noise = noise.clamp(min=max(target.noise, _spacing(float(shapes[0][-1, pair].abs().max()), target.dtype)))
    gaps = torch.stack([_gaps(shape[-1:], pair)[0] for shape in shapes])
    scale = 1.0
    if temperature > 0:
        scale = temperature
        noise_there = Noise(seed, target.vocab_size, target.device).gumbel(len(prefix), pair[0])
        gaps = gaps + temperature * (noise_there[0] - noise_there[1])
    return Difference(
        index, (one[index], other[index]), float(gaps.abs().min()) / scale, float(noise) / scale
    )


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance from a positive value to the next one that the dtype can hold."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value)) if value else 0.0


def _gaps(logits: Tensor, pairs: Tensor) -> Tensor:
    """Return the differences [N] of the logits [N, V] at pairs of tokens [N, 2]."""
    scores = logits.gather(-1, pairs)
    return scores[:, 0] - scores[:, 1]


@torch.inference_mode()
def _one_at_a_time(target: Any, tokens: list[int], size: int) -> Tensor:
    """Return logits float32 [size, V] of the last `size` tokens, as decoding without drafts computes them."""
    cache = _prefilled(target, tokens[:-size])
    found = []
    for token in tokens[-size:]:
        forward = target.verify(cache, DraftTree.root([token], target.device))
        cache.commit([[0]])
        found.append(forward.logits[0, 0].float())
    return torch.stack(found)


@torch.inference_mode()
def _at_once(target: Any, tokens: list[int], size: int) -> Tensor:
    """Return the same logits from one forward pass over all of those tokens."""
    cache = _prefilled(target, tokens[:-size])
    ids = torch.tensor([tokens[-size:]], device=target.device)
    return target.extend(cache, ids, torch.arange(size, device=target.device)[None], None).logits[0].float()


def _prefilled(target: Any, tokens: list[int]) -> KVCache:
    cache = target.new_cache()
    for _ in target.prefill(cache, cache.add_row(), tokens):
        pass
    return cache
