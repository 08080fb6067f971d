"""Heads by the name of their kind."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ddtree.drafters.heads import Head
from ddtree.errors import CheckpointError

_CLASSES = {
    "markov": ("ddtree.drafters.heads.markov", "Markov"),
    "treeflash": ("ddtree.drafters.heads.treeflash", "TreeFlash"),
    "domino": ("ddtree.drafters.heads.domino", "Domino"),
}
KINDS = tuple(_CLASSES)


def create(kind: str, **config: Any) -> Head:
    """A head of random weights, which corrects nothing until it is trained.

    Args:
        kind: one of `KINDS`.
        config: the keyword arguments of its class, as `Head.config` gives them.

    Raises:
        CheckpointError: there is no such kind, or it takes other settings.
    """
    if kind not in _CLASSES:
        raise CheckpointError(f"head kind {kind!r} is unknown: the heads known here are {', '.join(KINDS)}")
    module, name = _CLASSES[kind]
    try:
        head = getattr(import_module(module), name)(**config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a {kind} head cannot be made of the settings {config!r}: {error}") from error
    return head
