"""The policy's words: how requests ask to be drafted for, the arms to choose from, and the choice for a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree.tree import MAX_DEPTH, DraftTree

Method = Literal["off", "chain", "tree"]
AutoMethod = Literal["auto", "off", "chain", "tree"]
AutoBudget = int | Literal["auto"]
Proposals = Sequence[tuple[str, DraftTree]]
"""Name and own tree of each of several drafters."""

UNMEASURED_BUDGET = 16
"""Nodes of a tree where the budget is "auto" and nothing was measured (reasoned: half accepts shorter runs of text;
double costs a CPU that pays for each node twice as much where nothing is accepted)."""


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Attributes:
        method: "off" (autoregressive), "chain" or "tree".
        members: names of the drafters that draft, in the drafter's order; none with "off".
    """

    method: Method
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.method if self.method == "off" else f"{self.method}@{'+'.join(self.members)}"


OFF = Arm("off")


@dataclass(frozen=True)
class Choice:
    """How a row is drafted for in a round.

    Attributes:
        arm: the drafters.
        budget: most nodes besides the root, e.g. 12.
    """

    arm: Arm
    budget: int


def unmeasured(method: AutoMethod, budget: AutoBudget) -> tuple[Method, int]:
    """Return the fixed method and budget in place of "auto" where there is no policy to decide: a tree of 16 nodes."""
    return "tree" if method == "auto" else method, UNMEASURED_BUDGET if budget == "auto" else budget


@dataclass(frozen=True)
class Request:
    """How a row asks to be drafted for.

    Attributes:
        method: "auto" or a fixed one.
        budget: "auto" or a fixed one.
        members: names of the drafters that may draft for it.
        depth: most depth of its drafts, e.g. 16.
        sampled: its temperature is above 0.
    """

    method: AutoMethod
    budget: AutoBudget
    members: tuple[str, ...]
    depth: int = MAX_DEPTH
    sampled: bool = False

    @property
    def automatic(self) -> bool:
        """Return whether the policy decides something for it."""
        return self.method == "auto" or self.budget == "auto"

    def fixed(self) -> Choice:
        """Return how to draft where no policy decides: "auto" is a tree of 16 nodes."""
        method, budget = unmeasured(self.method, self.budget)
        return Choice(OFF if method == "off" else Arm(method, self.members), budget)

    def arms(self) -> list[Arm]:
        """Return its arms: all its drafters first, then, with "auto", each alone, and last "off"."""
        if self.method == "off" or not self.members:
            return [OFF]
        if self.method != "auto":
            return [Arm(self.method, self.members), OFF]
        alone = [Arm("tree", (name,)) for name in self.members]
        return list(dict.fromkeys([Arm("tree", self.members), *alone, OFF]))
