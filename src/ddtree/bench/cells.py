"""What is measured: a way of decoding, written as a short name.

off   chain   tree:16   tree:auto   auto   chain@dflash   tree:16@dflash+lookup   tree:16+uncoupled
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddtree.errors import ConfigError
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.tree import MAX_BUDGET, MAX_DEPTH

PLAIN = "off"
UNCOUPLED = "+uncoupled"
_FORMS = "off, chain, tree:N, tree:auto or auto, then @DRAFTER[+DRAFTER], then +uncoupled"


@dataclass(frozen=True)
class Cell:
    """One way of decoding.

    Attributes:
        name: as it was written.
        method, budget: what the engine is given; a chain's budget is its depth.
        members: names of the drafters that draft; None for all there are.
        coupled: sampled rows' noise may be looked at while drafting.
    """

    name: str
    method: AutoMethod
    budget: AutoBudget
    members: tuple[str, ...] | None = None
    coupled: bool = True

    @property
    def adaptive(self) -> bool:
        """Something is left for a policy to decide."""
        return "auto" in (self.method, self.budget)


def parse(text: str, members: Sequence[str] = ()) -> Cell:
    """A cell by its name.

    Args:
        members: names of the drafters at hand; none when the pair has no drafter.

    Raises:
        ConfigError: the name is malformed, names a drafter that is not there, or needs one where there is none.
    """
    body = text.removesuffix(UNCOUPLED)
    way, at, listed = body.partition("@")
    method, colon, count = way.partition(":")
    named = tuple(listed.split("+")) if at else None
    budget = _budget(method, count, colon, text)
    if method == PLAIN and text != PLAIN:
        raise ConfigError(f"cell {text!r}: off drafts nothing, so it takes no drafter and no coupling")
    if method != PLAIN and not members:
        raise ConfigError(f"cell {text!r} needs a drafter, and there is none: name one with --drafter")
    for name in named or ():
        if name not in members:
            raise ConfigError(
                f"cell {text!r}: there is no drafter {name!r}; choose from {', '.join(members)}"
            )
    if named is not None and len(set(named)) < len(named):
        raise ConfigError(f"cell {text!r} names a drafter twice")
    return Cell(text, _METHODS[method], budget, named, body == text)


def parse_all(names: Iterable[str], members: Sequence[str] = ()) -> list[Cell]:
    """Cells by their names, `off` first whether named or not: everything is compared with it. Raises ConfigError."""
    return [parse(name, members) for name in dict.fromkeys([PLAIN, *names])]


def usual(budgets: Iterable[int | str], drafting: bool = True) -> list[str]:
    """The cells of a run that names none."""
    return [PLAIN, "chain", *(f"tree:{budget}" for budget in budgets), "auto"] if drafting else [PLAIN]


_METHODS: dict[str, AutoMethod] = {"off": "off", "chain": "chain", "tree": "tree", "auto": "auto"}


def _budget(method: str, count: str, colon: str, text: str) -> AutoBudget:
    if method not in _METHODS or (method == "tree") != bool(colon):
        raise ConfigError(f"unknown cell {text!r}: write {_FORMS}")
    if method == "auto" or count == "auto":
        return "auto"
    if method != "tree":
        return MAX_DEPTH if method == "chain" else 0
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= MAX_BUDGET):
        raise ConfigError(f"cell {text!r}: a tree's budget is auto or a whole number in 1..{MAX_BUDGET}")
    return int(count)
