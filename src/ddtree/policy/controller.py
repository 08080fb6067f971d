"""Which arm: the fastest by rolling figures, with hysteresis and bounded exploration (auto-A/B)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddtree.policy.arms import OFF, Arm

EXPLORATION = 0.03
_MEMORY = 48
_DWELL = 8
_MARGIN = 1.03
_STALE = 64
_HOPELESS, _PATIENCE = 0.7, 8
_SWITCHES = 64


@dataclass
class Figures:
    """Rolling figures of an arm.

    Attributes:
        rounds: rounds decoded with it.
        tokens: tokens a row and round.
        nodes: drafted nodes a row and round.
        slowness: measured over predicted seconds of its rounds.
        informed: the round that last told about its tokens; -1 for never.
    """

    rounds: int = 0
    tokens: float = 1.0
    nodes: float = 0.0
    slowness: float = 1.0
    informed: int = -1
    _weight: float = 0.0
    _timed: float = 0.0

    def learn(self, tokens: float, nodes: float, now: int) -> None:
        self._weight = min(self._weight + 1, _MEMORY)
        self.tokens += (tokens - self.tokens) / self._weight
        self.nodes += (nodes - self.nodes) / self._weight
        self.informed = now

    def time(self, ratio: float) -> None:
        """Measured over predicted seconds of a round; a burst of the machine counts as no more than twice."""
        self._timed = min(self._timed + 1, _MEMORY)
        self.slowness += (min(max(ratio, 0.5), 2.0) - self.slowness) / self._timed

    @property
    def known(self) -> bool:
        return self._weight >= _DWELL


@dataclass(frozen=True)
class Switch:
    """A change of arm: when (round), from which to which, and why."""

    round: int
    before: str
    after: str
    reason: str


class Controller:
    """Chooses the arm of each round for one kind of request under one load.

    The arm in use is left for another only when that is faster by 3 % and both are known from eight rounds or more.
    At most 3 % of rounds explore: they try the arm of which least is known, and seldom one that was far behind.

    Args:
        arms: the one to begin with first. "off" is known without trying: it makes one token a round.
        seconds: predicted seconds of a round of an arm with so many nodes a row.
    """

    def __init__(self, arms: Sequence[Arm], seconds: Callable[[Arm, float], float]) -> None:
        self.figures = {arm: Figures() for arm in arms}
        self.current = arms[0]
        self.rounds = 0
        self.explored = 0
        self.switches: deque[Switch] = deque(maxlen=_SWITCHES)
        self._seconds = seconds
        self._since = 0

    def choose(self) -> Arm:
        """The arm of the next round."""
        self.rounds += 1
        if self.rounds - self._since > _DWELL:
            self._reconsider()
        if self.explored + 1 <= EXPLORATION * self.rounds:
            arm = self._least_known()
            if arm is not None:
                self.explored += 1
                return arm
        return self.current

    def speed(self, arm: Arm) -> float:
        """Tokens a row and second that an arm is expected to make; "off" is always known."""
        figures = self.figures[arm]
        return figures.tokens / (self._seconds(arm, figures.nodes) * figures.slowness)

    def rate(self) -> float | None:
        """The speed of the arm in use; None while it is not known."""
        return self.speed(self.current) if self._known(self.current) else None

    def state(self) -> dict[str, Any]:
        """Everything it goes by, as plain JSON values."""
        return {
            "arm": str(self.current),
            "rounds": self.rounds,
            "explored": self.explored,
            "arms": {
                str(arm): {
                    "rounds": figures.rounds,
                    "tokens_per_round": figures.tokens,
                    "nodes": figures.nodes,
                    "tokens_per_second": self.speed(arm) if self._known(arm) else None,
                }
                for arm, figures in self.figures.items()
            },
            "switches": [asdict(switch) for switch in self.switches],
        }

    def _known(self, arm: Arm) -> bool:
        return arm == OFF or self.figures[arm].known

    def _reconsider(self) -> None:
        known = [arm for arm in self.figures if self._known(arm)]
        if self.current not in known:
            return
        best = max(known, key=self.speed)
        ours, theirs = self.speed(self.current), self.speed(best)
        if theirs > ours * _MARGIN:
            reason = f"{theirs:.1f} against {ours:.1f} tokens a second a row"
            self.switches.append(Switch(self.rounds, str(self.current), str(best), reason))
            self.current, self._since = best, self.rounds

    def _least_known(self) -> Arm | None:
        """The arm to try: the one not heard of for longest, if any is due."""
        due = [arm for arm in self.figures if arm not in (self.current, OFF) and self._due(arm)]
        return min(due, key=lambda arm: self.figures[arm].informed, default=None)

    def _due(self, arm: Arm) -> bool:
        figures = self.figures[arm]
        age = self.rounds - figures.informed
        if not figures.known:
            return True
        hopeless = self.speed(arm) < _HOPELESS * self.speed(self.current)
        return age > (_STALE * _PATIENCE if hopeless else _STALE)
