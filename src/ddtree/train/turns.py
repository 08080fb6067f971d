"""The text around and of user turns: the chat template cut open, and turns given in a file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError

_SENTINEL = "@@user-text@@"


@dataclass(frozen=True)
class Template:
    """A chat template around one user turn: token ids before it, and after it up to where the answer begins."""

    prefix: list[int]
    middle: list[int]

    @staticmethod
    def of(tokenizer: Any) -> Template:
        """Raises ConfigError where the tokenizer has no chat template, or one that changes the user's text."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so the target cannot write user turns itself"
            )
        before, _, after = _templated(tokenizer, _SENTINEL).partition(_SENTINEL)
        if not before or not after:
            raise ConfigError("the target's chat template does not keep the user's text whole")
        prefix, middle = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return Template(prefix, middle)


def read_turns(path: Path) -> list[str]:
    """The first user turn of each line of a file of JSON lines; blank lines are passed over.

    A line is `{"turns": [text, ...]}`, `{"prompt": text}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Raises:
        ConfigError: the file cannot be read or holds no turn, or a line is none of these; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read ({why}): give a file of JSON lines") from error
    turns = [_first_turn(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not turns:
        raise ConfigError(f"--prompts {path} holds no prompt: give a file of JSON lines")
    return turns


def encode_turns(
    tokenizer: Any, template: Template, texts: list[str], longest: int
) -> tuple[list[list[int]], Counter[str]]:
    """Token ids of each different turn, as they stand in the template; and how many were left out, by reason.

    Args:
        longest: most tokens of a turn; longer ones are left out.
    """
    left_out: Counter[str] = Counter()
    different = list(dict.fromkeys(texts))
    left_out["duplicate turn"] = len(texts) - len(different)
    whole = [_templated(tokenizer, text) for text in different]
    before, after = template.prefix, template.middle
    turns = []
    for ids in tokenizer(whole, add_special_tokens=False)["input_ids"]:
        turn = ids[len(before) : len(ids) - len(after)]
        # A tokenizer may join the ends of a turn with the template's text around it.
        if not turn or ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            left_out["turn merges with the template"] += 1
        elif len(turn) > longest:
            left_out["turn too long"] += 1
        else:
            turns.append([int(token) for token in turn])
    return turns, +left_out


def _templated(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return rendered


def _first_turn(line: str, where: str) -> str:
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
