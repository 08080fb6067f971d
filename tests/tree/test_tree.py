"""Trees against plain references: a heap, brute force, loops over nodes."""

import heapq
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.errors import ConfigError
from ddtree.tree import DraftTree, ancestor_mask, best_first, build, following, grow, merge, prune, walk
from ddtree.tree.build import costs_of
from wellformed import check
from wellformed import paths as paths_of

Node = tuple[int, int, int]  # token, parent, depth


def heap_tree(
    bonus: int, tokens: Tensor, logprobs: Tensor, budget: int, depth: int
) -> tuple[list[Node], list[float]]:
    """DDTree's Algorithm 1 in plain Python, ties by depth, then rank, then the parent's place."""
    ids, scores = tokens.tolist(), logprobs.double().tolist()
    depth = min(depth, len(ids))
    nodes, totals = [(bonus, 0, 0)], [0.0]
    heap = [(-scores[0][0], 1, 0, 0)] if depth else []
    while heap and len(nodes) <= budget:
        cost, level, rank, parent = heapq.heappop(heap)
        if cost == float("inf"):
            break
        node = len(nodes)
        nodes.append((ids[level - 1][rank], parent, level))
        totals.append(-cost)
        if rank + 1 < len(ids[level - 1]):
            heapq.heappush(heap, (-(totals[parent] + scores[level - 1][rank + 1]), level, rank + 1, parent))
        if level < depth:
            heapq.heappush(heap, (cost - scores[level][0], level + 1, 0, node))
    return nodes, totals


def marginals(rng: np.random.Generator, depth: int, count: int, kind: str) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [depth, count], best first, of random distributions over a few more tokens."""
    spread = {"flat": 0.1, "mixed": 1.0, "sure": 4.0, "ties": 1.5, "twins": 1.5}[kind]
    logits = torch.from_numpy(rng.normal(size=(depth, count + 5)) * spread)
    if kind == "twins":
        # Levels that are alike make prefixes of the same multiset of candidates score the same.
        logits = logits[rng.integers(0, 2, size=depth).clip(max=depth - 1)]
    values = torch.log_softmax(logits, -1).float()
    if kind == "ties":
        values = (values * 2).round() / 2
    values = values.sort(descending=True).values[:, :count]
    tokens = np.stack([rng.permutation(1000)[:count] for _ in range(depth)])
    return torch.from_numpy(tokens), values


KINDS = ("flat", "mixed", "sure", "ties", "twins")


def case(rng: np.random.Generator, most: int = 200) -> tuple[Tensor, Tensor, int, int]:
    """Random marginals, a budget, and a depth limit."""
    depth, count = int(rng.integers(1, 17)), int(rng.choice([1, 2, 3, 8, 40, 200]))
    tokens, logprobs = marginals(rng, depth, count, str(rng.choice(KINDS)))
    return tokens, logprobs, int(rng.integers(0, most + 1)), int(rng.integers(0, 17))


def nodes_of(tree: DraftTree, row: int = 0) -> list[Node]:
    columns = (tree.tokens, tree.parents, tree.depths)
    return list(zip(*(column[row, : tree.sizes[row]].tolist() for column in columns), strict=True))


def check_closed(tree: DraftTree, in_order: bool = True) -> None:
    """Parents before children, scores that descend, no sibling twice, and nothing in the padding."""
    rows = [DraftRow([int(tree.tokens[row, 0])], size - 1, 16) for row, size in enumerate(tree.sizes)]
    check(tree, rows, in_order)
    for row, size in enumerate(tree.sizes):
        assert not tree.tokens[row, size:].any() and not tree.parents[row, size:].any()
        assert (tree.logprobs[row, size:] == float("-inf")).all()


@pytest.fixture(params=["heap", "levels"])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build best-first trees by the CPU's heap, or level by level as on other devices."""
    if request.param == "levels":
        monkeypatch.setattr("ddtree.tree.tree._HOST", "none")
    return request.param


