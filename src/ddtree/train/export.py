"""The finished drafter: a checkpoint in z-lab's layout, an n-gram table, a model card, pictures of the training."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch

from ddtree.drafters.dflash.heads import KINDS
from ddtree.errors import CheckpointError, ConfigError
from ddtree.policy.cache import device_name
from ddtree.storage import atomic_write
from ddtree.train.training_log import LOG, read_log

DRAFTER = "dflash"
FIT = "fit"
HEADS = "heads"
NGRAMS = "ngrams.safetensors"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class DrafterScore:
    """Acceptance of a drafter along answers of one set and temperature.

    Attributes:
        answers: name of the set, as in "held-out".
        count: number of answers.
        drafter: its name.
        temperature: 0 or 1.
        tau: tokens per round, by budget, as in {"chain": 1.6, "B=8": 2.0}.
    """

    answers: str
    count: int
    drafter: str
    temperature: int
    tau: dict[str, float]


def machine(device: torch.device) -> str:
    """Describe a device: name of the GPU, or name and number of cores of the CPU."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {os.cpu_count()} cores"


def parameters(network: torch.nn.Module) -> int:
    """Count the parameters of a network."""
    return sum(parameter.numel() for parameter in network.parameters())


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, step: str) -> Any:
    """Read the JSON that a step of `ddtree train` has written.

    Raises:
        CheckpointError: the file is missing or damaged; names the step.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged; run `ddtree train {step}` first") from error


def export(work: Path, out: Path) -> None:
    """Copy the trained drafter, its heads and its table from a work folder to `out`, with a model card.

    Raises:
        CheckpointError: the work folder lacks a step's results.
    """
    summary = read_json(work / SUMMARY, "fit")
    scores = [DrafterScore(**score) for score in read_json(work / EVALUATION, "evaluate")]
    for name in (f"{DRAFTER}/config.json", f"{DRAFTER}/model.safetensors"):
        if not (work / name).exists():
            raise CheckpointError(f"{work / name} is missing; run `ddtree train fit` first")
    out.mkdir(parents=True, exist_ok=True)
    for kind in (DRAFTER, *KINDS):
        if (work / kind / "config.json").exists():
            shutil.copytree(work / kind, out / kind, dirs_exist_ok=True)
    if (work / NGRAMS).exists():
        shutil.copyfile(work / NGRAMS, out / NGRAMS)
    path = work / HEADS / SUMMARY
    heads = read_json(path, "heads") if path.exists() else None
    (out / DRAFTER / "README.md").write_text(card(summary, scores, heads), encoding="utf-8")


def card(summary: dict[str, Any], scores: list[DrafterScore], heads: dict[str, Any] | None = None) -> str:
    """Fill in the model card.

    Args:
        summary: what `fit` has written.
        scores: what `evaluate` has measured.
        heads: what `heads` has written, if it was run.
    """
    data = summary["data"]
    template = files("ddtree").joinpath("assets/model_card.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        target=summary["target"],
        parameters=f"{summary['parameters'] / 1e6:.1f}",
        conversations=f"{data['conversations']:,}",
        answer_tokens=f"{data['answer_tokens']:,}",
        user_turns=_user_turns(data),
        greedy_share=f"{data['greedy_share']:.0%}",
        max_answer=data["max_answer"],
        held_out=f"{data['held_out']:,}",
        recipe="\n".join(_row(name.replace("_", " "), value) for name, value in summary["recipe"].items()),
        machine=summary["machine"],
        minutes=f"{summary['seconds'] / 60:.0f}",
        heads=_heads_section(heads) if heads else "",
        acceptance=_acceptance_table(scores),
    )


def _row(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _user_turns(data: dict[str, Any]) -> str:
    if data.get("turns_given"):
        return "user turns from a file"
    top_p = f", top-p {data['turn_top_p']}" if data.get("turn_top_p") else ""
    return f"user turns sampled from the chat template at temperature 1{top_p}"


def _heads_section(summary: dict[str, Any]) -> str:
    lines = [
        "## Heads",
        "",
        f"Trained together on the frozen drafter, in {summary['seconds'] / 60:.0f} min.",
        "",
        _row("head", "parameters", "loss", "held-out tokens a round, chain"),
        _row(*["---"] * 4),
    ]
    for kind, head in summary["heads"].items():
        size, tau = f"{head['parameters'] / 1e6:.1f} M", f"{head['held_out_chain']:.2f}"
        lines.append(_row(kind, size, head["loss"], tau))
    return "\n".join(lines) + "\n\n"


def _acceptance_table(scores: list[DrafterScore]) -> str:
    columns = list(dict.fromkeys(name for score in scores for name in score.tau))
    lines = [_row("answers", "n", "T", "drafter", *columns), _row(*["---"] * (4 + len(columns)))]
    for score in scores:
        cells = [f"{score.tau[name]:.2f}" if name in score.tau else "" for name in columns]
        lines.append(_row(score.answers, score.count, score.temperature, score.drafter, *cells))
    return "\n".join(lines)


def plot(work: Path) -> list[Path]:
    """Draw training loss, held-out loss and tokens per round over the minutes; return the files.

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

    labels = {"loss": "training", "held_out": "held out", "tau": "chain"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(name for line in lines for name in line):
        measured, _, module = name.partition(".")
        if measured not in labels:
            continue
        axes = right if measured == "tau" else left
        minutes = [line["seconds"] / 60 for line in lines if name in line]
        values = [line[name] for line in lines if name in line]
        marker = "." if len(values) < 2 else ""
        axes.plot(minutes, values, label=f"{labels[measured]} {module}".strip(), marker=marker)
    left.set_ylabel("loss")
    right.set_ylabel("tokens a round, held out")
    for axes in (left, right):
        axes.set_xlabel("minutes")
        axes.legend()
    figure.savefig(path, dpi=120)
    return path
