"""The equality matrix: which cases there are, and the check that one of them gives the plain loop's tokens.

A case is a model family, a drafter, a way of sampling, a budget and a number of rows. Family and drafter meet only in
the draft tree and the features, and sampling meets neither, so three blocks replace the full product:

- A: a drafter that knows the text (`scripted`), in every combination of family, sampling, budget and rows;
- B: every pair of family and drafter, with the other factors from a covering array: every two values of two factors
  occur together in some case;
- C: a cache whose buffers begin small, so that they grow several times.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import reference
import tiny
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from scripted import Informed, Scripted

LENGTH = 64
BUDGETS = (1, 15, 64)
ROWS = (1, 3)
PROMPTS = [tiny.prompt(n, seed=n) for n in (6, 31, 14)]
# The first row ends first, so that the last one takes its place while the others run.
SHARES = (0.7, 1.0, 0.85)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties-and-bias": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {3: 2.0, 5: -1.5},
    },
    "min-p": {"temperature": 1.0, "min_p": 0.05},
}
KNOWING = ("scripted", "informed")
DRAFTERS = (
    *("none", "chain", "tree", "lookup", "draft", "merged", *KNOWING),
    *("markov", "treeflash", "domino", "d2sd", "continuity"),
)
GROWING = [
    (family, kind, rows) for family in ("llama", "gemma2") for kind in ("scripted", "merged") for rows in ROWS
]


class Case(NamedTuple):
    """One run of the engine."""

    family: str
    kind: str
    sampling: str
    budget: int
    rows: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def block(family: str, kind: str, sampling: str) -> list[Case]:
    """All budgets and numbers of rows of a family, drafter and way of sampling."""
    return [Case(family, kind, sampling, *rest) for rest in itertools.product(BUDGETS, ROWS)]


def true_paths() -> list[Case]:
    """Block A."""
    return [
        case
        for family, sampling in itertools.product(tiny.FAMILIES, SAMPLING)
        for case in block(family, "scripted", sampling)
    ]


def covering() -> list[Case]:
    """Block B: a case for every family and drafter, in which all pairs of values of two factors occur.

    Greedy: each case takes the sampling, budget and rows that were seen least often with what they stand beside.
    """
    seen: Counter[tuple[Any, ...]] = Counter()
    cases = []
    for family, kind in itertools.product(tiny.FAMILIES, DRAFTERS):
        choices = [Case(family, kind, *rest) for rest in itertools.product(SAMPLING, BUDGETS, ROWS)]
        best = min(choices, key=lambda case: sum(seen[pair] for pair in pairs(case)))
        seen.update(pairs(best))
        cases.append(best)
    return cases


def pairs(case: Case) -> Iterator[tuple[Any, ...]]:
    """The values of a case, two factors at a time: (first factor, second factor, first value, second value)."""
    for one, other in itertools.combinations(range(len(case)), 2):
        yield one, other, case[one], case[other]


@functools.cache
def model_of(family: str) -> Any:
    return tiny.model(family)


@functools.cache
def expected(family: str, sampling: str, length: int = LENGTH) -> list[list[int]]:
    """The tokens of each prompt by whole forwards without a cache."""
    model = model_of(family)
    return [
        reference.decode(model, prompt, SamplingParams(**SAMPLING[sampling], seed=seed), length)
        for seed, prompt in enumerate(PROMPTS)
    ]


def texts(family: str, sampling: str, length: int = LENGTH) -> list[list[int]]:
    """Prompts and answers."""
    return [p + a for p, a in zip(PROMPTS, expected(family, sampling, length), strict=True)]


@functools.cache
def drafter_of(family: str, kind: str) -> Any:
    """A drafter that fits every text of a family."""
    return tiny.drafter(kind, model_of(family))


def drafter_for(case: Case, length: int) -> Any:
    if case.kind == "none":
        return None
    if case.kind not in KNOWING:
        return drafter_of(case.family, case.kind)
    known = texts(case.family, case.sampling, length)
    # Deeper than the models' sliding windows where the budget allows it.
    reach = 12 if case.budget >= 64 else 5
    if case.kind == "informed":
        return Informed(known, reference.layer_outputs(model_of(case.family), known, layer=0), reach=reach)
    return Scripted(known, reach=reach)


def check(case: Case, length: int = LENGTH) -> Engine:
    """Decode a case and assert that its tokens are those of the plain loop; gives the engine, which is idle.

    A drafter that knows the text must also have most of it accepted, or the case would show nothing.
    """
    answers = expected(case.family, case.sampling, length)
    drafter = drafter_for(case, length)
    engine = Engine(Target(model_of(case.family)), drafter)
    try:
        sequences = [
            engine.add(
                PROMPTS[row],
                SamplingParams(
                    **SAMPLING[case.sampling],
                    seed=row,
                    max_tokens=length if case.rows == 1 else int(SHARES[row] * length),
                ),
                method="chain" if case.kind == "chain" else "tree",
                budget=case.budget,
                # A draft model runs once a level; four levels show all there is to see.
                depth=4 if case.kind in ("draft", "merged") else 16,
            )
            for row in range(case.rows)
        ]
        while not engine.idle:
            engine.step()
    finally:
        engine.close()
        engine.target.close()
    for sequence, answer in zip(sequences, answers, strict=False):
        assert sequence.output == answer[: sequence.params.max_tokens], str(case)
    if case.kind in KNOWING:
        assert min(sequence.stats.tau for sequence in sequences) > (3 if case.budget > 1 else 1.5), str(case)
    return engine
