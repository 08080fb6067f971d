"""Which synthesized conversations are of use: no loops, no garbage, no user message twice."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.train.data import Conversation

SHORTEST_MESSAGE = 3
SHORTEST_ANSWER = 4
_LONGEST_PERIOD = 40
_LEAST_REPEATED = 24
_MOST_UNPRINTABLE = 0.02


def is_looping(tokens: Sequence[int]) -> bool:
    """Return whether a text ends in four repeats of a period of up to 40 tokens, or in 24 tokens and a period more."""
    for period in range(1, _LONGEST_PERIOD + 1):
        span = max(3 * period, _LEAST_REPEATED)
        if len(tokens) >= span + period and tokens[-span:] == tokens[-span - period : -period]:
            return True
    return False


def unprintable_tokens(tokenizer: Any, size: int) -> NDArray[np.bool_]:
    """Mark the tokens that no text for people holds: control characters, unassigned ones, special tokens; bool [size].

    Parts of a character, which many tokenizers have, are none of these.
    """
    marked = np.zeros(size, np.bool_)
    texts = tokenizer.batch_decode([[token] for token in range(min(size, len(tokenizer)))])
    for token, text in enumerate(texts):
        marked[token] = any(unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\t\n\r" for c in text)
    marked[[token for token in tokenizer.all_special_ids if token < size]] = True
    return marked


class ConversationFilter:
    """Keeps the conversations that are of use, and counts why others are left out.

    Args:
        middle: number of template tokens between user message and answer.
        eos: tokens that end an answer.
        unprintable: bool [V], see `unprintable_tokens`; None to let all pass.
        own_messages: the target wrote the user messages, so they are checked too.

    Attributes:
        left_out: how many were left out so far, by reason.
    """

    def __init__(
        self, middle: int, eos: frozenset[int], unprintable: NDArray[np.bool_] | None, own_messages: bool
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._middle = middle
        self._eos = eos
        self._unprintable = unprintable
        self._own_messages = own_messages

    def keep(self, found: Sequence[Conversation | str], known: set[bytes]) -> list[Conversation]:
        """Return the conversations to keep, in order.

        Args:
            found: conversations, or the reason why there is none.
            known: keys of user messages that came up before (`Conversation.key`).
        """
        known = set(known)
        kept = []
        for one in found:
            reason = one if isinstance(one, str) else self._fault(one, known)
            if reason:
                self.left_out[reason] += 1
            elif isinstance(one, Conversation):
                known.add(one.key)
                kept.append(one)
        return kept

    def _fault(self, conversation: Conversation, known: set[bytes]) -> str | None:
        answer = conversation.answer
        message = conversation.tokens[: conversation.answer_start - self._middle].tolist()
        if len(answer) < SHORTEST_ANSWER:
            return "answer too short"
        if self._own_messages and is_looping(message):
            return "turn in a loop"
        if answer[-1] in self._eos:
            answer = answer[:-1]
        if self._garbled(answer) or (self._own_messages and self._garbled(message)):
            return "unprintable"
        return "duplicate turn" if conversation.key in known else None

    def _garbled(self, tokens: list[int]) -> bool:
        return self._unprintable is not None and self._unprintable[tokens].mean() > _MOST_UNPRINTABLE
