"""Which arm: the fastest by rolling figures, with hysteresis and bounded exploration (auto-A/B)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ddtree.policy.acceptance import Acceptance
from ddtree.policy.arms import OFF, Arm

EXPLORATION = 0.03  # most rounds that go to another arm than the one in use
_SAVED = 5.0  # explored rounds kept for when one of them gives hope
_HOPE = 1.5  # times what was expected
_MARGIN = 1.03  # least lead of an arm that is switched to
_DWELL, _FIRST_DWELL = 8, 32  # rounds before a switch; before the first one to "off", over the rows in them
_EVERY = 4  # rounds between two looks at the arms
_LEVEL_MEMORY, _CAREER_MEMORY = (
    48.0,
    512.0,
)  # rounds that the present level, and the one of the long run, look back
_LOUDEST = 0.2  # most that one round counts in the level
_LONGEST = 16  # most rounds that one drafted round speaks for in the long run
_SHARE_MEMORY = 128.0  # rounds over which arms are compared
_CURIOUS = 64  # rounds of the full arm before not every one is asked about the others
_TRUTH_MEMORY, _TRUTH_DOUBT = (
    128.0,
    4.0,
)  # rounds; those that probabilities are taken to have come true at first
_TRUTH_LEAST = 2.0  # accepted tokens that probabilities are taken to have come true for
_TOLD_MEMORY = 512.0
_TIMES, _TIMES_DOUBT = 25, 4.0  # rounds that an arm's slowness is the median of; those it is doubted against
_HARDLY, _UNHEARD = 4, 1024  # times too few to know "off" by; rounds after which it is tried again
_SWITCHES = 64
_RECALLED = 32.0  # rounds that what earlier runs learnt counts for, and those that it must be known from


@dataclass(frozen=True)
class Made:
    """What a round made, or would have made, a row.

    Attributes:
        tokens: accepted tokens + 1.
        nodes: drafted nodes.
        expected: tokens by the trees' calibrated probabilities; None when unknown.
    """

    tokens: float
    nodes: float
    expected: float | None = None


@dataclass
class Figures:
    """Rolling figures of an arm.

    Attributes:
        rounds: rounds decoded with it.
        share: its tokens a round over those of the full arm in the same rounds.
        nodes: drafted nodes a row and round.
        slowness: measured over predicted seconds of its rounds, in proportion to those about them.
        seen: rounds that the share is known from.
        last: the round that used it last.
        judged: the round in which its probabilities were last compared with what came.
        told: its own rounds that count, times their rows.
    """

    rounds: int = 0
    share: float = 1.0
    nodes: float = 0.0
    slowness: float = 1.0
    seen: float = 0.0
    last: int = 0
    judged: int = 0
    told: float = 0.0
    _drafts: float = 0.0
    _hits: float = 0.0
    _hoped: float = 0.0
    _own: float = 0.0
    _full: float = 0.0
    _scatter: float = 0.0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))

    def compare(self, tokens: float, full: float, nodes: float) -> None:
        """What it made, or would have made, of a round in which the full arm made `full` tokens."""
        keep = 1 - 1 / _SHARE_MEMORY
        self._own, self._full = self._own * keep + tokens, self._full * keep + full
        self.share = self._own / self._full
        self._scatter = self._scatter * keep + (tokens - self.share * full) ** 2
        self.seen = self.seen * keep + 1
        self.drafted(nodes)

    def drafted(self, nodes: float) -> None:
        """So many nodes a row paid in a round; what is recalled of another run, or machine, counts for nothing then."""
        self._drafts = min(self._drafts + 1, _LEVEL_MEMORY)
        self.nodes += (nodes - self.nodes) / self._drafts

    def recall(self, tokens: float, full: float, nodes: float) -> None:
        """As if it had been compared in a few rounds that made so many tokens on average."""
        self._own, self._full = _RECALLED * tokens, _RECALLED * full
        self.share = tokens / full
        self._scatter = _RECALLED * max(tokens - 1, 0.0)
        self.seen, self.nodes = _RECALLED, nodes

    @property
    def error(self) -> float:
        """Standard error of the share, in proportion to it."""
        return math.sqrt(self._scatter) / self._own if self._own else 0.0

    def worth(self, made: Made, now: int) -> float:
        """Tokens of round `now` by its trees' probabilities, as far as these have come true lately.

        That scatters far less than the tokens it happened to make.
        """
        if made.expected is None:
            return made.tokens
        keep, hoped = math.exp((self.judged - now) / _TRUTH_MEMORY), made.expected - 1
        self.judged = now
        self._hits, self._hoped = self._hits * keep + made.tokens - 1, self._hoped * keep + hoped
        return 1 + hoped * self._came_true(_TRUTH_DOUBT * hoped)

    @property
    def truth(self) -> float:
        """Accepted tokens over those that its probabilities promised, lately; 1 again after long silence."""
        return self._came_true(_TRUTH_LEAST)

    def _came_true(self, doubt: float) -> float:
        """Accepted over promised tokens lately, as if `doubt` more had come as promised."""
        promised = self._hoped + doubt
        return (self._hits + doubt) / promised if promised > 0 else 1.0

    def time(self, ratio: float) -> None:
        """Measured over predicted seconds of a round; the median of the last ones counts, so bursts do not."""
        self._ratios.append(ratio)
        self.slowness = median(self._ratios)

    @property
    def timed(self) -> int:
        return len(self._ratios)


@dataclass(frozen=True)
class Switch:
    """A change of arm: when (round), from which to which, and why."""

    round: int
    before: str
    after: str
    reason: str


class Controller:
    """Chooses the arm of each round for one kind of request under one load.

    A round of the *full* arm, the first one, also shows what every arm of a part of its drafters would have made of
    it, since the answer is then known. So arms are compared on the same rounds, as shares of the full arm's tokens, and
    one rolling level says how many those are now. "off" makes one token a round.

    A level is measured with the arm in use. A text that suits its drafters need not suit others: how far the level
    departs from the one of the long run is believed of another arm as far as the two have drafters in common.

    The arm in use is left only after 8 rounds, for one that is faster by 3 % and by more than luck may explain; for
    "off" not within the first 32, over the rows, unless earlier runs are recalled. At most 3 % of rounds go to another
    arm: to the full one, to keep level and shares true, or to "off" while its time is not known. A few of them are kept
    back, and follow at once on one that made far more than was expected.

    Args:
        arms: the full one first.
        seconds: predicted seconds of a round of an arm with so many nodes a row.
        rows: in a round; each is evidence of its own.
    """

    def __init__(self, arms: Sequence[Arm], seconds: Callable[[Arm, float], float], rows: int = 1) -> None:
        self.figures = {arm: Figures() for arm in arms}
        self.current = self._full = arms[0]
        self.level = self._career = 1.0
        self.rounds = 0
        self.explored = 0
        self.switches: deque[Switch] = deque(maxlen=_SWITCHES)
        self._seconds = seconds
        self._since = 0
        self._rows = rows
        self._patience = max(_DWELL, _FIRST_DWELL // rows)
        self._allowance = 0.0
        self._hopeful = False
        self._levelled: int | None = None
        self._heard = 0
        self._lately: deque[float] = deque(maxlen=_DWELL)

    def recall(self, known: Mapping[Arm, Acceptance]) -> None:
        """Begin with what earlier runs have learnt of arms, the full one among them, as if of a few rounds."""
        full = known.get(self._full)
        if full is None or full.rounds < _RECALLED:
            return
        for arm, own in known.items():
            if own.rounds >= _RECALLED:
                self.figures[arm].recall(own.tokens, full.tokens, own.nodes)
        self.level = self._career = full.tokens
        self._levelled, self._heard = 0, int(_RECALLED)
        self._patience = _DWELL
        self.current = max((arm for arm in self.figures if arm != OFF and self._known(arm)), key=self.speed)

    def choose(self) -> Arm:
        """The arm of the next round."""
        self.rounds += 1
        if self.rounds - self._since > _DWELL and self.rounds % _EVERY == 0:
            self._reconsider()
        # What is not used does not pile up: an arm must not be tried for hundreds of rounds on end.
        saved = min(_SAVED, self.rounds / _TRUTH_MEMORY)
        self._allowance = min(1 + saved, self._allowance + EXPLORATION)
        if self._allowance >= (1 if self._hopeful else 1 + saved):
            other = self._due()
            if other != self.current:
                self._allowance -= 1
                self.explored += 1
                return other
        return self.current

    def renew(self, part: float) -> None:
        """A new sequence joins, and is a part of the rows: what the last ones were like says little of it.

        It begins with the level that this kind of request has had in the long run.
        """
        if self.rounds > _FIRST_DWELL:
            self.level += (self._career - self.level) * part
            if part > 0.5:
                self._reconsider()

    def learn(self, arm: Arm, made: Made, foretold: Mapping[Arm, Made]) -> None:
        """What a round of an arm made, and what others would have made of it, where that is known."""
        figures = self.figures[arm]
        figures.rounds += 1
        figures.last = self.rounds
        figures.told = min(figures.told + self._rows, _TOLD_MEMORY)
        if arm == OFF:
            return
        if arm != self.current:
            self._hopeful = made.tokens > _HOPE * self._tokens(arm)
        worth = figures.worth(made, self.rounds)
        if arm == self._full:
            figures.compare(worth, worth, made.nodes)
            for other, own in foretold.items():
                self.figures[other].compare(self.figures[other].worth(own, self.rounds), worth, own.nodes)
        else:
            figures.drafted(made.nodes)
        # What is tried now and then is heard too seldom for its probabilities to have come true lately or not.
        self._relevel((worth if arm == self.current else made.tokens) / figures.share)

    def curious(self, played: Arm) -> bool:
        """Whether a round of that arm should tell what others would have made of it."""
        figures = self.figures[played]
        return played == self._full and (figures.seen < _CURIOUS or self.rounds % _EVERY == 0)

    def time(self, arm: Arm, ratio: float) -> None:
        """Measured over predicted seconds of a round of an arm.

        A machine that becomes slow makes all arms slow, and predictions follow it late: so an arm that is tried is
        compared with the rounds about it.
        """
        if arm == self.current:
            self._lately.append(ratio)
        elif self._lately:
            self.figures[arm].time(ratio / median(self._lately) * self.figures[self.current].slowness)

    def speed(self, arm: Arm) -> float:
        """Tokens a row and second that an arm is expected to make now."""
        figures = self.figures[arm]
        tokens = self._tokens(arm)
        # An arm hardly timed is taken to be as slow, against its prediction, as the one in use.
        trust = figures.timed / (figures.timed + _TIMES_DOUBT)
        slowness = trust * figures.slowness + (1 - trust) * self.figures[self.current].slowness
        return tokens / (self._seconds(arm, figures.nodes) * slowness)

    def rate(self) -> float | None:
        """Tokens a row and second of the arm in use; None while it is not known."""
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
                    "tokens_per_round": self._tokens(arm),
                    "nodes": figures.nodes,
                    "tokens_per_second": self.speed(arm) if self._known(arm) else None,
                }
                for arm, figures in self.figures.items()
            },
            "switches": [asdict(switch) for switch in self.switches],
        }

    def _tokens(self, arm: Arm) -> float:
        """Tokens a row and round that an arm is expected to make now."""
        if arm == OFF:
            return 1.0
        used = self._full if self.current == OFF else self.current
        common = len(set(arm.members) & set(used.members)) / len(set(arm.members) | set(used.members))
        level = self._career + (self.level - self._career) * common
        return max(1.0, level * self.figures[arm].share)

    def _doubt(self, best: Arm) -> float:
        """Standard error of how an arm compares with the one in use, as a share.

        Against "off", accepted tokens are taken to scatter like counts; drafting arms are compared round by round.
        """
        ours = self.figures[self.current]
        if self.current == OFF:
            return 0.0
        if best == OFF:
            tokens = self._tokens(self.current)
            return math.sqrt((tokens - 1) / max(ours.told, 1.0)) / tokens
        return math.hypot(ours.error, self.figures[best].error)

    def _due(self) -> Arm:
        """The arm to try: the full one, but "off" while its time is hardly known or long unheard of."""
        off = self.figures.get(OFF)
        unsure = off is not None and (off.rounds < _HARDLY or self.rounds - off.last > _UNHEARD)
        if unsure and self.current != OFF:
            return OFF
        return self._full

    def _known(self, arm: Arm) -> bool:
        return arm == OFF or self.figures[arm].seen >= 1

    def _relevel(self, tokens: float) -> None:
        """Old levels fade with the rounds since; one round is never heard louder than a tenth."""
        if self._levelled is None:
            self.level = self._career = tokens
        else:
            elapsed = self.rounds - self._levelled
            early = 1 / (1 + self.figures[self._full].seen)
            weight = max(early, min(_LOUDEST, 1 - math.exp(-elapsed / _LEVEL_MEMORY)))
            self.level += (tokens - self.level) * weight
            weight = max(1 / (1 + self._heard), min(elapsed, _LONGEST) / _CAREER_MEMORY)
            self._career += (tokens - self._career) * weight
        self._heard += 1
        self._levelled = self.rounds

    def _reconsider(self) -> None:
        known = [arm for arm in self.figures if self._known(arm)]
        if self.current not in known:
            return
        if self.rounds <= self._patience and OFF in known and self.current != OFF:
            known.remove(OFF)
        best = max(known, key=self.speed)
        ours, theirs = self.speed(self.current), self.speed(best)
        margin = max(_MARGIN, 1 + self._doubt(best))
        if theirs > ours * margin:
            reason = f"{theirs:.1f} against {ours:.1f} tokens a second a row"
            self.switches.append(Switch(self.rounds, str(self.current), str(best), reason))
            self.current, self._since = best, self.rounds
            self._lately.clear()
