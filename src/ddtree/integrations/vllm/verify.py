"""The target's choices along a request's tree, and what the engine is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import DDTreeError
from ddtree.integrations.vllm.request_state import Reader
from ddtree.integrations.vllm.trees import Nodes

PADDING = -1
"""What the engine takes for no token."""


@dataclass(frozen=True)
class Verified:
    """What a request's step came to.

    Attributes:
        path: accepted nodes, the root first.
        tokens: chosen after each node of the path.
    """

    path: list[int]
    tokens: list[int]


def verify(reader: Reader, nodes: Nodes, logits: Tensor, room: int) -> Verified:
    """Follow the target's own choices down a tree, and append them to the request's text.

    Args:
        reader: the request; its text ends with the root.
        nodes: the tree.
        logits: raw, [N, V], after each node.
        room: most tokens that the engine has room for, at least 1.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in reversed(list(enumerate(zip(nodes.parents, nodes.tokens, strict=True))))
        if node
    }
    path, tokens = [0], []
    while True:
        token = choose(reader, logits[path[-1]])
        tokens.append(token)
        reader.append(token)
        child = children.get((path[-1], token))
        if child is None or reader.ended or len(tokens) >= room:
            return Verified(path, tokens)
        path.append(child)


def choose(reader: Reader, logits: Tensor) -> int:
    """The request's next token, from raw logits [V]; where its rule allows none, the likeliest."""
    try:
        return reader.sampler.choose(logits, reader.tokens, committed=len(reader.tokens))
    except DDTreeError:
        # An error would end the engine, and with it every request beside this one.
        return int(logits.float().nan_to_num().argmax())


def outcome(rows: Sequence[Verified], starts: Sequence[int], logits: Tensor, count: int | None,
            sampler: Any) -> tuple[Tensor, Any]:  # fmt: skip
    """Chosen tokens and their log-probabilities, as the engine's own sampler returns them.

    Args:
        rows: of all requests of the batch, in its order.
        starts: of each request's logits among `logits`.
        logits: raw, of all nodes of the step.
        count: log-probabilities asked for beside the chosen token's; None for none.
        sampler: the engine's.

    Returns:
        int32 [requests, most tokens of one], padded; and the engine's log-probabilities of as many places, or None.
    """
    width = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), width), PADDING, dtype=torch.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
    if count is None:
        return tokens, None
    # What the engine takes for padding needs log-probabilities as well: any will do.
    nodes = [
        start + node
        for row, start in zip(rows, starts, strict=True)
        for node in [*row.path, *[0] * (width - len(row.path))]
    ]
    raw = sampler.logprobs_mode == "raw_logits"
    found = logits[torch.tensor(nodes)]
    found = found.float() if raw else sampler.compute_logprobs(found)
    return tokens, sampler.gather_logprobs(found, count, tokens.flatten().clamp(min=0).to(torch.int64))
