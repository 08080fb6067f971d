"""Follow the target's own choices down the tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
    tokens, parents = tree.tokens.cpu().numpy(), tree.parents.cpu().numpy()
    unusable = np.arange(tokens.shape[1]) >= np.array(tree.sizes)[:, None]
    # Neither the root nor padding is anyone's child.
    unusable[:, 0] = True
    parents = np.where(unusable, -1, parents)
    paths = [[0] for _ in tree.sizes]
    walking = list(range(len(paths)))
    while walking:
        nodes = [paths[row][-1] for row in walking]
        chosen = choose(walking, nodes)
        child = parents[walking] == np.array(nodes)[:, None]
        child &= tokens[walking] == np.array(chosen)[:, None]
        found, places = child.any(axis=1).tolist(), child.argmax(axis=1).tolist()
        for row, there, place in zip(walking, found, places, strict=True):
            if there:
                paths[row].append(place)
        walking = [row for row, there in zip(walking, found, strict=True) if there]
    return paths
