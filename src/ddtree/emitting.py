"""The target's choice becomes the next token of a text, and may end it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ddtree.sequence import FinishReason, Sequence

_END = -1
"""What the walk is told when a sequence has ended: no child carries it."""


def emit(sequence: Sequence, logits: Tensor, max_context: int) -> int:
    """Choose the token after `sequence.tokens` from its logits [V] and append it; -1 where that ends the sequence.

    What a processor raises ends its own sequence, with the exception in `error`, and spares those beside it.
    """
    # A processor of a row before this one may have cancelled it.
    if sequence.finish_reason is not None:
        return _END
    try:
        token = sequence.sampler.choose(logits, sequence.tokens, committed=len(sequence.tokens))
        if sequence.logprobs is not None:
            sequence.logprobs.append(sequence.sampler.logprobs(logits, token))
    except Exception as error:
        sequence.error = error
        sequence.finish("error")
        return _END
    # A processor may have cancelled the sequence it was called for.
    if sequence.finish_reason is not None:
        return _END
    sequence.append(token)
    reason = _ending(sequence, token, max_context)
    if reason is None:
        return token
    sequence.finish(reason)
    return _END


def chooser(
    sequences: list[Sequence], logits: Tensor, max_context: int
) -> Callable[[list[int], list[int]], list[int]]:
    """What `walk` asks at the nodes of logits [R, N, V]. Its order is the text's: so each choice is emitted."""

    def choose(rows: list[int], nodes: list[int]) -> list[int]:
        return [
            emit(sequences[row], logits[row, node], max_context)
            for row, node in zip(rows, nodes, strict=True)
        ]

    return choose


def _ending(sequence: Sequence, token: int, max_context: int) -> FinishReason | None:
    params, length = sequence.params, sequence.output_length
    stops = token in sequence.sampler.stop_ids and length >= params.min_tokens
    stopped = sequence.text is not None and sequence.text.push(token, visible=not stops)
    if stops or stopped:
        return "stop"
    if length >= params.max_tokens or len(sequence.tokens) >= max_context:
        return "length"
    return None
