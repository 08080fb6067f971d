"""What every draft tree must be."""

from ddtree.drafters import DraftRow
from ddtree.tree import DraftTree


def paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the root (not included) to each node of a row, the root's first."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.sizes[row]):
        found.append((*found[parents[node]], tokens[node]))
    return found


def check(tree: DraftTree, rows: list[DraftRow], in_order: bool = True) -> None:
    """Roots, budgets, depths; parents before children; no sibling twice; scores descend along paths, and in order."""
    assert tree.tokens.shape[0] == len(rows) == len(tree.sizes)
    for index, row in enumerate(rows):
        own = tree.row(index)
        parents, depths, scores = own.parents[0].tolist(), own.depths[0].tolist(), own.logprobs[0].tolist()
        assert own.tokens[0, 0] == row.tokens[-1]
        assert (parents[0], depths[0], scores[0]) == (0, 0, 0.0)
        assert tree.sizes[index] <= row.budget + 1
        assert max(depths) <= row.depth
        for node in range(1, len(parents)):
            assert parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
            assert scores[node] <= scores[parents[node]]
        assert scores == sorted(scores, reverse=True) or not in_order
        assert len(set(paths(tree, index))) == tree.sizes[index]
        if row.chain:
            assert parents == [0, *range(len(parents) - 1)]
