"""Seconds of a forward pass as a sum of slopes: monotone and convex in the number of nodes by construction.

    seconds = constant + sum of slope * max(0, quantity - beyond),  constant >= 0, slope >= 0

The quantities are those that a forward's work is proportional to. Each is convex in the nodes and does not fall when
nodes are added, so that every such sum is too. Beyond what was measured the last slopes go on. CaDDTree
(arXiv 2606.01813) regresses its cost onto monotone convex functions too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.errors import ConfigError
from ddtree.policy import nonnegative

Array = NDArray[np.float64]

_NODES = ("rows", "tokens")
QUANTITIES = (*_NODES, "context", "pairs")
_MOST_KNOTS = 16
_OUTLYING = 1.5  # in robust standard deviations; from there on, residuals count linearly (Huber)


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        width: nodes a row, root included; trees of a batch are padded to the widest.
        rows: rows of the batch.
        context: mean committed tokens a row.
        seconds: what it took.
    """

    width: int
    rows: int
    context: float
    seconds: float


def medians(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each (width, rows, context), with the median of its seconds; in the order of these.

    Raises:
        ConfigError: a sample is impossible.
    """
    found: defaultdict[tuple[int, int, float], list[float]] = defaultdict(list)
    for sample in samples:
        if not (sample.width >= 1 and sample.rows >= 1 and 0 <= sample.context < math.inf):
            raise ConfigError(f"{sample} is no measurement: width and rows start at 1, context at 0")
        if not 0 < sample.seconds < math.inf:
            raise ConfigError(f"{sample} is no measurement: its seconds must be a positive number")
        found[sample.rows, sample.width, sample.context].append(sample.seconds)
    return [
        Sample(width, rows, context, float(np.median(seconds)))
        for (rows, width, context), seconds in sorted(found.items())
    ]


@dataclass(frozen=True)
class Term:
    """`slope` seconds for each unit of a quantity beyond `beyond`.

    The quantity is "rows"; "tokens", rows * width; "context", rows * context; or "pairs", of a query and a key,
    rows * width * (context + width).
    """

    quantity: str
    beyond: float
    slope: float


@dataclass(frozen=True)
class Curve:
    """A fitted sum of slopes."""

    constant: float
    terms: tuple[Term, ...]

    def seconds(self, widths: ArrayLike, rows: int, context: float) -> Array:
        """Seconds for each of the widths, in their shape."""
        values = _quantities(np.asarray(widths, dtype=np.float64), rows, context)
        total = np.full(values["tokens"].shape, self.constant)
        for term in self.terms:
            total += term.slope * np.maximum(0.0, values[term.quantity] - term.beyond)
        return total

    def as_dict(self) -> dict[str, Any]:
        return {"constant": self.constant, "terms": [vars(term).copy() for term in self.terms]}

    @staticmethod
    def from_dict(values: Any) -> Curve:
        """Raises ConfigError when it is none."""
        if not isinstance(values, Mapping) or not isinstance(values.get("terms"), list):
            raise ConfigError(f"{values!r} is no curve: it must hold a constant and terms")
        terms = []
        for term in values["terms"]:
            if not isinstance(term, Mapping) or term.get("quantity") not in QUANTITIES:
                raise ConfigError(f"{term!r} is no term of a curve: its quantity must be one of {QUANTITIES}")
            terms.append(Term(term["quantity"], amount(term, "beyond"), amount(term, "slope")))
        return Curve(amount(values, "constant"), tuple(terms))


def fit(samples: Sequence[Sample], quantities: Sequence[str] = QUANTITIES) -> Curve:
    """The curve nearest to some medians, by relative error; what lies far off counts less.

    Raises:
        ConfigError: there are no samples.
    """
    if not samples:
        raise ConfigError("there is no measurement to fit a curve to")
    measured = np.array([sample.seconds for sample in samples])
    every = [_quantities(np.float64(s.width), s.rows, s.context) for s in samples]
    candidates = []
    columns = [np.ones(len(samples))]
    contexts = len({sample.context for sample in samples})
    for quantity in quantities:
        values = np.array([float(each[quantity]) for each in every])
        for beyond in _knots(values) if quantity in _NODES else _attention_knots(values, contexts):
            candidates.append((quantity, beyond))
            columns.append(np.maximum(0.0, values - beyond))
    # Relative errors: a burst of slowness is then at most 100 % off, however long it was.
    matrix = np.stack(columns, axis=1) / measured[:, None]
    weights = np.ones(len(samples))
    for _ in range(3):
        root = np.sqrt(weights)
        slopes = nonnegative.solve(matrix * root[:, None], root)
        errors = np.abs(matrix @ slopes - 1)
        scale = max(1e-6, 1.4826 * float(np.median(errors)))
        weights = np.minimum(1.0, _OUTLYING * scale / np.maximum(errors, 1e-12))
    terms = [
        Term(quantity, beyond, float(slope))
        for (quantity, beyond), slope in zip(candidates, slopes[1:], strict=True)
        if slope > 0
    ]
    return Curve(float(slopes[0]), tuple(terms))


def amount(values: Mapping[str, Any], name: str) -> float:
    """A number of a mapping that is finite and not negative. Raises ConfigError naming it."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a number that is finite and not negative")
    return float(value)


def _quantities(widths: Any, rows: int, context: float) -> dict[str, Array]:
    tokens = rows * widths
    shape = np.ones_like(tokens)
    return {
        "rows": rows * shape,
        "tokens": tokens,
        "context": rows * context * shape,
        "pairs": tokens * (context + widths),
    }


def _knots(values: Array) -> list[float]:
    """Where slopes may begin: at measured values below the largest."""
    inner = np.unique(values)[:-1]
    if len(inner) > _MOST_KNOTS:
        inner = inner[np.linspace(0, len(inner) - 1, _MOST_KNOTS).round().astype(int)]
    return inner.tolist()


def _attention_knots(values: Array, contexts: int) -> list[float]:
    """Likewise for attention's work, which is nothing without context.

    At a single context nothing tells it from the rest, and two say nothing of a bend.
    """
    if contexts < 2:
        return []
    return [0.0, *(_knots(values)[1:] if contexts > 2 else [])]
