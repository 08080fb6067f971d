"""The worker's counters, asked for over vLLM's own calls to workers, as Prometheus reads them.

The worker may live in another process than the HTTP server, and with data parallelism there are several: the figures
are their sums. Ranks of one engine count the same steps, so the first one's are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

METHOD = "ddtree_metrics"
"""Of the worker."""
PREFIX = "ddtree_vllm_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Counters = Mapping[str, float | Mapping[str, float]]

_ABOUT = {
    "rounds": "Steps of single requests that verified something, drafted or not.",
    "nodes": "Drafted nodes verified; a tree counts each of its own.",
    "accepted": "Drafted nodes accepted.",
    "accepted_depth": "Rounds by how many drafted nodes were accepted.",
    "arms": "Rounds by the way they were drafted for.",
    "seconds": "Where the worker's time went.",
}


async def gather(engine_client: Any) -> dict[str, Any]:
    """The counters of all engines behind a server, summed.

    Args:
        engine_client: vLLM's `AsyncLLM`.
    """
    call = ("collective_rpc", METHOD, None, (), None)
    engines = await engine_client.engine_core.call_utility_all_async(*call)
    return summed([workers[0] for workers in engines])


def summed(parts: Sequence[Counters]) -> dict[str, Any]:
    """Counters added up by name and label; what else the worker tells, such as means, is left out."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in _ABOUT:
                continue
            if isinstance(value, Mapping):
                inner = total.setdefault(name, {})
                for label, number in value.items():
                    inner[label] = inner.get(label, 0) + number
            else:
                total[name] = total.get(name, 0) + value
    return total


def text(found: Counters) -> str:
    """In Prometheus' text format."""
    lines = []
    for name, value in found.items():
        full = f"{PREFIX}{name}_total"
        lines += [f"# HELP {full} {_ABOUT[name]}", f"# TYPE {full} counter"]
        if isinstance(value, Mapping):
            lines += [f'{full}{{{name}="{_escaped(label)}"}} {number}' for label, number in value.items()]
        else:
            lines.append(f"{full} {value}")
    return "\n".join([*lines, ""])


def _escaped(label: object) -> str:
    return str(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
