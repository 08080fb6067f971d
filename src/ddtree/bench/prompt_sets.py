"""Prompt sets: the one that ships, files of JSON lines, and public benchmarks on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError, is_whole

SMALL = "small"
MOST = 128  # prompts of a hub set where --per-task says nothing, as in the paper
_STEPS = "{}\n\nReason step by step, and put the final answer in \\boxed{{}}."
_CODE = "Complete this Python function.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer.

    Attributes:
        id: unique among the prompts of a run.
        task: group in the tables, such as "code".
        turns: the user's messages, first to last; at least one.
    """

    id: str
    task: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class HubSet:
    """A data set on the hub, and how its rows become prompts.

    Attributes:
        source: data set id, or the "hf://" address of a file of JSON lines within one.
        split: of the data set.
        field: column with the prompt, or with a list of a conversation's user messages.
        template: the prompt, with {} for the field.
        config: name of a part of the data set.
        extra: a second column, put below the first where it is not empty.
    """

    source: str
    split: str
    field: str
    template: str = "{}"
    config: str | None = None
    extra: str | None = None


SETS: dict[str, tuple[HubSet, ...]] = {
    "gsm8k": (HubSet("openai/gsm8k", "test", "question", _STEPS, config="main"),),
    "math500": (HubSet("HuggingFaceH4/MATH-500", "test", "problem", _STEPS),),
    "aime": (
        HubSet("HuggingFaceH4/aime_2024", "train", "problem", _STEPS),
        HubSet("math-ai/aime25", "test", "problem", _STEPS),
    ),
    "humaneval": (HubSet("openai/openai_humaneval", "test", "prompt", _CODE),),
    "mbpp": (HubSet("google-research-datasets/mbpp", "test", "prompt", config="sanitized"),),
    "livecodebench": (
        HubSet("hf://datasets/livecodebench/code_generation_lite/test.jsonl", "train", "question_content"),
    ),
    "swebench-lite": (HubSet("princeton-nlp/SWE-bench_Lite", "test", "problem_statement"),),
    "mtbench": (HubSet("HuggingFaceH4/mt_bench_prompts", "train", "prompt"),),
    "alpaca": (HubSet("tatsu-lab/alpaca", "train", "instruction", extra="input"),),
}


def read(names: Sequence[str], per_task: int | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """Read the prompts of some sets, one of each task in turn: a machine that slows down does so for all alike.

    Args:
        names: "small", a file of JSON lines `{"id": ..., "task": ..., "turns": [...]}`, or a name of `SETS`.
        per_task: most prompts of each task, the first ones; for example 3.
        limit: most prompts in all.

    Raises:
        ConfigError: a set is unknown, cannot be read or is malformed; two prompts have one id; none is left.
    """
    for option, count in (("per-task", per_task), ("limit", limit)):
        if count is not None and count < 1:
            raise ConfigError(f"--{option} {count} selects no prompt: give 1 or more")
    seen: set[str] = set()
    tasks: dict[str, list[BenchPrompt]] = {}
    for prompt in (prompt for name in dict.fromkeys(names) for prompt in _read_set(name, per_task)):
        if prompt.id in seen:
            raise ConfigError(f"two prompts have the id {prompt.id!r}: give each one of its own")
        seen.add(prompt.id)
        tasks.setdefault(prompt.task, []).append(prompt)
    in_turn = zip_longest(*(prompts[:per_task] for prompts in tasks.values()))
    chosen = [prompt for group in in_turn for prompt in group if prompt is not None][:limit]
    if not chosen:
        raise ConfigError(f"{', '.join(names) or 'no prompt set'} holds no prompt: name another set")
    return chosen


def digest(prompts: Iterable[BenchPrompt]) -> str:
    """Return 16 hex digits that identify exactly these prompts in this order."""
    text = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(text: str, where: str) -> list[BenchPrompt]:
    """Parse prompts in JSON lines; blank lines are skipped. Raises ConfigError with the number of a bad line."""
    # Not `splitlines`: JSON may hold characters that it takes for the end of a line.
    lines = enumerate(text.split("\n"), 1)
    return [_parse_line(line, f"{where}, line {number}") for number, line in lines if line.strip()]


def _read_set(name: str, per_task: int | None) -> list[BenchPrompt]:
    if name == SMALL:
        text = files("ddtree").joinpath("assets/prompts/small.jsonl").read_text(encoding="utf-8")
        return parse(text, SMALL)
    if name in SETS:
        found = _hub_turns(name)[: per_task or MOST]
        return [BenchPrompt(f"{name}-{number}", name, turns) for number, turns in enumerate(found, 1)]
    try:
        return parse(Path(name).expanduser().read_text(encoding="utf-8-sig"), name)
    except FileNotFoundError:
        known = ", ".join((SMALL, *SETS))
        raise ConfigError(
            f"prompts {name!r} are neither a file nor one of the sets {known}: name one of these"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"prompts {name} cannot be read ({why}): give a file of JSON lines") from error


def _parse_line(line: str, where: str) -> BenchPrompt:
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
    for key in ("id", "task"):
        value = raw.get(key)
        if not is_whole(value) and (not isinstance(value, str) or not value):
            raise ConfigError(f'{where}: "{key}" must be a text or a whole number')
    return BenchPrompt(str(raw["id"]), str(raw["task"]), tuple(turns))


def _hub_turns(name: str) -> list[tuple[str, ...]]:
    """Return the user messages of each conversation of a set of the hub.

    Raises:
        ConfigError: the package `datasets` is missing, or the set cannot be fetched or read.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"prompt set {name!r} comes from the hub, which needs the package datasets: "
            "pip install 'ddtree[bench]', or give a JSONL file"
        )
    found: list[tuple[str, ...]] = []
    for part in SETS[name]:
        try:
            found += [_turns_of_row(part, row) for row in _load(part)]
        except Exception as error:
            # The hub's client, the file formats and the network each raise their own.
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"prompt set {name!r} ({part.source}) cannot be loaded ({why}): "
                "check the connection, or give a JSONL file"
            ) from error
    return found


def _load(part: HubSet) -> Any:
    from datasets import load_dataset

    if part.source.startswith("hf://"):
        return load_dataset("json", data_files=part.source, split=part.split)
    return load_dataset(part.source, part.config, split=part.split)


def _turns_of_row(part: HubSet, row: Any) -> tuple[str, ...]:
    value = row[part.field]
    if isinstance(value, list):
        return tuple(value)
    more = row[part.extra] if part.extra else None
    return (part.template.format(value) + (f"\n\n{more}" if more else ""),)
