"""The figures of a run as tables, and as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree.bench.report import Table
from ddtree.bench.serving.figures import MEASURES, PERCENTILES, Group, Limits, agreement, groups
from ddtree.bench.serving.runner import Block
from ddtree.errors import ConfigError

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time a token after the first",
    "itl_chunk": "between chunks",
    "itl_token": "between chunks, shared by their tokens",
    "latency": "whole answer",
}
_SHARED = 0.05


class Report:
    """Tables and JSON of a run.

    Args:
        blocks: all of them.
        limits: of goodput.
        comparable: the same message should have got the same text everywhere.
    """

    def __init__(self, blocks: Sequence[Block], limits: Limits, comparable: bool) -> None:
        self._blocks = blocks
        self._limits = limits
        self._groups = groups(blocks)
        self._agreement = agreement(blocks) if comparable else {}
        self._settings = list(dict.fromkeys(setting for _, setting in self._groups))

    def text(self, percentiles: bool = False) -> str:
        """For a terminal."""
        tables = [self._speeds(), *(map(self._spreads, MEASURES) if percentiles else ())]
        return "\n\n".join([*(table.text() for table in tables), *self._remarks()])

    def record(self) -> dict[str, Any]:
        """Figures of each load and setting, and the raw requests, as plain JSON values."""
        return {
            "figures": [
                {"load": load, "drafting": setting, **group.figures(self._limits),
                 "over_first": group.over(self._base(load)), "same_text": self._agreement.get((load, setting))}
                for (load, setting), group in self._groups.items()
            ],
            "blocks": [_raw(block) for block in self._blocks],
        }  # fmt: skip

    def _speeds(self) -> Table:
        first = self._settings[0]
        compared = len(self._settings) > 1
        header = ["load, drafting", "answers", "failed", "tokens/s"]
        header += [f"over {first}", "of the best"] if compared else []
        header += ["TTFT p50", "p95", "TPOT p50", "p95", "tau"]
        header += ["good/s"] if self._limits.given else []
        header += ["same text"] if self._agreement else []
        rows = []
        for (load, setting), group in self._groups.items():
            row = [
                f"{load}, {setting}",
                str(len(group.answers)),
                str(group.failed),
                f"{group.throughput:.1f}",
            ]
            if compared:
                row += [_ratio(group.over(self._base(load))), _ratio(self._of_the_best(load, group))]
            for measure in ("ttft", "tpot"):
                found = group.spread(measure) or {}
                row += [_ms(found.get("p50")), _ms(found.get("p95"))]
            row.append("-" if group.counters.tau is None else f"{group.counters.tau:.2f}")
            row += [f"{group.goodput(self._limits):.2f}"] if self._limits.given else []
            if self._agreement:
                row.append("{} of {}".format(*self._agreement.get((load, setting), (0, 0))))
            rows.append(row)
        return Table("Serving (times in ms)", header, rows)

    def _spreads(self, measure: str) -> Table:
        shares = [f"p{share}" for share in PERCENTILES]
        rows = []
        for (load, setting), group in self._groups.items():
            found = group.spread(measure) or {}
            rows.append([f"{load}, {setting}", *(_ms(found.get(name)) for name in ("mean", *shares))])
        title = f"{measure.replace('_', ' by ').upper()}: {_NAMES[measure]} (ms)"
        return Table(title, ["load, drafting", "mean", *shares], rows)

    def _base(self, load: str) -> Group:
        """What the others are compared with; nothing where a run was broken off before it."""
        return self._groups.get((load, self._settings[0]), Group([]))

    def _of_the_best(self, load: str, group: Group) -> float | None:
        """How it compares with the fastest of the other ways at this load."""
        others = [one for (at, _), one in self._groups.items() if at == load and one is not group]
        ratios = [ratio for one in others if (ratio := group.over(one)) is not None]
        return min(ratios, default=None)

    def _remarks(self) -> list[str]:
        found = []
        answers = [asked.answer for block in self._blocks for asked in block.asked]
        errors = list(dict.fromkeys(answer.error for answer in answers if answer.error))
        if errors:
            found.append("Failed: " + "; ".join(errors[:5]))
        if any(answer.good and answer.output_tokens is None for answer in answers):
            found.append("The server told no usage of some answers: their tokens are not counted.")
        prompts = sum(answer.prompt_tokens or 0 for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        if cached > _SHARED * prompts:
            found.append(
                f"{cached:,} of {prompts:,} prompt tokens came from the server's prefix cache, so TTFT is not that of "
                "new prompts: ddtree serve --prefix-memory 0, or --fresh here, has all processed."
            )
        return found


def write(path: Path, value: dict[str, Any]) -> None:
    """JSON into a file; ConfigError when that cannot be."""
    try:
        path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written ({error.strerror}): name another file") from error


def _raw(block: Block) -> dict[str, Any]:
    step = block.step
    return {
        "load": str(step.load),
        "drafting": step.setting.name,
        "turn": step.turn,
        "number": step.number,
        "seconds": block.seconds,
        "acceptance": block.counters.record(),
        "answers": [
            {
                "id": asked.id,
                "task": asked.task,
                "place": asked.place,
                "message": asked.message,
                "began": asked.answer.began,
                **asked.answer.record(),
            }
            for asked in block.asked
        ],
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
