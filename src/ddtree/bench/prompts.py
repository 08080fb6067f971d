"""Prompt sets: the one that ships, JSONL files, datasets of the hub by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ddtree.bench import hub
from ddtree.errors import ConfigError

SMALL = "small"


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer.

    Attributes:
        id: unique among the prompts of a run.
        task: what it is counted to.
        turns: the user's messages, first to last; at least one.
    """

    id: str
    task: str
    turns: tuple[str, ...]


def read(names: Sequence[str], per_task: int | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of some sets, taken from their tasks in turn.

    Args:
        names: "small", a file of JSON lines `{"id": ..., "task": ..., "turns": [...]}`, or a name of `hub.SETS`.
        per_task: most prompts of each task, the first ones.
        limit: most prompts in all.

    Raises:
        ConfigError: a set is unknown, cannot be read or is malformed; two prompts have one id; none is left.
    """
    for option, count in (("per-task", per_task), ("limit", limit)):
        if count is not None and count < 1:
            raise ConfigError(f"--{option} {count} selects no prompt: give 1 or more")
    found = [prompt for name in dict.fromkeys(names) for prompt in _set(name, per_task)]
    seen: set[str] = set()
    for prompt in found:
        if prompt.id in seen:
            raise ConfigError(f"two prompts have the id {prompt.id!r}: give each one of its own")
        seen.add(prompt.id)
    chosen = _in_turn(found, per_task)[:limit]
    if not chosen:
        raise ConfigError(f"{', '.join(names) or 'no prompt set'} holds no prompt: name another set")
    return chosen


def digest(prompts: Iterable[BenchPrompt]) -> str:
    """A short name of exactly these prompts in this order."""
    text = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(text: str, where: str) -> list[BenchPrompt]:
    """Prompts out of JSON lines; blank ones are passed over. Raises ConfigError with the number of a bad line."""
    # Texts may hold characters that `splitlines` takes for the end of a line.
    lines = enumerate(text.split("\n"), 1)
    return [_prompt(line, f"{where}, line {number}") for number, line in lines if line.strip()]


def _set(name: str, per_task: int | None) -> list[BenchPrompt]:
    if name == SMALL:
        text = files("ddtree").joinpath("assets/prompts/small.jsonl").read_text(encoding="utf-8")
        return parse(text, SMALL)
    if name in hub.SETS:
        rows = hub.rows(name, per_task)
        return [BenchPrompt(f"{name}-{number}", name, turns) for number, turns in enumerate(rows, 1)]
    path = Path(name).expanduser()
    try:
        return parse(path.read_text(encoding="utf-8-sig"), name)
    except FileNotFoundError:
        known = ", ".join((SMALL, *hub.SETS))
        raise ConfigError(
            f"prompts {name!r} are neither a file nor one of the sets {known}: name one of these"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"prompts {name} cannot be read ({why}): give a file of JSON lines") from error


def _prompt(line: str, where: str) -> BenchPrompt:
    try:
        raw = json.loads(line)
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half of a character ({error.reason}): write it whole") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{where} is not JSON ({error}): write {{"id", "task", "turns"}}') from error
    if not isinstance(raw, dict):
        raise ConfigError(f'{where} is no object: write {{"id": ..., "task": ..., "turns": [...]}}')
    turns = raw.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f'{where}: "turns" must be a list of at least one text')
    return BenchPrompt(_name(raw, "id", where), _name(raw, "task", where), tuple(turns))


def _name(raw: dict[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(f'{where}: "{key}" must be a text or a whole number')
    return str(value)


def _in_turn(prompts: list[BenchPrompt], per_task: int | None) -> list[BenchPrompt]:
    """One prompt of each task, then the next of each: a machine that slows down does so for all tasks alike."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    kept = [of_task[:per_task] for of_task in by_task.values()]
    longest = max(map(len, kept), default=0)
    return [of_task[place] for place in range(longest) for of_task in kept if place < len(of_task)]
