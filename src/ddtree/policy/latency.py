"""What a round costs on one machine: predicted from measurements, kept current by the rounds themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.policy import curve
from ddtree.policy.curve import Curve, Sample, Term, amount, medians
from ddtree.policy.drift import Drift

__all__ = ["LatencyModel", "Part", "Sample"]

Part = Literal["verify", "draft", "overhead"]
FORMAT = 1
CUT_SHORT = "cut_short"
"""Key of `LatencyModel.machine`: points were left out for want of time, so that it serves for once only."""
_OVERHEAD = 0.03
"""Walk, commit and bookkeeping, as a share of verifying the root alone, until rounds have told."""


@dataclass(frozen=True)
class _Fit:
    verify: Curve
    single: dict[int, float]
    draft: dict[str, Curve]


class LatencyModel:
    """Seconds of a round's parts on one machine.

    Verification is a `Curve` of the nodes for trees of two nodes a row and more. The root alone may be run by other
    kernels: it costs a share of that curve, measured for each number of rows, and never more than two nodes do.

    Attributes:
        machine: what was measured, readable: device, cores, threads, library versions, dtype, date.
        points: the medians that verification was fitted to.
        draft_points: those of drafting, by the drafter's name.
    """

    def __init__(
        self,
        fitted: _Fit,
        machine: dict[str, Any],
        points: Sequence[Sample] = (),
        draft_points: Mapping[str, Sequence[Sample]] | None = None,
    ) -> None:
        self.machine = machine
        self.points = tuple(points)
        self.draft_points = {name: tuple(own) for name, own in (draft_points or {}).items()}
        self._fit = fitted
        # Drafting is followed for each set of drafters: what one takes says nothing of another.
        self._drift: dict[tuple[str, frozenset[str]], Drift] = {}
        self._overhead = _OVERHEAD * float(self._undrifted(1, 1, 0.0)[0])

    @staticmethod
    def fit(
        verify: Iterable[Sample], draft: Mapping[str, Iterable[Sample]], *, machine: dict[str, Any]
    ) -> LatencyModel:
        """Fit measurements, of which repeated ones count by their median.

        Args:
            verify: of verification.
            draft: of drafting and building the tree, by the drafter's name; the width is the budget + 1. A name
                "a+b" stands for the drafters a and b merged, in place of the sum of the two.
            machine: what was measured.

        Raises:
            ConfigError: there is no measurement of verification, or an impossible one.
        """
        points = medians(verify)
        draft_points = {name: medians(own) for name, own in draft.items()}
        trees = [point for point in points if point.width > 1] or points
        shape = curve.fit(trees)
        if machine.get(CUT_SHORT):
            shape = _cautious(shape, trees)
        single = {}
        for rows in sorted({point.rows for point in points}):
            shares = [p.seconds / shape.seconds(_floor(1, rows), p.rows, p.context) for p in points
                      if p.width == 1 and p.rows == rows]  # fmt: skip
            if shares:
                single[rows] = min(1.0, float(np.median(shares)))
        drafts = {name: curve.fit(own) for name, own in draft_points.items() if own}
        return LatencyModel(_Fit(shape, single, drafts), dict(machine), points, draft_points)

    def verify(self, width: int, rows: int = 1, context: float = 0.0) -> float:
        """Seconds of verifying trees of `width` nodes a row, root included, at a mean context."""
        widths = np.array([width])
        return float(self._undrifted(widths, rows, context)[0] * self.factor("verify"))

    def curve(self, widths: int, rows: int = 1, context: float = 0.0) -> NDArray[np.float64]:
        """Seconds [widths] of verifying trees of 1, 2, ..., `widths` nodes a row."""
        return self._undrifted(np.arange(1, widths + 1), rows, context) * self.factor("verify")

    def draft(self, names: Sequence[str], width: int, rows: int = 1, context: float = 0.0) -> float:
        """Seconds of drafting with the named drafters for trees of `width` nodes a row.

        Raises:
            ConfigError: a drafter was not measured.
        """
        whole = frozenset(names)
        parts = next(([own] for own in self._fit.draft if frozenset(own.split("+")) == whole), list(names))
        total = 0.0
        for name in parts:
            if name not in self._fit.draft:
                raise ConfigError(f"drafting with {name!r} was not measured: run ddtree calibrate with it")
            total += float(self._fit.draft[name].seconds(width, rows, context))
        return total * self.factor("draft", names)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether drafting with each of the named drafters was measured."""
        return all(name in self._fit.draft for name in names)

    def overhead(self) -> float:
        """Seconds of a round outside drafting and verification."""
        return self._overhead * self.factor("overhead")

    def factor(self, part: Part, names: Iterable[str] = ()) -> float:
        """How much slower a part is now than when it was measured; drafting with the named drafters."""
        drift = self._drift.get((part, frozenset(names)))
        if drift is not None:
            return drift.factor
        # What was not observed yet is taken to be as slow as the machine.
        return 1.0 if part == "verify" else self.factor("verify")

    @property
    def drift(self) -> dict[str, float]:
        """The factors of all parts that were observed, by the part's name and the drafters'."""
        return {
            " ".join([part, *sorted(names)]): drift.factor for (part, names), drift in self._drift.items()
        }

    def observe(self, part: Part, predicted: float, measured: float, names: Iterable[str] = ()) -> None:
        """A round's part took `measured` seconds where this model, as it stands, predicted `predicted`.

        For drafting, `names` are the drafters that drafted.
        """
        self._drift.setdefault((part, frozenset(names)), Drift()).observe(predicted, measured)

    def as_dict(self) -> dict[str, Any]:
        """The fit as plain JSON values; what rounds have told since is not kept."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "verify": self._fit.verify.as_dict(),
            "root_alone": {str(rows): share for rows, share in self._fit.single.items()},
            "draft": {name: own.as_dict() for name, own in self._fit.draft.items()},
            "measured": {
                "verify": [vars(point).copy() for point in self.points],
                "draft": {n: [vars(point).copy() for point in own] for n, own in self.draft_points.items()},
            },
        }

    @staticmethod
    def from_dict(values: Any) -> LatencyModel:
        """The model that `as_dict` gave. Raises ConfigError naming what is wrong."""
        if not isinstance(values, Mapping):
            raise ConfigError("the latency model is no JSON object: run ddtree calibrate")
        if values.get("format") != FORMAT:
            raise ConfigError(
                f"the latency model has format {values.get('format')!r}, not {FORMAT}: run ddtree calibrate"
            )
        try:
            single = _mapping(values, "root_alone")
            shares = {int(rows): amount(single, rows) for rows in single}
            drafts = {name: Curve.from_dict(own) for name, own in _mapping(values, "draft").items()}
            measured = _mapping(values, "measured")
            points = _points(measured.get("verify"))
            draft_points = {name: _points(own) for name, own in _mapping(measured, "draft").items()}
            fitted = _Fit(Curve.from_dict(values.get("verify")), shares, drafts)
            if not (fitted.verify.seconds(1, 1, 1.0) > 0 and all(share > 0 for share in shares.values())):
                raise ConfigError("the latency model has passes that take no time: run ddtree calibrate")
            return LatencyModel(fitted, dict(_mapping(values, "machine")), points, draft_points)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"the latency model is damaged ({error}): run ddtree calibrate") from error

    def _undrifted(self, widths: Any, rows: int, context: float) -> NDArray[np.float64]:
        tokens = np.atleast_1d(np.asarray(widths, dtype=np.float64))
        seconds = self._fit.verify.seconds(np.maximum(tokens, _floor(1, rows)), rows, context)
        alone = tokens == 1
        if alone.any():
            least = np.minimum(seconds, self._fit.verify.seconds(2, rows, context))
            seconds = np.where(alone, least * self._share(rows), seconds)
        return seconds

    def _share(self, rows: int) -> float:
        """Cost of the root alone as a share of the curve's at as many tokens."""
        # Several rows run the kernels of a tree of as many nodes, unless measured otherwise.
        known = {2: 1.0, **self._fit.single}
        places = sorted(known)
        return float(np.interp(rows, places, [known[place] for place in places]))


def _cautious(shape: Curve, points: Sequence[Sample]) -> Curve:
    """The curve, with nodes beyond the most that were measured no cheaper than these were on average.

    A few points taken on a busy machine may lie on a flat line, by which a thousand nodes would be free.
    """
    last = max(points, key=lambda point: point.rows * point.width)
    tokens = last.rows * last.width
    average = float(shape.seconds(last.width, last.rows, last.context)) / tokens
    return Curve(shape.constant, (*shape.terms, Term("tokens", tokens, average)))


def _floor(width: int, rows: int) -> float:
    """The least width at which the curve of trees is read: two tokens in all."""
    return max(width, 2 / rows)


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} is missing")
    return found


def _points(values: Any) -> list[Sample]:
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise ConfigError("the list of measurements is missing")
    return [
        Sample(int(amount(v, "width")), int(amount(v, "rows")), amount(v, "context"), amount(v, "seconds"))
        for v in values
    ]
