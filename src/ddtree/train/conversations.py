"""Read user messages, put them into the chat template, and filter the conversations made of them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError, PromptError
from ddtree.prompts import check_text
from ddtree.train.data import Conversation

_SENTINEL = "@@user-text@@"
# How templates write today's date, with a function that transformers gives them.
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template around one user message, as token ids.

    Attributes:
        prefix: tokens before the message.
        middle: tokens after it, up to where the answer begins; the first one ends the message.
        day: time that the template is rendered as of, where it writes today's date; None for now.
    """

    prefix: list[int]
    middle: list[int]
    day: datetime | None = None

    @staticmethod
    def of(tokenizer: Any, day: datetime | None = None) -> ChatTemplate:
        """Cut the tokenizer's template around the user's text.

        Raises:
            ConfigError: the tokenizer has no chat template, or one that changes the user's text.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so the target cannot write user turns itself"
            )
        before, _, after = _render(tokenizer, _SENTINEL, day).partition(_SENTINEL)
        if not before or not after:
            raise ConfigError("the target's chat template does not keep the user's text whole")
        prefix, middle = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return ChatTemplate(prefix, middle, day)


def read_user_messages(path: Path) -> list[str]:
    """Read the first user message of each line of a file of JSON lines; blank lines are skipped.

    A line is `{"turns": [text, ...]}`, `{"prompt": text}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Raises:
        ConfigError: the file cannot be read or holds no message, or a line is none of these; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read ({why}): give a file of JSON lines") from error
    messages = [_first_message(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not messages:
        raise ConfigError(f"--prompts {path} holds no prompt: give a file of JSON lines")
    return messages


def encode_user_messages(
    tokenizer: Any, template: ChatTemplate, texts: list[str], longest: int
) -> tuple[list[list[int]], Counter[str]]:
    """Encode each distinct message as it is within the template.

    Args:
        tokenizer: the target's.
        template: cut from the tokenizer's.
        texts: the messages.
        longest: most tokens of a message, as in 512; longer ones are left out.

    Returns:
        The token ids of each message, and how many messages were left out, by reason.
    """
    distinct = list(dict.fromkeys(texts))
    left_out = Counter({"duplicate turn": len(texts) - len(distinct)})
    before, after = template.prefix, template.middle
    messages = []
    for ids in tokenizer(
        [_render(tokenizer, text, template.day) for text in distinct], add_special_tokens=False
    )["input_ids"]:
        message = ids[len(before) : len(ids) - len(after)]
        # A tokenizer may join the ends of a message with the template's text around it.
        if not message or ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            left_out["turn merges with the template"] += 1
        elif len(message) > longest:
            left_out["turn too long"] += 1
        else:
            messages.append([int(token) for token in message])
    return messages, +left_out


def _render(tokenizer: Any, text: str, day: datetime | None) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if isinstance(template, str) and day is not None:
        template = _TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    rendered: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template=template if isinstance(template, str) else None,
        add_generation_prompt=True,
        tokenize=False,
    )
    return rendered


def _first_message(line: str, where: str) -> str:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})") from error
    text = None
    if isinstance(raw, dict):
        turns, messages = raw.get("turns"), raw.get("messages")
        if isinstance(turns, list) and turns:
            text = turns[0]
        elif isinstance(messages, list):
            users = (m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user")
            text = next(users, None)
        else:
            text = raw.get("prompt")
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f'{where} has no user turn: write {{"turns": [text]}}, {{"prompt": text}} or {{"messages": [...]}}'
        )
    try:
        check_text(text)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}") from error
    return text


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
