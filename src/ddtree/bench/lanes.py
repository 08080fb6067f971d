"""Cells as ways of decoding on one pair: each is what a user would have who loaded just that."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddtree.bench.answers import Answer
from ddtree.bench.cells import Cell
from ddtree.drafters import parts_of
from ddtree.drafters.merged import Merged
from ddtree.engine import Engine
from ddtree.noise import PLAIN
from ddtree.sampling import SamplingParams

_WIDTHS = sorted({round(2 ** (step / 4)) for step in range(41)})
"""Nodes at which a latency curve is written down: 1 to 1024, root included."""


class Lane:
    """One cell. Plain decoding gathers no features and feeds no drafter.

    Args:
        cell: what to measure.
        target: shared by all lanes; one decodes at a time.
        drafter: of the pair, in use by no engine; the lane takes those parts of it that the cell names.
        policy: decides what the cell leaves open, and is this lane's alone, so that it learns from nothing else.
    """

    def __init__(self, cell: Cell, target: Any, drafter: Any, policy: Any = None) -> None:
        self.cell = cell
        self.name = cell.name
        self.target = target
        self.drafter = chosen(cell, drafter)
        self.policy = policy
        self._contexts: list[float] = []

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone. Raises what the engine raises."""
        with _coupling(self.drafter, self.cell.coupled):
            engine = Engine(self.target, self.drafter, max_rows=1)
            engine.policy = self.policy
            try:
                sequence = engine.add(prompt, params, method=self.cell.method, budget=self.cell.budget)
                while not engine.idle:
                    engine.step()
            finally:
                engine.close()
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.stats
        self._contexts.append(len(prompt) + stats.output_tokens / 2)
        return Answer(
            sequence.output, stats.total, stats.ttft, stats.rounds, stats.nodes, dict(stats.accepted),
            dict(stats.seconds), dict(stats.arms) if self.cell.adaptive else {},
        )  # fmt: skip

    def learnt(self) -> list[dict[str, Any]]:
        """The policy's state and its latency curve, at the mean context of what was decoded."""
        if self.policy is None or not self._contexts:
            return []
        context = statistics.mean(self._contexts)
        seconds = [round(self.policy.costs.verify(width - 1, 1, context), 7) for width in _WIDTHS]
        return [
            {"kind": "policy", "cell": self.name, "state": self.policy.state()},
            {"kind": "latency", "cell": self.name, "context": context, "widths": _WIDTHS, "seconds": seconds},
        ]


def chosen(cell: Cell, drafter: Any) -> Any:
    """What drafts for a cell: nothing, the whole drafter, or some of its parts."""
    if cell.method == "off":
        return None
    if cell.members is None:
        return drafter
    named = [part for part in parts_of(drafter) if part.name in cell.members]
    return named[0] if len(named) == 1 else Merged(named)


@contextmanager
def _coupling(drafter: Any, coupled: bool) -> Iterator[None]:
    """Inside the block, a drafter that shall not look at the noise does not."""
    changed = [] if coupled else [part for part in parts_of(drafter) if hasattr(part, "coupling")]
    before = [part.coupling for part in changed]
    for part in changed:
        part.coupling = PLAIN
    try:
        yield
    finally:
        for part, coupling in zip(changed, before, strict=True):
            part.coupling = coupling
