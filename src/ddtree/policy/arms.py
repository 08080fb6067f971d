"""Arms: the ways to decode among which the controller chooses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Method = Literal["off", "chain", "tree"]
AutoMethod = Literal["auto", "off", "chain", "tree"]
AutoBudget = int | Literal["auto"]


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
UNMEASURED_BUDGET = 16
"""Nodes where budgets are to be found, and nothing was measured to find them by."""


def arms_for(
    method: AutoMethod, members: Sequence[str], free: Collection[str] = (), budget: AutoBudget = "auto"
) -> list[Arm]:
    """The arms of a request, the full one first: every drafter.

    A request that fixes its method still has "off": a budget of none. With drafters that cost next to nothing it is
    left out, where the budget is to be found: their trees are of no nodes wherever none pays, and go on telling which
    do. A chain is one drafter's, and so there is no chain of several.

    Args:
        method: as the request asks.
        members: the drafters that may draft for it; several have an arm each beside the one of all.
        free: drafters that cost next to nothing, and so draft in every tree.
        budget: as the request asks.
    """
    own = tuple(members)
    if method == "off" or not own:
        return [OFF]
    if method != "auto":
        arms = [Arm(method, own)]
    else:
        trees = [Arm("tree", tuple(name for name in own if name == asked or name in free)) for asked in own]
        chains = [Arm("chain", (name,)) for name in own]
        arms = list(dict.fromkeys([Arm("tree", own), *trees, *chains]))
    spare = budget == "auto" and any(set(free).issuperset(arm.members) for arm in arms)
    return arms if spare else [*arms, OFF]
