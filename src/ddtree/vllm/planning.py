"""How much is drafted for each request, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.drafters import behind_of
from ddtree.policy import OFF, UNMEASURED_BUDGET, Arm, Choice, Policy, Proposals
from ddtree.stats import PARTS
from ddtree.tree import DraftTree
from ddtree.vllm.drafting import Drafting
from ddtree.vllm.reader import Reader
from ddtree.vllm.trees import Nodes, Row
from ddtree.vllm.verify import Verified


@dataclass
class Figures:
    """What was drafted and came of it, of all requests.

    Attributes:
        steps: verifications of a request, of the root alone included.
        drafted_steps: those with drafted nodes.
        nodes: drafted nodes verified.
        accepted: of them.
        accepted_per_depth: accepted nodes by their depth.
        arms: steps by how they were drafted for.
        seconds: time by part of the step.
    """

    steps: int = 0
    drafted_steps: int = 0
    nodes: int = 0
    accepted: int = 0
    accepted_per_depth: Counter[str] = field(default_factory=Counter)
    arms: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def count(self, nodes: int, accepted: int, arm: str) -> None:
        """A request was verified with so many drafted nodes, of which the first `accepted` depths came true."""
        self.steps += 1
        self.drafted_steps += nodes > 0
        self.nodes += nodes
        self.accepted += accepted
        self.accepted_per_depth.update(str(depth) for depth in range(1, accepted + 1))
        self.arms[arm] += 1

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class _Round:
    """What was drafted last by the policy's choice, until it is verified.

    Attributes:
        names: of its rows.
        tree: of all of them.
        seconds: of its drafting, by part.
    """

    names: list[str]
    tree: DraftTree
    seconds: dict[str, float]


class Planning:
    """Decides how each request is drafted for, step by step.

    Args:
        drafting: the drafter and its rows.
        most: tokens that a step may process.

    Attributes:
        policy: decides what requests leave open; None: fixed budgets stand for it.
        figures: what was drafted and came of it.
    """

    def __init__(self, drafting: Drafting, most: int) -> None:
        self.drafting = drafting
        self.policy: Policy | None = None
        self.figures = Figures()
        self._most = most
        self._choices: dict[str, Choice] = {}
        self._round: _Round | None = None
        self._begun: set[str] = set()
        self._step = dict.fromkeys(PARTS, 0.0)

    def clock(self, part: str, seconds: float) -> None:
        """A part of the step took so long; "verify" begins a step."""
        if part == "verify":
            self._step = dict.fromkeys(PARTS, 0.0)
        self._step[part] += seconds
        self.figures.seconds[part] += seconds

    def draft(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> dict[str, list[int]]:
        """Note what a step came to, and draft for the next one.

        Args:
            readers: the requests of the step, in the batch's order.
            rows: their parts in it.
            verified: what each came to, by name; those whose prompt is not through are missing.

        Returns:
            The nodes besides the root, by name.
        """
        self._count(readers, rows, verified)
        self._learn(rows, {reader.name: reader for reader in readers}, verified)
        clock = self.drafting.clock
        before = dict(clock.seconds)
        with clock("draft"):
            ready = {
                reader.name
                for reader in readers
                if reader.name in verified and reader.drafts and not reader.ended
            }
            asked = [(place, own) for place, own in enumerate(self.drafting.rows) if own.name in ready]
            tree, decided = self._tree(asked)
        spent = {part: clock.seconds[part] - before[part] for part in ("draft", "build")}
        for part, seconds in spent.items():
            self.figures.seconds[part] += seconds
        names = [reader.name for _, reader in asked]
        self._round = _Round(names, tree, spent) if tree is not None and decided else None
        drafted = {}
        for row, (_, reader) in enumerate(asked):
            assert tree is not None
            reader.drafted = Nodes.of(tree, row)
            drafted[reader.name] = reader.drafted.tokens[1:]
        return drafted

    def _tree(self, asked: Sequence[tuple[int, Reader]]) -> tuple[DraftTree | None, bool]:
        """Trees of rows of the drafter, and whether the policy had a say."""
        self._choices = {}
        if not asked:
            return None, False
        readers = [reader for _, reader in asked]
        requests = [reader.request for reader in readers]
        policy = self.policy if any(request.automatic for request in requests) else None
        if policy is None:
            choices = [_fixed(reader) for reader in readers]
        else:
            fresh = [reader.name not in self._begun for reader in readers]
            self._begun = {
                *(self._begun & {own.name for own in self.drafting.rows}),
                *(r.name for r in readers),
            }
            choices = policy.plan(requests, [len(reader.tokens) - 1 for reader in readers], fresh)
        # What the scheduler would cut off need not be drafted.
        most = max(0, self._most // len(readers) - 1)
        self._choices = {reader.name: choice for reader, choice in zip(readers, choices, strict=True)}
        places = [place for place, _ in asked]
        tree = _rows(self.drafting.draft(self._choices, most), places)
        if policy is not None:
            with self.drafting.clock("build"):
                # A draft cut short by the end of an answer, or left out, tells little of the drafter.
                behind = behind_of(self.drafting.drafter)
                whole = [
                    choices[row].arm == OFF
                    or (self.drafting.depth(reader) == reader.request.depth and place not in behind)
                    for row, (place, reader) in enumerate(asked)
                ]
                tree = policy.cut(tree, lambda: self._proposals(places), whole)
        return tree, policy is not None

    def _proposals(self, places: list[int]) -> Proposals | None:
        """The own trees of several drafters, of the rows that were asked for."""
        found: Proposals | None = getattr(self.drafting.drafter, "proposals", None)
        return found and [(name, _rows(tree, places)) for name, tree in found]

    def _learn(
        self, rows: Sequence[Row], readers: Mapping[str, Reader], verified: Mapping[str, Verified]
    ) -> None:
        """Tell the policy what a round came to, where it was verified as drafted and nothing was done beside it."""
        made, self._round = self._round, None
        if (
            made is None
            or self.policy is None
            or len(rows) != len(made.names)
            or verified.keys() != set(made.names)
        ):
            return
        sizes = {name: len(row.nodes) for name, row in zip(readers, rows, strict=True)}
        if [sizes[name] for name in made.names] != made.tree.sizes:
            return
        own = [verified[name] for name in made.names]
        seconds = {**self._step, **made.seconds}
        self.policy.learn(made.tree, [found.path for found in own], [found.tokens for found in own], seconds)

    def _count(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> None:
        for reader, row in zip(readers, rows, strict=True):
            found = verified.get(reader.name)
            if found is not None:
                arm = self._choices.get(reader.name, Choice(OFF, 0)).arm
                self.figures.count(len(row.nodes) - 1, len(found.path) - 1, str(arm))


def _rows(tree: DraftTree, places: list[int]) -> DraftTree:
    """Some rows of a batch of trees."""
    if places == list(range(len(tree.sizes))):
        return tree
    return DraftTree.stack([tree.row(place) for place in places])


def _fixed(reader: Reader) -> Choice:
    request = reader.request
    method = "tree" if request.method == "auto" else request.method
    budget = UNMEASURED_BUDGET if request.budget == "auto" else request.budget
    return Choice(Arm(method, request.members), budget)
