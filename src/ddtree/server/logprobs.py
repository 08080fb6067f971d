"""Log-probabilities in the two forms that OpenAI's clients read."""

from __future__ import annotations

import codecs
from typing import Any

from ddtree.sampling.sampler import TokenLogprobs
from ddtree.server.tokens import TokenTexts

_LOWEST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot hold."""


def of_chat(entries: list[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(entry.token, entry.logprob, texts),
                "top_logprobs": [_entry(token, value, texts) for token, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The older form, of one answer in pieces.

    Args:
        offset: characters that stand before the answer's text.
        hidden: tokens that the text leaves out.
    """

    def __init__(self, texts: TokenTexts, offset: int, hidden: frozenset[int] = frozenset()) -> None:
        self._texts = texts
        self._hidden = hidden
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if entry.token not in self._hidden:
                self._offset += len(self._decoder.decode(self._texts(entry.token)[1]))
        return {
            "tokens": [self._texts(entry.token)[0] for entry in entries],
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in entries],
            # The chosen token is among them even when others are likelier.
            "top_logprobs": [
                {self._texts(token)[0]: max(value, _LOWEST) for token, value in self._pairs(entry)}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _pairs(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        # Of two tokens with one text the likelier stands, except for the chosen one.
        return [*reversed(entry.top), (entry.token, entry.logprob)]


def of_prompt(first: int, entries: list[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """The older form, of a prompt: its first token has no log-probability, and text is counted from it on."""
    told = CompletionLogprobs(texts, 0)([TokenLogprobs(first, 0.0, ()), *entries])
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    return told


def joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Several pieces of the older form as one; None where there are none."""
    there = [part for part in parts if part is not None]
    return {name: [entry for part in there for entry in part[name]] for name in there[0]} if there else None


def _entry(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    text, data = texts(token)
    return {"token": text, "logprob": max(value, _LOWEST), "bytes": list(data)}
