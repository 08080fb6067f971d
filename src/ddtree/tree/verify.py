"""Verify draft trees: the mask that shows each node its ancestors, and the walk along the target's choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddtree.tree.tree import MAX_DEPTH, DraftTree, in_use, on_host

Choose = Callable[[int, int, list[int]], int | None]
"""Chooses the next token given (row, node, the row's tokens up to that node); None ends the row's walk."""


def walk(
    tree: DraftTree, prefixes: Sequence[list[int]], choose: Choose, ready: Tensor | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Follow the target's own choices down each row's tree, from the root until no child carries the choice.

    Args:
        tree: as verified.
        prefixes: the tokens of each row up to its root, the bonus token last; they are not changed.
        choose: the target's choice at a node. It must be a pure function of its arguments.
        ready: int64 [R, N], choices made beforehand, on the tree's device; below 0 where `choose` is asked. All are
            read at once, with the tree.

    Returns:
        The accepted path of each row, node indices with the root (0) first; and the tokens chosen along it. One token
        is chosen after each node of the path, the last of them being the next bonus token, unless None ended the walk.
        A path [0, 3, 7] with the tokens [52, 9, 11] accepts two drafted tokens and ends with the bonus token 11.
    """
    columns = [tree.tokens, tree.parents] if ready is None else [tree.tokens, tree.parents, ready]
    node_tokens, parents, *known_choices = torch.stack(columns).tolist()
    paths, chosen = [], []
    for row, (size, known) in enumerate(zip(tree.sizes, prefixes, strict=True)):
        # Neither the root nor padding is a child. Of equal siblings the first counts, so that it is entered last.
        children = {(parents[row][node], node_tokens[row][node]): node for node in range(size - 1, 0, -1)}
        prefix, path = list(known), [0]
        own = known_choices[0][row] if known_choices else [-1] * size
        while (token := own[path[-1]] if own[path[-1]] >= 0 else choose(row, path[-1], prefix)) is not None:
            prefix.append(token)
            child = children.get((path[-1], token))
            if child is None:
                break
            path.append(child)
        paths.append(path)
        chosen.append(prefix[len(known) :])
    return paths, chosen


def following(texts: Sequence[list[int]]) -> Choose:
    """Make a choice for `walk` that follows known texts, one of each row: the next token, or None at a text's end."""

    def choose(row: int, node: int, prefix: list[int]) -> int | None:
        return texts[row][len(prefix)] if len(prefix) < len(texts[row]) else None

    return choose


@torch.no_grad()
def ancestor_mask(tree: DraftTree) -> Tensor:
    """Return bool [R, N, N]: [r, i, j] is True where node j is node i or an ancestor of it.

    Padding sees itself only.
    """
    rows, nodes = tree.parents.shape
    device = tree.parents.device
    own = torch.arange(nodes, device=device).expand(rows, nodes)
    parents = tree.parents if min(tree.sizes) == nodes else torch.where(in_use(tree), tree.parents, own)
    mask = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    # The depth of the deepest node is read on the host only: elsewhere that would wait for the device.
    deepest = int(tree.depths.max()) if on_host(device) else min(MAX_DEPTH, nodes - 1)
    ancestors = own
    for _ in range(deepest):
        ancestors = parents.gather(1, ancestors)
        mask.scatter_(2, ancestors[:, :, None], True)
    return mask
