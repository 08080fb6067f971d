"""Keep keys, values and features of processed texts for later prompts that begin alike.

A radix tree of parts: texts that begin alike share the parts that they have in common. The target's features are kept
beside keys and values, so that any drafter can observe the reused tokens as if they had just been processed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.model.kv_cache import Columns, drop_row
from ddtree.sampling.processors import common_length

Read = Callable[[int, int], Columns]
"""Reads the keys and values of a row's tokens start..stop-1."""


@dataclass(eq=False)
class Part:
    """Some tokens of a text, after those of the parts before it: a node of the tree.

    Attributes:
        tokens: n of them.
        columns: their keys and values, layer by layer, [H, n, D].
        features: [n, F * H], or None where no drafter asks for any.
        parent: the part before it.
        children: the parts after it, by their first tokens.
        used: number of the lookup that last used it.
    """

    tokens: list[int]
    columns: Columns
    features: Tensor | None
    parent: Part | None = None
    children: dict[int, Part] = field(default_factory=dict)
    used: int = 0

    @property
    def bytes(self) -> int:
        """Memory of its tensors."""
        tensors = [tensor for pair in self.columns for tensor in pair]
        tensors += [] if self.features is None else [self.features]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def cut(self, start: int, stop: int) -> Part:
        """Return the tokens start..stop-1 as a part that shares memory and is in no tree."""
        columns = [(keys[:, start:stop], values[:, start:stop]) for keys, values in self.columns]
        features = None if self.features is None else self.features[start:stop]
        return Part(self.tokens[start:stop], columns, features)

    def copy(self) -> Part:
        """Return the same in memory of its own."""
        columns = [(_owned(keys), _owned(values)) for keys, values in self.columns]
        return Part(list(self.tokens), columns, None if self.features is None else _owned(self.features))


class PrefixCache:
    """Parts of texts within a bound of memory; the least recently used go first.

    It follows the rows of a cache (packed, the last row takes the place of a dropped one), because the features of an
    answer are only there while it is made.

    Args:
        limit: most bytes of keys, values and features. A part that does not fit beside the prefix it continues is not
            kept.
        features: a drafter needs features, so that parts without them are useless.

    Attributes:
        bytes: in use.
    """

    def __init__(self, limit: int, features: bool) -> None:
        self.limit = limit
        self._features = features
        self.bytes = 0
        self._root = Part([], [], None)
        self._uses = 0
        self._answers: list[list[Tensor]] = []

    @torch.inference_mode()
    def find(self, tokens: list[int]) -> list[Part]:
        """Return the parts, first to last, of the longest known prefix of `tokens`; they share the cache's memory."""
        return [part.cut(0, count) for part, count in self._path(tokens)]

    def add_row(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        """Open a row at the end and keep the prompt that it begins with.

        Args:
            tokens: of the prompt.
            read: reads their keys and values.
            features: their features, in parts [n, F * H]; empty where no drafter needs any.
        """
        self._answers.append([])
        self._keep(tokens, read, features)

    def observe(self, row: int, features: Tensor | None) -> None:
        """Take the features [n, F * H] of tokens newly committed to a row."""
        if features is not None:
            self._answers[row].append(features)

    def drop_row(self, row: int, tokens: list[int] | None, read: Read) -> None:
        """Keep the tokens that a row committed, prompt included, and forget the row; with None, keep nothing of it."""
        if tokens is not None:
            self._keep(tokens, read, self._answers[row])
        drop_row(self._answers, row)

    def _keep(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        # Without memory for a copy nothing is kept.
        with suppress(torch.OutOfMemoryError), torch.inference_mode():
            self._add(tokens, read, features)

    def _add(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        path = self._path(tokens)
        start = sum(count for _, count in path)
        count = len(tokens) - start
        # A row keeps the features of its answer only; those of its prompt may have been dropped.
        if count == 0 or (self._features and sum(map(len, features)) < count):
            return
        own = torch.cat(features)[-count:] if self._features else None
        new = Part(tokens[start:], read(start, len(tokens)), own)
        if not self._make_room(new.bytes, {id(part) for part, _ in path}):
            return
        parent, count = path[-1] if path else (self._root, 0)
        if count < len(parent.tokens):
            parent = self._split(parent, count)
        new = parent.children[tokens[start]] = new.copy()
        new.parent, new.used = parent, self._uses
        self.bytes += new.bytes

    def _path(self, tokens: list[int]) -> list[tuple[Part, int]]:
        """Return the parts along `tokens` and how many tokens of each match; count it as a use of them."""
        self._uses += 1
        path, part, at = [], self._root, 0
        while at < len(tokens) and tokens[at] in part.children:
            part = part.children[tokens[at]]
            part.used = self._uses
            count = common_length(part.tokens, tokens[at:])
            path.append((part, count))
            at += count
            if count < len(part.tokens):
                break
        return path

    def _split(self, part: Part, count: int) -> Part:
        """Split a part in two, the first of `count` tokens, and return the first."""
        assert part.parent is not None
        head, tail = part.cut(0, count).copy(), part.cut(count, len(part.tokens)).copy()
        for half, above in ((head, part.parent), (tail, head)):
            half.parent, half.used = above, part.used
            above.children[half.tokens[0]] = half
        tail.children = part.children
        for child in tail.children.values():
            child.parent = tail
        return head

    def _make_room(self, need: int, held: set[int]) -> bool:
        """Drop leaves, least recently used first, until it fits beside the parts `held`; return whether it does."""
        while self.bytes + need > self.limit:
            ends = [part for part in self._parts() if not part.children and id(part) not in held]
            if not ends:
                return False
            oldest = min(ends, key=lambda part: part.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens[0]]
            self.bytes -= oldest.bytes
        return True

    def _parts(self) -> Iterator[Part]:
        left = list(self._root.children.values())
        while left:
            part = left.pop()
            left += part.children.values()
            yield part


def _owned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
