"""The worker's counters, asked for over vLLM's own calls to workers, as Prometheus reads them.

The worker may live in another process than the HTTP server, and with data parallelism there are several: the figures
are their sums. Ranks of one engine count the same steps, so the first one's are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

METHOD = "ddtree_counters"
"""Of the worker."""
FAILED = "drafting_failed"
"""Among the counters, the one that is a state: 1 where drafting has failed."""
PREFIX = "ddtree_vllm_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Counters = Mapping[str, float | Mapping[str, float]]

# Each with its label, where it has one.
_KNOWN = {
    "steps": ("Verifications of a request, drafted for or not.", None),
    "drafted_steps": ("Verifications of a request that had drafted nodes.", None),
    "nodes": ("Drafted nodes verified; all branches of a tree count.", None),
    "accepted": ("Drafted nodes accepted.", None),
    "accepted_per_depth": ("Accepted nodes by their depth in the tree.", "depth"),
    "arms": ("Verifications of a request by the way it was drafted for.", "arm"),
    "seconds": ("Where the worker's time went.", "part"),
    FAILED: ("Engines in which drafting has failed, and is off.", None),
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
    """Counters added up by name and label; what else the worker tells is left out."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in _KNOWN:
                continue
            if isinstance(value, Mapping):
                inner = total.setdefault(name, {})
                for label, number in value.items():
                    inner[label] = inner.get(label, 0) + number
            else:
                total[name] = total.get(name, 0) + value
    return total


def text(found: Counters) -> str:
    """Summed counters in Prometheus' text format."""
    lines = []
    for name, value in found.items():
        about, label = _KNOWN[name]
        kind, full = ("gauge", f"{PREFIX}{name}") if name == FAILED else ("counter", f"{PREFIX}{name}_total")
        lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
        if isinstance(value, Mapping):
            lines += [f'{full}{{{label}="{_escaped(key)}"}} {number}' for key, number in value.items()]
        else:
            lines.append(f"{full} {value}")
    return "\n".join([*lines, ""])


def _escaped(key: object) -> str:
    return str(key).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
