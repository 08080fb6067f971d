"""Acceptance without the target: a drafter replayed along answers that the target has already given.

Each round the drafter proposes, as it would in the engine, and the known answer is followed down the tree for as long
as it is there. This is exactly what verification would accept, whatever the drafter and however the answer was
decoded, since the target's choice does not depend on the draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ddtree.drafters import Drafter, DraftRow
from ddtree.model.kv_cache import drop_row
from ddtree.sampling.noise import Noise
from ddtree.stats import Clock
from ddtree.train.data import Example
from ddtree.tree import MAX_DEPTH, following, walk


@dataclass
class Acceptance:
    """Figures of a replay.

    Attributes:
        rounds: of all answers.
        tokens: answer tokens they gave.
        accepted: how often 0, 1, 2, ... drafted tokens were accepted.
        each: rounds and tokens of each answer, in the order given; (0, 0) for one that gave no round.
    """

    rounds: int = 0
    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    each: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per round."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass
class _Row:
    """An answer in replay: the `place`-th; `at` is the position of the bonus token."""

    place: int
    tokens: list[int]
    at: int
    example: Example
    noise: Noise | None


def replay(
    drafter: Drafter,
    examples: Iterable[Example],
    budget: int,
    chain: bool = False,
    rows: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    noise: Callable[[Example], Noise] | None = None,
    temperature: float = 1.0,
    clock: Clock | None = None,
    report: Callable[[int], None] | None = None,
) -> Acceptance:
    """Replay a drafter along answers, up to `rows` of them side by side.

    Args:
        drafter: empty (no rows).
        examples: conversations; those with an answer of one token give no round.
        budget: nodes besides the root; for a chain, its depth.
        chain: single paths instead of trees.
        dtype: of the features handed to the drafter: the target's.
        noise: the noise that an answer was sampled with, for coupled drafting; None drafts uncoupled.
        temperature: at which the answers were sampled; read with `noise` only.
        clock: takes the time of drafting, by part.
        report: called with the number of answers replayed.
    """
    waiting = iter(examples)
    active: list[_Row] = []
    result = Acceptance()
    clock = clock or Clock()
    done = 0
    while True:
        while len(active) < rows and (example := next(waiting, None)) is not None:
            result.each.append((0, 0))
            if len(example.tokens) - example.answer_start < 2:
                continue
            own = noise(example) if noise else None
            row = _Row(len(result.each) - 1, example.tokens.tolist(), example.answer_start, example, own)
            drafter.add_row()
            show(drafter, len(active), example, slice(row.at), dtype)
            active.append(row)
        if not active:
            return result
        depth = min(drafter.max_depth, MAX_DEPTH, budget)
        heat = temperature if noise else 0.0
        requests = [
            DraftRow(row.tokens[: row.at + 1], budget, depth, chain, row.noise, heat) for row in active
        ]
        with clock("draft"):
            tree = drafter.draft(requests, clock)
        texts = [row.tokens for row in active]
        prefixes = [row.tokens[: row.at + 1] for row in active]
        paths, _ = walk(tree, prefixes, following(texts))
        for index in reversed(range(len(active))):
            row, accepted = active[index], len(paths[index]) - 1
            emitted = min(accepted + 1, len(row.tokens) - 1 - row.at)
            result.rounds += 1
            result.tokens += emitted
            result.accepted[accepted] += 1
            rounds, tokens = result.each[row.place]
            result.each[row.place] = rounds + 1, tokens + emitted
            if row.at + emitted == len(row.tokens) - 1:
                drafter.drop_row(index)
                drop_row(active, index)
                done += 1
                if report:
                    report(done)
            else:
                row.at += emitted
                show(drafter, index, row.example, slice(row.at - emitted, row.at), dtype)


def show(drafter: Drafter, row: int, example: Example, part: slice, dtype: torch.dtype) -> None:
    """Show a drafter's row that part of an answer, with the features that it reads, as `dtype`."""
    features = example.features[part].flatten(1).to(dtype) if drafter.feature_layers else None
    drafter.observe(row, example.tokens[part].tolist(), features)
