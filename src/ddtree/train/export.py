"""The finished drafter: a checkpoint in z-lab's layout, its n-gram table, and a card that says how it was made."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters.dflash.heads import KINDS
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.data import written_whole
from ddtree.train.trainer import LOG, read_log

DRAFTER = "dflash"
HEADS = "heads"
NGRAMS = "ngrams.safetensors"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Figure:
    """Acceptance of one drafter along `count` answers of one set and temperature: tokens per round by budget."""

    answers: str
    count: int
    drafter: str
    temperature: int
    tau: dict[str, float]


def machine(device: torch.device) -> str:
    """What a device is, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def write_json(path: Path, value: Any) -> None:
    """Write in one step."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, step: str) -> Any:
    """Raises CheckpointError, naming the step that writes it, when the file is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged; run `ddtree train {step}` first") from error


def export(work: Path, out: Path) -> None:
    """Copy the fitted drafter and its table from a work folder to `out`, with a card beside the checkpoint.

    Raises:
        CheckpointError: the work folder lacks a step's results.
    """
    summary = read_json(work / SUMMARY, "fit")
    figures = [Figure(**figure) for figure in read_json(work / EVALUATION, "evaluate")]
    for name in (f"{DRAFTER}/config.json", f"{DRAFTER}/model.safetensors"):
        if not (work / name).exists():
            raise CheckpointError(f"{work / name} is missing; run `ddtree train fit` first")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(work / DRAFTER, out / DRAFTER, dirs_exist_ok=True)
    for kind in KINDS:
        if (work / kind / "config.json").exists():
            shutil.copytree(work / kind, out / kind, dirs_exist_ok=True)
    if (work / NGRAMS).exists():
        shutil.copyfile(work / NGRAMS, out / NGRAMS)
    path = work / HEADS / SUMMARY
    heads = read_json(path, "heads") if path.exists() else None
    (out / DRAFTER / "README.md").write_text(card(summary, figures, heads), encoding="utf-8")


def card(summary: dict[str, Any], figures: list[Figure], heads: dict[str, Any] | None = None) -> str:
    """The model card, in Markdown; `heads` is the summary of the step of that name, if it was run."""
    data, recipe = summary["data"], summary["recipe"]
    lines = [
        "---",
        "license: apache-2.0",
        "tags: [speculative-decoding, dflash, ddtree]",
        "---",
        "",
        f"# DFlash drafter for {summary['target']}",
        "",
        f"A block-diffusion drafter ({summary['parameters'] / 1e6:.1f} M parameters, z-lab's layout) and an n-gram "
        "table, made by `ddtree train`. They propose; the target decides, so its output does not change.",
        "",
        "## Data",
        "",
        f"{data['conversations']:,} conversations, {data['answer_tokens']:,} tokens of answers by the target; "
        f"{_turns(data)}. {data['greedy_share']:.0%} of the answers are greedy, the others at temperature 1, up to "
        f"{data['max_answer']} tokens, loops cut. {data['held_out']:,} conversations were held out. Nothing else was "
        "used.",
        "",
        "## Recipe",
        "",
        "Target, its embedding and its head frozen; layers started from the target's last ones. Random anchors, blocks "
        "packed behind their context, cross-entropy with weights exp(-(k - 1) / gamma), AdamW.",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in recipe.items()),
        f"| machine | {summary['machine']} |",
        f"| time of the fit | {summary['seconds'] / 60:.0f} min |",
        "",
        *([*summary["notes"], ""] if summary.get("notes") else []),
        *_heads(heads),
        "## Acceptance",
        "",
        "Tokens per round (accepted drafted tokens + 1), replayed along n answers not used in training, whose user "
        "turns the target wrote too; other prompts differ. Drafts at T = 1 were made without noise coupling.",
        "",
    ]
    columns = list(dict.fromkeys(name for figure in figures for name in figure.tau))
    lines.append("| answers | n | T | drafter | " + " | ".join(columns) + " |")
    lines.append("| --- " * (4 + len(columns)) + "|")
    for figure in figures:
        cells = [f"{figure.tau[name]:.2f}" if name in figure.tau else "" for name in columns]
        lines.append(
            f"| {figure.answers} | {figure.count} | {figure.temperature} | {figure.drafter} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines) + "\n"


def _turns(data: dict[str, Any]) -> str:
    if data.get("turns_given"):
        return "user turns from a file"
    top_p = f", top-p {data['turn_top_p']}" if data.get("turn_top_p") else ""
    return f"user turns sampled from the chat template at temperature 1{top_p}"


def _heads(summary: dict[str, Any] | None) -> list[str]:
    """The card's section on the heads beside the drafter."""
    if not summary:
        return []
    lines = [
        "## Heads",
        "",
        f"Trained together on the frozen drafter, in {summary['seconds'] / 60:.0f} min.",
        "",
        "| head | parameters | loss | held-out tokens a round, chain |",
        "| --- | --- | --- | --- |",
    ]
    for kind, head in summary["heads"].items():
        lines.append(
            f"| {kind} | {head['parameters'] / 1e6:.1f} M | {head['loss']} | {head['held_out_chain']:.2f} |"
        )
    return [*lines, ""]


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


FIT = "fit"


def plot(work: Path) -> list[Path]:
    """Draw training loss, held-out loss and tokens per round over the minutes; returns the files.

    Raises:
        ConfigError: matplotlib is missing.
        CheckpointError: there is no log.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'ddtree[bench]'")
    logs = {name: read_log(work / name / LOG) for name in (FIT, HEADS)}
    if not any(logs.values()):
        raise CheckpointError(f"{work / FIT / LOG} holds nothing; run `ddtree train fit` first")
    return [_draw(lines, work / f"{name}.png") for name, lines in logs.items() if lines]


def _draw(lines: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(name for line in lines for name in line):
        measured, _, module = name.partition(".")
        if measured in ("loss", "held_out", "tau"):
            axes = right if measured == "tau" else left
            label = {"loss": "training", "held_out": "held out", "tau": "chain"}[measured]
            points = [(line["seconds"] / 60, line[name]) for line in lines if name in line]
            axes.plot(
                *zip(*points, strict=True), label=f"{label} {module}".strip(), marker="." * (len(points) < 2)
            )
    left.set_ylabel("loss")
    right.set_ylabel("tokens a round, held out")
    for axes in (left, right):
        axes.set_xlabel("minutes")
        axes.legend()
    figure.savefig(path, dpi=120)
    return path
