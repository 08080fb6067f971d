"""Heads inside published checkpoints, by the names that their tensors have there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters.checkpoint_files import REMEDY
from ddtree.drafters.heads import Head
from ddtree.drafters.heads.domino import public as domino
from ddtree.drafters.heads.markov import Markov
from ddtree.drafters.heads.treeflash import TreeFlash
from ddtree.errors import CheckpointError

_MARKS = (
    "ar_approximation.",
    "markov_head.",
    "confidence_head.",
    "prefix_gru.",
    "embed_proj.",
    "logit_head.",
)


def belongs(name: str) -> bool:
    """Whether a tensor is a head's, not the backbone's."""
    return name.startswith(_MARKS)


def read(kind: str, raw: dict[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    """The head of a checkpoint whose config.json is `raw`; tensors that are not the head's are not looked at.

    Raises:
        CheckpointError: a tensor is missing or unknown, or shapes contradict each other.
    """
    found = {name: tensor for name, tensor in tensors.items() if belongs(name)}
    if kind == "domino":
        return domino(raw, found)
    if not {**raw, **(raw.get("dflash_config") or {})}.get("confidence_head_with_markov", True):
        # One that does not know the token before a slot says the same of all branches, which is of no use here.
        found = {name: tensor for name, tensor in found.items() if not name.startswith("confidence_head.")}
    head, named = markov(found) if kind == "markov" else treeflash(found)
    unknown = sorted(set(found) - set(named.values()))
    if unknown:
        raise CheckpointError(f"unknown tensors {', '.join(unknown)} of a {kind} head; {REMEDY}")
    for own, name in named.items():
        wanted = head.state_dict()[own].shape
        if found[name].shape != wanted:
            raise CheckpointError(f"tensor {name} is {list(found[name].shape)}, not {list(wanted)}; {REMEDY}")
    state = {own: found[name] for own, name in named.items()}
    if isinstance(head, TreeFlash):
        # Published ones have the gated half first.
        for name in ("gate_up.weight", "gate_up.bias"):
            up, gate = state[name].chunk(2)
            state[name] = torch.cat([gate, up])
    head.load_state_dict(state)
    return head


def markov(tensors: Mapping[str, Tensor]) -> tuple[Markov, dict[str, str]]:
    """DSpark's head, random, and for each of its tensors the published name."""
    named = {"w1.weight": "markov_head.markov_w1.weight", "w2.weight": "markov_head.markov_w2.weight"}
    _all(named.values(), tensors, "Markov")
    (vocab, rank), size = tensors[named["w1.weight"]].shape, len(tensors[named["w2.weight"]])
    confidence, weight = None, tensors.get("confidence_head.proj.weight")
    if weight is not None:
        named |= {f"confidence_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
        _all(named.values(), tensors, "Markov")
        confidence = weight.shape[1] - rank
    return Markov(size, vocab, rank, confidence), named


def treeflash(tensors: Mapping[str, Tensor]) -> tuple[TreeFlash, dict[str, str]]:
    """TreeFlash's head, random, and for each of its tensors the published name."""
    named = {
        "embed_norm.weight": "ar_approximation.norm.weight",
        "gate_up.weight": "ar_approximation.ug.weight",
        "gate_up.bias": "ar_approximation.ug.bias",
        "down.weight": "ar_approximation.d.weight",
    }
    _all(named.values(), tensors, "TreeFlash")
    hidden, inner = tensors[named["down.weight"]].shape
    return TreeFlash(hidden, inner), named


def _all(names: Any, tensors: Mapping[str, Tensor], head: str) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(f"this {head} head lacks {', '.join(missing)}; {REMEDY}")
