"""The second turn of a chat: how soon it begins where the server remembers the first one, and where it cannot."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from ddtree.bench.report import Table
from ddtree.bench.serving.answer import Answer
from ddtree.bench.serving.endpoint import Endpoint, EndpointError, Message
from ddtree.bench.serving.jobs import salt

_TRIES = 5
_NEAR = 0.02
_LONGEST_WORD = 8
_FOLLOW_UP = "Say that once more, in other words."


@dataclass(frozen=True)
class Pair:
    """The second turn of one chat, asked twice.

    Attributes:
        first: the first turn.
        known: the second one, in the same chat.
        new: the second one of a chat that is the same but for its first words, which were never sent before.
    """

    first: Answer
    known: Answer
    new: Answer

    @property
    def ratio(self) -> float:
        """How many times as long the unknown chat's first token takes."""
        assert self.known.ttft is not None and self.new.ttft is not None
        return self.new.ttft / self.known.ttft


async def measure(
    endpoint: Endpoint, texts: Sequence[str], tokens: int, pairs: int, fields: dict[str, Any]
) -> list[Pair]:
    """Second turns of chats whose first message is of about so many tokens.

    Args:
        texts: what first messages are made of.
        tokens: of the first prompt, as the server counts them, within 2%.
        pairs: how many chats.
        fields: of each request.

    Raises:
        EndpointError: a request fails, brings no text, or its usage is not told.
    """
    # Without a seed: no chat may have been sent before, by another run either.
    generator = random.Random()
    history = await _history(endpoint, texts, tokens, fields, generator)
    return [await _pair(endpoint, history, fields, generator, odd=bool(i % 2)) for i in range(pairs)]


async def _pair(
    endpoint: Endpoint, history: str, fields: dict[str, Any], generator: random.Random, odd: bool
) -> Pair:
    words = salt(generator)
    first = await _ask(endpoint, [_user(f"{words} {history}")], fields)

    async def second(beginning: str) -> Answer:
        chat = [
            _user(f"{beginning} {history}"),
            {"role": "assistant", "content": first.text},
            _user(_FOLLOW_UP),
        ]
        return await _ask(endpoint, chat, fields)

    if odd:
        new = await second(salt(generator))
        return Pair(first, await second(words), new)
    known = await second(words)
    return Pair(first, known, await second(salt(generator)))


async def _history(
    endpoint: Endpoint, texts: Sequence[str], tokens: int, fields: dict[str, Any], generator: random.Random
) -> str:
    """Words out of the texts, as many as make a prompt of so many tokens."""
    words = list(_words(texts, 2 * tokens + 100))
    # Few at first: some tokenizers make a token of each letter, and the context has an end.
    count = max(1, tokens // _LONGEST_WORD)
    for _ in range(_TRIES):
        text = " ".join(words[:count])
        answer = await _ask(
            endpoint, [_user(f"{salt(generator)} {text}")], {**fields, "max_tokens": 1}, text=False
        )
        made = answer.prompt_tokens
        if made is None:
            raise EndpointError("the server tells no usage: --history cannot count tokens")
        if abs(made - tokens) <= max(1, _NEAR * tokens):
            break
        count = max(1, min(len(words), round(count * tokens / made)))
    return " ".join(words[:count])


def _words(texts: Sequence[str], count: int) -> Iterator[str]:
    found = [word for text in texts for word in text.split()] or ["word"]
    return islice(cycle(found), count)


async def _ask(
    endpoint: Endpoint, messages: list[Message], fields: dict[str, Any], text: bool = True
) -> Answer:
    answer = await endpoint.ask(messages, fields)
    if not answer.good:
        raise EndpointError(f"a request of --history failed: {answer.error}")
    if text and answer.ttft is None:
        raise EndpointError("an answer has no text, so it has no first token: try another --prompts or seed")
    return answer


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def table(pairs: Sequence[Pair]) -> Table:
    """Medians, and the ratio's over chats."""
    rows = []
    for name, answers in (
        ("first turn", [pair.first for pair in pairs]),
        ("second turn, new to the server", [pair.new for pair in pairs]),
        ("second turn, its chat known", [pair.known for pair in pairs]),
    ):
        ttft = statistics.median(answer.ttft or 0.0 for answer in answers)
        prompt = statistics.median(answer.prompt_tokens or 0 for answer in answers)
        cached = statistics.median(answer.cached_tokens for answer in answers)
        rows.append([name, f"{prompt:.0f}", f"{cached:.0f}", f"{1000 * ttft:.1f}"])
    ratio = statistics.median(pair.ratio for pair in pairs)
    title = f"A chat's second turn (medians of {len(pairs)} chats): the first token {ratio:.2f}x as soon"
    return Table(title, ["", "prompt tokens", "from the cache", "TTFT (ms)"], rows)


def record(pairs: Sequence[Pair]) -> dict[str, Any]:
    """As plain JSON values."""
    return {
        "ratio": statistics.median(pair.ratio for pair in pairs),
        "chats": [
            {"first": pair.first.record(), "known": pair.known.record(), "new": pair.new.record()}
            for pair in pairs
        ],
    }
