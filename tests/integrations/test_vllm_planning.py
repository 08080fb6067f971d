"""What the policy is told of vLLM's steps, without vLLM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddtree.engine.planner import Plan
from ddtree.integrations.vllm.planning import Planning
from ddtree.integrations.vllm.trees import Nodes, Row
from ddtree.integrations.vllm.verify import Verified
from ddtree.policy import OFF, Arm, Choice
from ddtree.policy.costs import Costs
from ddtree.policy.latency import LatencyModel, Sample
from ddtree.policy.stands import binary_tree
from ddtree.stats import Clock
from ddtree.tree import DraftTree

ROWS = 4
TOOK = {0: 0.02, 2: 0.03, 8: 0.09}  # seconds of verifying so many nodes a row besides the root


class Asked:
    """A planner that drafts trees of the sizes it is given, and keeps what it is told."""

    def __init__(self, costs, sizes):
        self.policy = SimpleNamespace(costs=costs)
        roots = [binary_tree(size, 1, [1], torch.device("cpu")).row(0) for size in sizes]
        self.made = Plan([Choice(OFF, 0)] * len(sizes), DraftTree.stack(roots), True)
        self.told = []

    def plan(self, rows, most, places):
        return self.made

    def learn(self, plan, paths, answers, seconds):
        self.told.append(seconds["verify"])


def reader(row):
    return SimpleNamespace(name=str(row), drafts=True, ended=False, drafted=None, arm=OFF)


def test_uneven_trees_are_told_as_if_padded_by_what_passes_were_found_to_take():
    """First measured flat; three rows of the root alone and one of 8 nodes are 2 nodes a row."""
    flat = [Sample(width, ROWS, 0, 0.05) for width in (1, 2, 17, 33)]
    costs = Costs(LatencyModel.fit(flat, {}, machine={}))
    for number in range(120):
        nodes = list(TOOK)[number % 3]
        costs.verified(nodes, ROWS, 10.0, TOOK[nodes])
    planner = Asked(costs, [1, 1, 1, 9])
    readers = [reader(row) for row in range(ROWS)]
    planning = Planning(readers, planner, Clock(), nodes=16, most=1024)
    for _ in range(2):
        rows = [Row(row, 0, 0, 10, Nodes.of(planner.made.tree, row)) for row in range(ROWS)]
        planning.clock("verify", TOOK[2])
        planning.draft(readers, rows, {reader.name: Verified([0], [1]) for reader in readers})
    assert planner.told == [pytest.approx(TOOK[8], rel=0.1)]


def test_a_request_that_a_step_passes_over_is_counted_as_it_was_drafted():
    planner = Asked(None, [3, 3])
    planner.made = replace(planner.made, choices=[Choice(Arm("tree", ("lookup",)), 2)] * 2, decided=False)
    readers = [reader(row) for row in range(2)]
    planning = Planning(readers, planner, Clock(), nodes=16, most=1024)
    rows = [Row(row, 0, 0, 10, Nodes.of(planner.made.tree, row)) for row in range(2)]
    come = {reader.name: Verified([0], [1]) for reader in readers}
    planning.draft(readers, rows, come)
    planner.made = Plan(planner.made.choices[:1], DraftTree.stack([planner.made.tree.row(0)]), False)
    planning.draft(readers[:1], rows[:1], {"0": come["0"]})
    planning.draft(readers[1:], rows[1:], {"1": come["1"]})
    assert planning.figures.arms == {"off": 2, "tree@lookup": 2}
