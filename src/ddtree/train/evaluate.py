"""Acceptance without the target: a drafter replayed along answers that the target has already given.

Each round the drafter proposes, as it would in the engine, and the known answer is followed down the tree for as long
as it is there. This is exactly what verification would accept, whatever the drafter and however the answer was
decoded, since the target's choice does not depend on the draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddtree.drafters import Drafter, DraftRow
from ddtree.drafters.dflash.checkpoint import backbone_of, read
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.heads import KINDS
from ddtree.drafters.loading import NGRAMS as TABLE_PART
from ddtree.drafters.loading import load_drafter
from ddtree.drafters.merged import Merged
from ddtree.model.kv_cache import drop_row
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.stats import Clock
from ddtree.train.data import Example
from ddtree.train.export import DRAFTER, NGRAMS, DrafterScore
from ddtree.tree import MAX_DEPTH, following, walk

_ROWS, _CPU_ROWS = 64, 16


@dataclass
class ReplayCounts:
    """Counts of a replay.

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
) -> ReplayCounts:
    """Replay a drafter along answers, up to `rows` of them side by side.

    Args:
        drafter: empty (no rows).
        examples: conversations; those with an answer of one token give no round.
        budget: nodes besides the root, as in 16; for a chain, its depth.
        chain: draft single paths instead of trees.
        rows: most answers side by side, as in 16.
        dtype: of the features handed to the drafter: the target's.
        noise: the noise that an answer was sampled with, for coupled drafting; None drafts uncoupled.
        temperature: at which the answers were sampled; read with `noise` only.
        clock: takes the time of drafting, by part.
        report: called with the number of answers replayed.
    """
    waiting = iter(examples)
    active: list[_Row] = []
    result = ReplayCounts()
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
    """Let a row of a drafter observe part of an answer, with the features that it reads, as `dtype`."""
    features = example.features[part].flatten(1).to(dtype) if drafter.feature_layers else None
    drafter.observe(row, example.tokens[part].tolist(), features)


def load_drafters(work: Path, target: Target, second_pass: bool = False) -> dict[str, Drafter]:
    """Load the drafters of a work folder, by name; none has rows.

    Args:
        work: the folder.
        target: to draft for.
        second_pass: the network was trained with given prefixes, so that D2SD can draft with it.
    """
    heads = [kind for kind in KINDS if (work / kind / "config.json").exists()]
    found = {name: _load(work / name, target) for name in (DRAFTER, *heads)}
    if second_pass:
        checkpoint = read(work / DRAFTER)
        found["d2sd"] = D2SD(backbone_of(checkpoint, target), coupling=checkpoint.layout.coupling)
    if (work / NGRAMS).exists():
        found["n-grams"] = _load(work / TABLE_PART, target)
        found[f"{DRAFTER} + n-grams"] = Merged([found[DRAFTER], found["n-grams"]])
    return found


def _load(path: Path, target: Target) -> Drafter:
    drafter = load_drafter(path, target)
    assert drafter is not None
    return drafter


def score_drafters(
    name: str, examples: list[Example], drafters: dict[str, Drafter], budgets: list[int], target: Target
) -> list[DrafterScore]:
    """Measure tokens per round of each drafter as a chain and at each budget, and print each as it comes.

    Args:
        name: of the set of answers, as in "held-out".
        examples: the answers, all greedy or all sampled.
        drafters: by name.
        budgets: as in [8, 16, 32].
        target: that gave the answers.
    """
    scores = []
    rows = _CPU_ROWS if target.device.type == "cpu" else _ROWS
    for label, drafter in drafters.items():
        chain = replay(drafter, examples, drafter.max_depth, chain=True, rows=rows, dtype=target.dtype)
        tau = {"chain": chain.tau}
        for budget in budgets:
            tau[f"B={budget}"] = replay(drafter, examples, budget, rows=rows, dtype=target.dtype).tau
        scores.append(DrafterScore(name, len(examples), label, 0 if examples[0].greedy else 1, tau))
        cells = ", ".join(f"{key} {value:.2f}" for key, value in tau.items())
        print(f"{name}, T={scores[-1].temperature}, {label}: {cells}", flush=True)
    return scores
