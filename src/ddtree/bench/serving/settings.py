"""Ways of drafting that are compared, by the names of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ddtree.errors import ConfigError

_NAME = re.compile(r"(off|chain|tree|auto)(?::(auto|\d+))?(?:/(\d+))?(?:@(.+))?")


@dataclass(frozen=True)
class Setting:
    """What requests say of drafting.

    Attributes:
        name: as it was given.
        fields: of the request's `ddtree`; None says nothing, so that the server's own setting holds.
    """

    name: str
    fields: dict[str, Any] | None

    @staticmethod
    def parse(name: str) -> Setting:
        """METHOD[:BUDGET][/DEPTH][@DRAFTER], METHOD being off, chain, tree or auto. Raises ConfigError."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"--drafting {name!r} is unknown: write off, chain, tree, tree:16, auto, auto/8 or tree@lookup"
            )
        method, budget, depth, drafter = found.groups()
        fields: dict[str, Any] = {"method": method}
        if budget:
            fields["budget"] = budget if budget == "auto" else int(budget)
        if depth:
            fields["depth"] = int(depth)
        if drafter:
            fields["drafter"] = drafter
        return Setting(name, fields)


AS_SERVED = Setting("as served", None)
