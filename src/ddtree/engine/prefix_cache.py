"""What texts that were processed leave to later ones that begin alike: keys, values and features.

A tree of parts: the texts that begin alike share the parts that they have in common. The target's features are kept
beside keys and values, so that any drafter can be told the reused tokens as if they had just been processed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.model.kv_cache import Columns, drop_row

Read = Callable[[int, int], Columns]
"""Keys and values of a row's tokens from a first one up to, without, a last one."""


@dataclass(frozen=True)
class Part:
    """Some tokens of a text, after those of the parts before it.

    Attributes:
        tokens: n of them.
        columns: their keys and values, layer by layer, [H, n, D].
        features: [n, F * H], or None where no drafter asks for any.
    """

    tokens: list[int]
    columns: Columns
    features: Tensor | None

    @property
    def bytes(self) -> int:
        tensors = [tensor for pair in self.columns for tensor in pair]
        tensors += [] if self.features is None else [self.features]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def cut(self, start: int, stop: int) -> Part:
        """The tokens start..stop-1; shares memory."""
        columns = [(keys[:, start:stop], values[:, start:stop]) for keys, values in self.columns]
        features = None if self.features is None else self.features[start:stop]
        return Part(self.tokens[start:stop], columns, features)

    def copy(self) -> Part:
        """The same, holding no memory but its own."""
        columns = [(_owned(keys), _owned(values)) for keys, values in self.columns]
        return Part(list(self.tokens), columns, None if self.features is None else _owned(self.features))


class _Node:
    """A part in the tree; `used` tells when it was last of use."""

    def __init__(self, part: Part, parent: _Node | None) -> None:
        self.part = part
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixStore:
    """Parts of texts within a bound of memory; what was of no use for longest goes first.

    It follows the rows of a cache (packed, the last row takes the place of a dropped one), because the features of an
    answer are only there while it is made.

    Args:
        limit: most bytes of keys, values and features. What would not fit beside the prefix that it continues is not
            kept.
        features: whether any drafter asks for features, so that parts without them are of no use.

    Attributes:
        bytes: in use.
    """

    def __init__(self, limit: int, features: bool) -> None:
        self.limit = limit
        self._features = features
        self.bytes = 0
        self._root = _Node(Part([], [], None), None)
        self._uses = 0
        self._answers: list[list[Tensor]] = []

    @torch.inference_mode()
    def find(self, tokens: list[int]) -> list[Part]:
        """The parts, first to last, of the longest prefix of `tokens` that is known; they share the store's memory."""
        return [node.part.cut(0, count) for node, count in self._path(tokens)]

    def add_row(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        """Open a row at the end, with the prompt that it begins with, which is kept.

        Args:
            tokens: of the prompt.
            read: gives their keys and values.
            features: of all of them, in parts [n, F * H]; none where no drafter asks for any.
        """
        self._answers.append([])
        self._keep(tokens, read, features)

    def observe(self, row: int, features: Tensor | None) -> None:
        """Take the features [n, F * H] of tokens newly committed to a row."""
        if features is not None:
            self._answers[row].append(features)

    def drop_row(self, row: int, tokens: list[int] | None, read: Read) -> None:
        """Keep what a row committed, its prompt included, and forget the row; `tokens` None: keep nothing of it."""
        if tokens is not None:
            self._keep(tokens, read, self._answers[row])
        drop_row(self._answers, row)

    def _keep(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        # A device without room for a copy does without.
        with suppress(torch.OutOfMemoryError), torch.inference_mode():
            self._add(tokens, read, features)

    def _add(self, tokens: list[int], read: Read, features: list[Tensor]) -> None:
        path = self._path(tokens)
        start = sum(count for _, count in path)
        count = len(tokens) - start
        # Of an answer there are no features but its own: the prompt that it continues may be gone.
        if count == 0 or (self._features and sum(map(len, features)) < count):
            return
        new = Part(
            tokens[start:], read(start, len(tokens)), _last(features, count) if self._features else None
        )
        held = {id(node) for node, _ in path}
        if not self._make_room(new.bytes, held):
            return
        node = self._root
        if path:
            node, count = path[-1]
            if count < len(node.part.tokens):
                node = self._split(node, count)
        self._attach(new.copy(), node)

    def _path(self, tokens: list[int]) -> list[tuple[_Node, int]]:
        """Nodes along `tokens` and how many tokens of each they are; counts as a use of them."""
        self._uses += 1
        path, node, at = [], self._root, 0
        while at < len(tokens) and tokens[at] in node.children:
            node = node.children[tokens[at]]
            node.used = self._uses
            count = shared(node.part.tokens, tokens[at:])
            path.append((node, count))
            at += count
            if count < len(node.part.tokens):
                break
        return path

    def _attach(self, part: Part, parent: _Node) -> None:
        node = parent.children[part.tokens[0]] = _Node(part, parent)
        node.used = self._uses
        self.bytes += part.bytes

    def _split(self, node: _Node, count: int) -> _Node:
        """Make two nodes of one, the first of `count` tokens, which is returned."""
        assert node.parent is not None
        tail = node.part.cut(count, len(node.part.tokens)).copy()
        head = _Node(node.part.cut(0, count).copy(), node.parent)
        head.used = node.used
        node.parent.children[head.part.tokens[0]] = head
        node.part, node.parent = tail, head
        head.children[node.part.tokens[0]] = node
        return head

    def _make_room(self, need: int, held: set[int]) -> bool:
        """Drop ends of texts, those of use longest ago first, until there is room beside the nodes `held`."""
        while self.bytes + need > self.limit:
            ends = [node for node in self._nodes() if not node.children and id(node) not in held]
            if not ends:
                return False
            oldest = min(ends, key=lambda node: node.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.part.tokens[0]]
            self.bytes -= oldest.part.bytes
        return True

    def _nodes(self) -> Iterator[_Node]:
        open_nodes = list(self._root.children.values())
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children.values()
            yield node


def shared(first: list[int], second: list[int]) -> int:
    """How many tokens two texts have in common from their beginning on."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


def _last(parts: list[Tensor], count: int) -> Tensor:
    """The last `count` rows of tensors [n, ...] one after the other, in memory of their own."""
    kept = []
    for part in reversed(parts):
        if count <= 0:
            break
        kept.append(part[-count:])
        count -= len(part)
    return torch.cat(kept[::-1])


def _owned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
