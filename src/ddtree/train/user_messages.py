"""User messages for synthesis: where the chat template puts them, and reading them from a file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError

_SENTINEL = "@@user-text@@"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template around one user message, as token ids.

    Attributes:
        prefix: tokens before the message.
        middle: tokens after it, up to where the answer begins; the first one ends the message.
    """

    prefix: list[int]
    middle: list[int]

    @staticmethod
    def of(tokenizer: Any) -> ChatTemplate:
        """Cut the tokenizer's template around the user's text.

        Raises:
            ConfigError: the tokenizer has no chat template, or one that changes the user's text.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so the target cannot write user turns itself"
            )
        before, _, after = _render(tokenizer, _SENTINEL).partition(_SENTINEL)
        if not before or not after:
            raise ConfigError("the target's chat template does not keep the user's text whole")
        prefix, middle = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return ChatTemplate(prefix, middle)


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
    for ids in tokenizer([_render(tokenizer, text) for text in distinct], add_special_tokens=False)[
        "input_ids"
    ]:
        message = ids[len(before) : len(ids) - len(after)]
        # A tokenizer may join the ends of a message with the template's text around it.
        if not message or ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            left_out["turn merges with the template"] += 1
        elif len(message) > longest:
            left_out["turn too long"] += 1
        else:
            messages.append([int(token) for token in message])
    return messages, +left_out


def _render(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
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
    return text
