"""Follow the target's own choices down the tree."""

from __future__ import annotations

from collections.abc import Callable

from ddtree.tree.draft_tree import DraftTree


def walk(tree: DraftTree, choose: Callable[[list[int], list[int]], list[int]]) -> list[list[int]]:
    """From the root, go to the child that carries the target's choice, until none does; all rows at once.

    Args:
        choose: given the rows still walking and the node at which each stands, the token that the target
            chooses after each. A token that no child carries (-1, say) ends a row's walk. The last token chosen
            for a row is its next bonus token.

    Returns:
        For each row the accepted path: node indices, the root first.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    # The target's choice comes to the host in any case, and a path is short: looking up beats comparing all nodes.
    children = [
        # Neither the root nor padding is anyone's child. Of equal siblings the first counts.
        dict(
            zip(
                zip(parents[row][size:0:-1], tokens[row][size:0:-1], strict=True),
                range(size, 0, -1),
                strict=True,
            )
        )
        for row, size in enumerate(size - 1 for size in tree.sizes)
    ]
    paths = [[0] for _ in tree.sizes]
    walking = list(range(len(paths)))
    while walking:
        nodes = [paths[row][-1] for row in walking]
        chosen = choose(walking, nodes)
        going = []
        for row, step in zip(walking, zip(nodes, chosen, strict=True), strict=True):
            child = children[row].get(step)
            if child is not None:
                paths[row].append(child)
                going.append(row)
        walking = going
    return paths
