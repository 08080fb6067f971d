"""Prompt sets of the Hugging Face hub by name: the ten of the DDTree paper (section 4)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ddtree.errors import ConfigError

MOST = 128  # prompts taken of a set where nothing else is said, as in the paper
_STEPS = "{}\n\nReason step by step, and put the final answer in \\boxed{{}}."
_CODE = "Complete this Python function.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class HubSet:
    """Where a set lies.

    Attributes:
        source: dataset id, or "json:" and the place of a file of JSON lines within one.
        split: of the dataset.
        field: holds the prompt, or a list of a conversation's user messages.
        template: what is asked, with {} for the field.
        config: name of a part of the dataset.
        extra: a second field, put below the first where it is not empty.
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
        HubSet(
            "json:hf://datasets/livecodebench/code_generation_lite/test.jsonl", "train", "question_content"
        ),
    ),
    "swebench-lite": (HubSet("princeton-nlp/SWE-bench_Lite", "test", "problem_statement"),),
    "mtbench": (HubSet("HuggingFaceH4/mt_bench_prompts", "train", "prompt"),),
    "alpaca": (HubSet("tatsu-lab/alpaca", "train", "instruction", extra="input"),),
}


def rows(name: str, most: int | None = None) -> list[tuple[str, ...]]:
    """The user messages of a set's first conversations.

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
            found += [_turns(part, row) for row in _load(part)]
        except Exception as error:
            # The hub's client, the file formats and the network each raise their own.
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"prompt set {name!r} ({part.source}) cannot be loaded ({why}): "
                "check the connection, or give a JSONL file"
            ) from error
    return found[: most or MOST]


def _load(part: HubSet) -> Any:
    from datasets import load_dataset

    kind, _, files = part.source.partition(":")
    if kind == "json":
        return load_dataset("json", data_files=files, split=part.split)
    return load_dataset(part.source, part.config, split=part.split)


def _turns(part: HubSet, row: Any) -> tuple[str, ...]:
    value = row[part.field]
    if isinstance(value, list):
        return tuple(value)
    more = row.get(part.extra) if part.extra else None
    text = part.template.format(value)
    return (f"{text}\n\n{more}" if more else text,)
