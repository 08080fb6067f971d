"""Drafters for tests that know the answers, and propose them among wrong siblings."""

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.stats import Clock
from ddtree.tree import DraftTree


class Scripted:
    """Proposes, for a row whose tokens begin one of `texts`, the next `reach` true tokens.

    The true path is the second child at every level, so that accepted columns always have to move. Where the budget
    leaves one node, that is the true one.
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

    def _text(self, tokens: list[int]) -> int | None:
        """Which of `texts` begins with these tokens."""
        return next((i for i, text in enumerate(self.texts) if text[: len(tokens)] == tokens), None)

    def _tree(self, row: DraftRow) -> DraftTree:
        n = len(row.tokens)
        known = self._text(row.tokens)
        text = row.tokens if known is None else self.texts[known]
        tokens, parents, depths, parent = [row.tokens[-1]], [0], [0], 0
        for depth, true in enumerate(text[n : n + row.depth], 1):
            room = row.budget + 1 - len(tokens)
            if not room:
                break
            children = [(true + 1) % self.vocab, true][-room:]
            tokens += children
            parents += [parent] * len(children)
            depths += [depth] * len(children)
            parent = len(tokens) - 1
        return DraftTree(
            torch.tensor([tokens]),
            torch.tensor([parents]),
            torch.tensor([depths]),
            -torch.tensor([depths], dtype=torch.float32),
            [len(tokens)],
        )


class Informed(Scripted):
    """A scripted drafter that proposes nothing for a row any more once the features of a token were not the right ones.

    Args:
        features: of each text, [tokens, H]: outputs of decoder layer 0 in a plain forward.
    """

    name = "informed"
    feature_layers = (0,)

    def __init__(
        self, texts: list[list[int]], features: list[Tensor], reach: int = 4, vocab: int = 48
    ) -> None:
        super().__init__(texts, reach, vocab)
        self.features = features
        self.misled: list[bool] = []

    def add_row(self) -> None:
        super().add_row()
        self.misled.append(False)

    def drop_row(self, row: int) -> None:
        super().drop_row(row)
        last = self.misled.pop()
        if row < len(self.misled):
            self.misled[row] = last

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        super().observe(row, tokens, features)
        known, end = self._text(self.seen[row]), len(self.seen[row])
        assert known is not None and features is not None
        right = self.features[known][end - len(tokens) : end]
        self.misled[row] |= not torch.allclose(features, right, rtol=1e-3, atol=1e-3)

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        tree = super().draft(rows, clock)
        return tree.truncate(
            [0 if wrong else row.budget for wrong, row in zip(self.misled, rows, strict=True)]
        )
