"""Whether a cell's text is the one that plain decoding gives."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ddtree.bench.answers import Answer
from ddtree.flips import first_flip
from ddtree.sampling import SamplingParams

Kind = Literal["equal", "near-tie", "different", "unchecked"]


def judge(
    target: Any, prompt: list[int], plain: Answer, other: Answer, params: SamplingParams
) -> dict[str, Any]:
    """The verdict on an answer as plain JSON values: its `kind`, and where and by how much the two texts part.

    Half precision may flip a near-tie (`ddtree.flips`). In float32 any difference counts as one.
    """
    if not other.comparable:
        return {"kind": "unchecked"}
    if plain.tokens == other.tokens:
        return {"kind": "equal"}
    flip = first_flip(target, prompt, plain.tokens, other.tokens, params.temperature, params.seed or 0)
    assert flip is not None
    kind: Kind = "near-tie" if flip.near_tie and target.dtype != torch.float32 else "different"
    gap = None if flip.gap == float("inf") else round(flip.gap, 6)
    return {
        "kind": kind,
        "at": flip.index,
        "tokens": list(flip.tokens),
        "gap": gap,
        "noise": round(flip.noise, 6),
    }
