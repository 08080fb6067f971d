"""Try all causal-LM families of the installed transformers: tiny models, against `generate` and plain forwards.

python tests/families/sweep.py run RESULTS [FAMILY ...]   one JSON line a family; goes on where it stopped
python tests/families/sweep.py table RESULTS              a Markdown table of the outcomes
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS = 120
"""A family that takes longer is stopped; most take 5 to 10 s on one core."""
_WIDEST = 110
"""Characters of a reason in the table."""
BYTES = 5 * 2**30
"""Memory a family may take; with half of it the import of torch alone fails on some machines."""


def main(arguments: list[str]) -> int:
    """Run the command named first."""
    if len(arguments) < 2 or arguments[0] not in ("run", "table"):
        print(__doc__)
        return 2
    path = Path(arguments[1])
    if arguments[0] == "table":
        print(table(_results(path)))
        return 0
    run(path, arguments[2:])
    bad = [result for result in _results(path) if _kind(result) in ("WRONG TEXT", "RAW EXCEPTION", "stopped")]
    return 1 if bad else 0


def run(path: Path, names: list[str]) -> None:
    """Run the families named, or all that are not in the file yet, each in a process of its own; append outcomes."""
    import family_cases  # noqa: F401  imported once, before the processes part
    import torch
    import transformers
    from tiny_families import FAMILIES

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    done = set() if names else {result["family"] for result in _results(path)}
    for family in names or [family for family in FAMILIES if family not in done]:
        began = time.monotonic()
        result = _in_process(family)
        result["seconds"] = round(time.monotonic() - began, 1)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['seconds']:6.1f} s  {family}: {result['outcome']}", flush=True)


def examine(family: str) -> dict[str, Any]:
    """Build a family's tiny model, run its cases, and return its line of the results."""
    from family_cases import Cases, said
    from tiny_families import FAMILIES, build

    line: dict[str, Any] = {"family": family, "class": FAMILIES[family]}
    try:
        tiny = build(family)
    except Exception as error:
        return line | {"outcome": f"not runnable: no tiny model ({said(error)})"}
    cases = Cases(tiny.model)
    outcome = cases.run() or judged(cases.found, cases.trees)
    return line | {
        "outcome": outcome,
        "cases": cases.found,
        "notes": cases.notes,
        "no_trees": cases.trees,
        "far": round(tiny.far, 4),
        "window_felt": tiny.window_felt,
    }


def judged(found: dict[str, str], no_trees: str) -> str:
    """Return the outcome of a family from those of its cases, the worst first."""
    for kind, name in (("wrong", "WRONG TEXT"), ("raw", "RAW EXCEPTION")):
        bad = [
            f"{case}: {what.removeprefix(kind + ': ')}"
            for case, what in found.items()
            if what.startswith(kind)
        ]
        if bad:
            return f"{name} ({'; '.join(bad)})"
    refused: dict[str, list[str]] = {}
    for case, what in found.items():
        if what.startswith("refused"):
            refused.setdefault(what[9:], []).append(case)
    if refused:
        return "refused: " + "; ".join(f"{what} [{', '.join(cases)}]" for what, cases in refused.items())
    return f"plain only ({no_trees})" if no_trees else "trees"


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the outcomes, the last of each family, after their counts."""
    last = {result["family"]: result for result in results}
    kinds = Counter(_kind(result) for result in last.values())
    lines = [
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "",
        "| family | decoded | why |",
        "| --- | --- | --- |",
    ]
    for family, result in sorted(last.items(), key=lambda item: (_kind(item[1]), item[0])):
        kind = _kind(result)
        why = result["outcome"].removeprefix(kind).strip(" :")
        why = (
            why.removesuffix(")").removeprefix("(").split(": draft trees cannot")[0].split("; use drafter")[0]
        )
        lines.append(f"| {family} | {kind} | {why.split(' [')[0].replace('|', '/')[:_WIDEST]} |")
    return "\n".join(lines)


def _kind(result: dict[str, Any]) -> str:
    return result["outcome"].split(" (")[0].split(":")[0]


def _in_process(family: str) -> dict[str, Any]:
    """Examine a family in a fork of this process, with limits; torch is imported once for all."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        signal.alarm(SECONDS)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(examine(family)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if text:
        return json.loads(text)
    why = (
        f"more than {SECONDS} s"
        if os.WTERMSIG(status) == signal.SIGALRM
        else f"the process ended with {status}"
    )
    return {"family": family, "class": "", "outcome": f"stopped: {why}"}


def _results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
