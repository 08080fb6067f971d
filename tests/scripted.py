"""A drafter for tests that knows the answers, and proposes them among wrong siblings."""

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.stats import Clock
from ddtree.tree import DraftTree


class Scripted:
    """Proposes, for a row whose tokens begin one of `texts`, the next `reach` true tokens.

    The true path is the second child at every level, so that accepted columns always have to move.
    """

    name = "scripted"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, texts: list[list[int]], reach: int = 4, vocab: int = 48) -> None:
        self.texts = texts
        self.max_depth = reach
        self.vocab = vocab
        self.seen: list[list[int]] = []

    def add_row(self) -> None:
        self.seen.append([])

    def drop_row(self, row: int) -> None:
        last = self.seen.pop()
        if row < len(self.seen):
            self.seen[row] = last

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        self.seen[row] += tokens

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        trees = []
        for row, committed in zip(rows, self.seen, strict=True):
            assert committed == row.tokens[:-1], "observe() must tell exactly the committed tokens"
            trees.append(self._tree(row))
        return DraftTree.stack(trees)

    def _tree(self, row: DraftRow) -> DraftTree:
        n = len(row.tokens)
        text = next((t for t in self.texts if t[:n] == row.tokens), row.tokens)
        tokens, parents, depths, parent = [row.tokens[-1]], [0], [0], 0
        for depth, true in enumerate(text[n : n + row.depth], 1):
            if len(tokens) + 2 > row.budget + 1:
                break
            tokens += [(true + 1) % self.vocab, true]
            parents += [parent, parent]
            depths += [depth, depth]
            parent = len(tokens) - 1
        return DraftTree(
            torch.tensor([tokens]),
            torch.tensor([parents]),
            torch.tensor([depths]),
            -torch.tensor([depths], dtype=torch.float32),
            [len(tokens)],
        )