def test_best_first_is_the_heap_node_for_node_and_in_order(builder: str) -> None:
    rng = np.random.default_rng(0)
    sizes = set()
    for turn in range(150 if builder == "levels" else 1000):
        tokens, logprobs, budget, depth = case(rng, 1024 if turn % 20 == 0 else 120)
        tree = best_first([7], tokens[None], logprobs[None], [budget], [depth])
        nodes, totals = heap_tree(7, tokens, logprobs, budget, depth)
        assert nodes_of(tree) == nodes
        torch.testing.assert_close(tree.logprobs[0], torch.tensor(totals), rtol=1e-6, atol=1e-6)
        sizes.add(len(nodes))
    assert len(sizes) > 50


def test_best_first_is_the_optimum_of_brute_force(builder: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        depth, count = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        tokens, logprobs = marginals(rng, depth, count, str(rng.choice(KINDS)))
        every = sorted(
            (
                sum(logprobs[level, rank].item() for level, rank in enumerate(ranks))
                for length in range(1, depth + 1)
                for ranks in itertools.product(range(count), repeat=length)
            ),
            reverse=True,
        )
        budget = int(rng.integers(1, len(every) + 3))
        tree = best_first([0], tokens[None], logprobs[None], [budget], [16])
        check_closed(tree)
        assert tree.sizes == [min(budget, len(every)) + 1]
        torch.testing.assert_close(tree.logprobs[0, 1:], torch.tensor(every[:budget]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_budget_is_the_beginning_of_a_larger_one(builder: str, kind: str) -> None:
    tokens, logprobs = marginals(np.random.default_rng(2), 12, 64, kind)
    whole = best_first([5], tokens[None], logprobs[None], [300], [12])
    check_closed(whole)
    for budget in (0, 1, 2, 17, 63, 64, 65, 200, 299):
        smaller = best_first([5], tokens[None], logprobs[None], [budget], [12])
        cut = whole.truncate([budget])
        assert nodes_of(smaller) == nodes_of(whole)[: budget + 1] == nodes_of(cut)
        assert torch.equal(smaller.logprobs, cut.logprobs)


def test_rows_of_a_ragged_batch_are_as_by_themselves(builder: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(12):
        rows = int(rng.integers(2, 6))
        drawn = [marginals(rng, 9, 70, str(rng.choice(KINDS))) for _ in range(rows)]
        tokens, logprobs = (torch.stack(part) for part in zip(*drawn, strict=True))
        budgets = rng.choice([0, 1, 3, 16, 64, 150], size=rows).tolist()
        depths = rng.choice([0, 1, 2, 7, 9, 16], size=rows).tolist()
        bonus = list(range(rows))
        tree = best_first(bonus, tokens, logprobs, budgets, depths)
        check_closed(tree)
        for row in range(rows):
            alone = best_first([row], *(part[row : row + 1] for part in (tokens, logprobs, budgets, depths)))
            assert nodes_of(tree, row) == nodes_of(alone)
            assert nodes_of(tree.row(row)) == nodes_of(alone)
            assert torch.equal(tree.row(row).logprobs, alone.logprobs)


def test_absent_candidates_are_left_out(builder: str) -> None:
    tokens = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]])
    gone = float("-inf")
    logprobs = torch.tensor([[[-0.5, -1.0, gone], [-0.25, gone, gone], [gone, gone, gone]]])
    tree = best_first([0], tokens, logprobs, [100], [3])
    assert paths_of(tree) == [(), (1,), (1, 4), (2,), (2, 4)]
    nothing = best_first(
        [0, 0], tokens.repeat(2, 1, 1), torch.full((2, 3, 3), float("nan")), [100, 100], [3, 3]
    )
    assert nothing.sizes == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_float_type_and_layout_of_marginals_will_do(builder: str, dtype: torch.dtype) -> None:
    tokens, logprobs = marginals(np.random.default_rng(4), 6, 20, "mixed")
    logprobs = logprobs.to(dtype)
    strided = logprobs.T.contiguous().T[None].requires_grad_()
    tree = best_first([7], tokens.T.contiguous().T[None], strided, [50], [6])
    assert nodes_of(tree) == heap_tree(7, tokens, logprobs.float(), 50, 6)[0]


def test_grown_from_marginals_and_pruned_is_the_best_first_tree() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        drawn = [marginals(rng, 7, 30, str(rng.choice(KINDS))) for _ in range(3)]
        tokens, logprobs = (torch.stack(part) for part in zip(*drawn, strict=True))
        budgets = rng.integers(0, 60, size=3).tolist()
        depth = int(rng.integers(1, 8))
        width = max(*budgets, 1)
        tree = prune(
            grow(
                [1, 2, 3],
                build._MarginalScorer(tokens, logprobs, [16] * 3, [tokens.shape[2]] * 3),
                width,
                depth,
            ),
            budgets,
        )
        check_closed(tree)
        best = best_first([1, 2, 3], tokens, logprobs, budgets, [depth] * 3)
        assert tree.sizes == best.sizes
        for row in range(3):
            assert nodes_of(tree, row) == nodes_of(best, row)


class Remembering:
    """Children that depend on the whole prefix, which is kept as a state and gathered by `parents`."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.states: list[list[tuple[int, ...]]] = []

    def children(self, row: int, prefix: tuple[int, ...]) -> tuple[list[int], list[float]]:
        rng = np.random.default_rng([self.seed, row, *prefix])
        scores = torch.log_softmax(torch.from_numpy(rng.normal(size=self.count) * 1.5), -1).float()
        scores = scores.sort(descending=True).values
        if rng.random() < 0.2:
            scores[-1] = float("-inf")
        return rng.permutation(50)[: self.count].tolist(), scores.tolist()

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        before = self.states or [[()] for _ in range(len(parents))]
        self.states = [
            [(*before[row][parent], token) for parent, token in zip(slots, row_tokens, strict=True)]
            for row, (slots, row_tokens) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True))
        ]
        found = [[self.children(row, prefix) for prefix in states] for row, states in enumerate(self.states)]
        return (
            torch.tensor([[child[0] for child in row] for row in found]),
            torch.tensor([[child[1] for child in row] for row in found]),
        )


@pytest.mark.parametrize(("width", "keep"), [(1, None), (4, None), (4, 11), (12, 12)])
def test_grow_keeps_the_best_children_of_each_level(width: int, keep: int | None) -> None:
    bonus, depth = [3, 8], 5
    tree = grow(bonus, Remembering(6, seed=9), width, depth, keep=keep)
    check_closed(tree)
    scorer = Remembering(6, seed=9)
    for row in range(2):
        level = [(0.0, (bonus[row],))]
        expected = {(): 0.0}
        for _ in range(depth):
            children = [
                (score + child, (*prefix, token))
                for score, prefix in level[:width]
                for token, child in zip(*scorer.children(row, prefix), strict=True)
                if child > float("-inf")
            ]
            level = sorted(children, reverse=True)[: keep or width]
            expected |= {prefix[1:]: score for score, prefix in level}
        found = dict(zip(paths_of(tree, row), tree.logprobs[row].tolist(), strict=False))
        assert found.keys() == expected.keys()
        assert all(abs(found[path] - expected[path]) < 1e-5 for path in found)
        scores = tree.logprobs[row, : tree.sizes[row]]
        assert (scores.diff() <= 0).all()


def random_trees(seed: int, rows: int, size: int) -> DraftTree:
    """Trees of random shapes and ragged sizes, best first."""
    rng = np.random.default_rng(seed)
    trees = []
    for row in range(rows):
        count = int(rng.integers(1, size + 1))
        tokens, parents, depths, scores = [row], [0], [0], [0.0]
        taken: set[tuple[int, int]] = set()
        while len(tokens) < count:
            parent, token = int(rng.integers(0, len(tokens))), int(rng.integers(0, 30))
            if depths[parent] < 16 and (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                scores.append(scores[parent] - float(rng.integers(1, 5)) / 2)
        columns = (torch.tensor([part]) for part in (tokens, parents, depths))
        trees.append(prune(DraftTree(*columns, torch.tensor([scores]), [count]), [count - 1]))
    return DraftTree.stack(trees)


@pytest.mark.parametrize("beta", [0.0, -0.2, -5.0])
def test_prune_keeps_the_best_by_score_and_depth(beta: float) -> None:
    tree = random_trees(6, rows=5, size=90)
    budgets, depths = [0, 10, 40, 80, 200], [16, 16, 3, 0, 6]
    for limits in (None, depths):
        pruned = prune(tree, budgets, beta, limits)
        check_closed(pruned, in_order=not beta)
        for row, budget in enumerate(budgets):
            scores = tree.logprobs[row].tolist()
            limit = limits[row] if limits else 16
            nodes = nodes_of(tree, row)
            order = sorted(
                (node for node in range(1, len(nodes)) if nodes[node][2] <= limit),
                key=lambda node: -np.float32(np.float32(scores[node]) + np.float32(beta * nodes[node][2])),
            )
            paths = paths_of(tree, row)
            assert paths_of(pruned, row) == [(), *(paths[node] for node in order[:budget])]


def test_merged_trees_hold_each_prefix_once_under_the_better_score() -> None:
    for seed in range(10):
        trees = [random_trees(100 * seed + turn, rows=3, size=60) for turn in range(3)]
        best: list[dict[tuple[int, ...], float]] = [{} for _ in range(3)]
        for tree in trees:
            for row in range(3):
                for path, score in zip(paths_of(tree, row), tree.logprobs[row].tolist(), strict=False):
                    best[row][path] = max(score, best[row].get(path, float("-inf")))
        budgets = [0, 25, 1024]
        merged = merge(trees, budgets)
        check_closed(merged)
        for row, budget in enumerate(budgets):
            assert merged.sizes[row] == min(budget, len(best[row]) - 1) + 1
            found = list(zip(paths_of(merged, row), merged.logprobs[row].tolist(), strict=False))
            assert all(score == best[row][path] for path, score in found)
            expected = sorted(best[row].items(), key=lambda item: (-item[1], len(item[0])))
            assert [(score, len(path)) for path, score in found] == [
                (score, len(path)) for path, score in expected[: budget + 1]
            ]
    alone = merge(trees[:1], [1024] * 3)
    assert all(set(paths_of(alone, row)) == set(paths_of(trees[0], row)) for row in range(3))


@pytest.mark.parametrize("size", [1, 40, 400])
def test_a_node_sees_itself_and_its_ancestors_only(size: int) -> None:
    tree = random_trees(7, rows=4, size=size)
    length = tree.tokens.shape[1]
    expected = torch.zeros(4, length, length, dtype=torch.bool)
    for row in range(4):
        for node in range(length):
            expected[row, node, node] = True
            above = node
            while above and node < tree.sizes[row]:
                above = int(tree.parents[row, above])
                expected[row, node, above] = True
    assert torch.equal(ancestor_mask(tree), expected)


def test_walk_follows_the_target_down_each_row() -> None:
    tree = random_trees(8, rows=6, size=80)
    rng = np.random.default_rng(8)
    wishes = [paths_of(tree, row)[int(rng.integers(0, tree.sizes[row]))] for row in range(6)]
    wishes = [(*wish, 999, 998) for wish in wishes]
    prefixes = [[1, 2, row] for row in range(6)]

    def choose(row: int, node: int, prefix: list[int]) -> int:
        assert prefix[:3] == prefixes[row] and paths_of(tree, row)[node] == tuple(prefix[3:])
        return wishes[row][len(prefix) - 3]

    paths, tokens = walk(tree, prefixes, choose)
    for row in range(6):
        assert tuple(int(tree.tokens[row, node]) for node in paths[row][1:]) == wishes[row][:-2]
        assert paths[row][0] == 0 and tokens[row] == list(wishes[row][:-1])
    assert prefixes == [[1, 2, row] for row in range(6)]
    texts = [[*prefix, *wish[:2]] for prefix, wish in zip(prefixes, wishes, strict=True)]
    for path, whole, chosen in zip(walk(tree, prefixes, following(texts))[0], paths, tokens, strict=True):
        assert path == whole[:3] or len(chosen) < 3


def test_walk_takes_neither_padding_nor_the_root_for_a_child() -> None:
    # Token 0 is what padding holds, and also the first row's root.
    tree = DraftTree.stack(
        [DraftTree.root([0]), random_trees(9, rows=1, size=1), random_trees(10, rows=1, size=50)]
    )
    found = walk(tree, [[0], [0], [0]], lambda row, node, prefix: 0 if row < 2 else None)
    assert found == ([[0], [0], [0]], [[0], [0], []])


def test_trees_of_several_rows_stack_and_come_apart_again() -> None:
    parts = [random_trees(seed, rows, size) for seed, rows, size in ((1, 1, 30), (2, 3, 50), (3, 2, 9))]
    tree = DraftTree.stack([*parts, DraftTree.root([4, 5])])
    check_closed(tree)
    rows = [part.row(row) for part in parts for row in range(len(part.sizes))]
    for index, alone in enumerate(rows):
        assert nodes_of(tree.row(index)) == nodes_of(alone)
    assert nodes_of(tree.row(-1)) == [(5, 0, 0)]
    assert tree.row(-1).sizes == [1] and tree.row(0).tokens.shape == (1, parts[0].sizes[0])


def test_costs_are_whole_numbers_and_absent_ones_the_largest() -> None:
    values = torch.tensor(
        [0.0, -0.0, 1e-7, -1e-9, -1e-3, -0.75, -88.0, -1e4, -1e30, float("-inf"), float("nan")]
    )
    costs = costs_of(values)
    assert costs.tolist()[:4] == [0, 0, 0, 4] and costs[5] == 3 << 30 and (costs[7:] == 1 << 42).all()


TOKENS = torch.zeros(1, 2, 3, dtype=torch.int64)
LOGPROBS = -torch.ones(1, 2, 3)
ROOT = DraftTree.root([1])
SCORER = build._MarginalScorer(TOKENS, LOGPROBS, [16], [TOKENS.shape[2]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_first([1], TOKENS, LOGPROBS, [1025], [2]), r"budgets=1025 is outside 0\.\.1024"),
        (lambda: best_first([1], TOKENS, LOGPROBS, [1.5], [2]), r"budgets=1.5 is outside 0\.\.1024"),
        (lambda: best_first([1], TOKENS, LOGPROBS, [1], [17]), r"depths=17 is outside 0\.\.16"),
        (lambda: best_first([1], TOKENS, LOGPROBS, [1, 1], [2]), "budgets has 2 entries for 1 rows"),
        (lambda: best_first([1, 2], TOKENS, LOGPROBS, [1, 1], [2, 2]), "bonus has 2 entries"),
        (lambda: best_first([1], TOKENS[..., :2], LOGPROBS, [1], [2]), r"tokens is \[1, 2, 2\]"),
        (lambda: grow([1], SCORER, 1025, 2), r"width=1025 is outside 1\.\.1024"),
        (lambda: grow([1], SCORER, 4, 17), r"depth=17 is outside 1\.\.16"),
        (lambda: grow([1], SCORER, 4, 2, keep=3), r"keep=3 is outside 4\.\.1024"),
        (lambda: prune(ROOT, [-2]), r"budgets=-2 is outside 0\.\.1024"),
        (lambda: prune(ROOT, [1], depths=[99]), r"depths=99 is outside 0\.\.16"),
        (lambda: prune(ROOT, [1], beta=0.1), r"beta=0.1 is not a finite number of at most 0"),
        (lambda: prune(ROOT, [1], beta=float("nan")), "beta=nan is not a finite number"),
        (lambda: merge([], []), r"trees=\[\] holds no tree to merge"),
        (lambda: merge([ROOT, DraftTree.root([2])], [3]), "different roots"),
        (lambda: merge([ROOT, ROOT], [2000]), r"budgets=2000 is outside 0\.\.1024"),
        (lambda: DraftTree.stack([]), r"trees=\[\] holds no tree to stack"),
        (lambda: ROOT.truncate([1025]), r"budgets=1025 is outside 0\.\.1024"),
    ],
)
def test_values_out_of_range_are_named_with_their_range(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
