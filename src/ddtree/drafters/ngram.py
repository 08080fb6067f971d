"""Prompt lookup: what followed the same tokens before, in the row's own text or in a static table. No model.

The probability of a token backs off from the longest known suffix of a context to the shorter ones. Each suffix gets
the share of the probability that the longer ones left over, and leaves over the more, the more different tokens have
followed it.

A network scores all children of a level in one batch, and `ddtree.tree.grow` is made for that. N-grams are looked up
one context at a time: in `grow_lazily` a node's children are asked for when the node enters the tree, and one by one.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.ngram_table import DOUBT, MAX_ORDER, NgramTable, extend_hash
from ddtree.errors import CheckpointError, ConfigError, check_whole
from ddtree.model.kv_cache import drop_row
from ddtree.sampling.noise import PLAIN, Noise, check_coupling
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree

_MEAN_GUMBEL = 0.5772
_WEIGHT, _WEIGHT_ALONE = 6.0, 2.0
_WIDTH = 16  # successors looked at of one suffix: the newest of the row's own, the most frequent of the table
_NEGLIGIBLE = 1e-3  # shorter suffixes are not asked when less than this is left for them


class Lookup:
    """Drafts with n-grams, best first under each row's budget.

    Args:
        table: counts of other texts, such as the target's own answers; None uses the row's text alone.
        vocab_size: the target's; a table with higher ids is refused.
        order: longest context, 1..8.
        weight: how much one occurrence in the row's own text counts: against one in the table, by default 6; without
            a table against the doubt whether it comes again, by default 2, where held-out answers are likeliest.
        coupling: (beta, kappa) of noise-coupled drafting; the table's own by default. (0, 1) drafts without looking
            at the noise, as is done without a table: a text alone knows too few tokens to rank.
        device: where the trees are wanted.

    Raises:
        ConfigError: an argument is out of range.
        CheckpointError: the table was made with another vocabulary.
    """

    name = "lookup"
    feature_layers: tuple[int, ...] = ()
    max_depth = MAX_DEPTH

    def __init__(
        self,
        table: NgramTable | None = None,
        *,
        vocab_size: int | None = None,
        order: int = 5,
        weight: float | None = None,
        coupling: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_whole("order", order, 1, MAX_ORDER)
        if weight is None:
            weight = _WEIGHT_ALONE if table is None else _WEIGHT
        if not 0 < weight < math.inf:
            raise ConfigError(f"weight={weight} is not a positive finite number")
        if table is not None and vocab_size is not None and table.vocab_size > vocab_size:
            raise CheckpointError(
                f"the n-gram table holds token id {table.vocab_size - 1} and the target has {vocab_size} tokens: "
                "build a table from the target's own answers"
            )
        if coupling is None:
            coupling = PLAIN if table is None else table.coupling
        check_coupling(*coupling)
        self.table = table
        self.order = order
        self.weight = weight
        self.coupling = coupling
        self.device = torch.device(device)
        self._rows: list[TextIndex] = []

    def add_row(self) -> None:
        """Open an empty row at the end."""
        self._rows.append(TextIndex(self.order))

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its index."""
        drop_row(self._rows, row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Do nothing: `DraftRow.tokens` holds the whole text, the bonus token included."""

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row."""
        self.follow(rows)
        with clock("build"):
            trees = [grow_lazily(row, self.proposals_for(index, row)) for index, row in enumerate(rows)]
            return batched(trees, self.device)

    def follow(self, rows: list[DraftRow]) -> None:
        """Count the n-grams of what the rows' texts have beyond what was counted before."""
        for index, row in enumerate(rows):
            if not self._rows[index].is_prefix_of(row.tokens):
                self._rows[index] = TextIndex(self.order)
            self._rows[index].extend(row.tokens)

    def proposals_for(self, index: int, row: DraftRow) -> NgramProposals:
        """Return what may follow a row, which `follow` has got before."""
        noise = None if self.coupling == PLAIN else row.noise
        return NgramProposals(self._rows[index], self.table, self.weight, row.tokens, noise, self.coupling)


class TextIndex:
    """The n-grams of one row's text, which grows.

    Attributes:
        order: longest context, as 5.
        entries: by the hash of a context, its successor when it occurred once, else [occurrences],
            {successor: count}, where the latest successor is the last.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.entries: dict[int, int | tuple[list[int], dict[int, int]]] = {}
        self._length = 0
        self._tail: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Count what `tokens`, the whole text, has beyond what was counted before."""
        entries, order = self.entries, self.order
        for at in range(self._length, len(tokens)):
            token, word = tokens[at], 0
            for before in range(at - 1, max(at - 1 - order, -1), -1):
                word = extend_hash(word, tokens[before])
                entry = entries.get(word)
                if entry is None:
                    entries[word] = token
                    continue
                if isinstance(entry, int):
                    entry = entries[word] = ([1], {entry: 1})
                entry[0][0] += 1
                entry[1][token] = entry[1].pop(token, 0) + 1
        self._length = len(tokens)
        self._tail = list(tokens[-order:])

    def is_prefix_of(self, tokens: Sequence[int]) -> bool:
        """Return whether `tokens` continues the text counted so far; only the end of that text is compared."""
        return tokens[max(0, self._length - self.order) : self._length] == self._tail


def backoff(
    context: Sequence[int], index: TextIndex, table: NgramTable | None, weight: float
) -> tuple[dict[int, float], float]:
    """Return the probabilities of the known tokens after a context, and that of all unknown ones together.

    The tokens come in the order in which they are found: those of the longest suffix first, within one the newest.

    Args:
        context: the last tokens, no more than the index's order.
        index: the row's own text.
        table: counts of other texts.
        weight: how much one occurrence in the own text counts against one in the table, as 6.
    """
    entries, word, found = index.entries, 0, []
    for token in reversed(context):
        word = extend_hash(word, token)
        own, static = entries.get(word), table.find(word, _WIDTH) if table else None
        if own is not None or static is not None:
            found.append((own, static))
    scores: dict[int, float] = {}
    left = 1.0
    for own, static in reversed(found):
        total, different = (static.total, static.different) if static else (0, 1)
        if isinstance(own, int):
            share = left / (total + weight + DOUBT * different)
            scores[own] = scores.get(own, 0.0) + share * weight
            left -= share * weight
        elif own is not None:
            seen, successors = own
            share = left / (total + weight * seen[0] + DOUBT * max(different, len(successors)))
            for token, count in islice(reversed(successors.items()), _WIDTH):
                scores[token] = scores.get(token, 0.0) + share * weight * count
            left -= share * weight * seen[0]
        else:
            share = left / (total + DOUBT * different)
        if static:
            for token, count in zip(static.tokens, static.counts, strict=True):
                scores[token] = scores.get(token, 0.0) + share * count
            left -= share * static.known
        if left < _NEGLIGIBLE:
            break
    return scores, left


NgramState = tuple[list[int], int]
"""The last tokens of a path, and the absolute position of its children."""


class NgramProposals:
    """Probabilities of the tokens that n-grams know to follow the paths of one row's tree; a `PathModel`.

    Args:
        index: n-grams of the row's text.
        table: of other texts.
        weight: of an occurrence in the row's text, against one in the table.
        tokens: the row's text, the bonus token included.
        noise: the row's, to rank the tokens under; None for a greedy row or without coupling.
        coupling: (beta, kappa) with that noise.
    """

    def __init__(
        self,
        index: TextIndex,
        table: NgramTable | None,
        weight: float,
        tokens: list[int],
        noise: Noise | None,
        coupling: tuple[float, float],
    ) -> None:
        self._known = index, table, weight
        self._order = index.order
        self._root = tokens[-self._order :], len(tokens)
        self._noise = noise
        self._beta, self._kappa = coupling
        # By position: what is drawn there serves all nodes of the depth.
        self._drawn: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def start(self) -> NgramState:
        """Return the state of the root."""
        return self._root

    def step(self, state: NgramState, token: int) -> NgramState:
        """Return the state of a path with one more token."""
        context, position = state
        return [*context, token][-self._order :], position + 1

    def probabilities(self, state: NgramState) -> dict[int, float]:
        """Return those of the known tokens after a path; what they lack to 1 is left to unknown tokens."""
        context, position = state
        scores, unknown = backoff(context, *self._known)
        return self._coupled(scores, unknown, position) if scores and self._noise is not None else scores

    def children(self, state: NgramState) -> Children:
        """Return the known tokens, best first; ties by longest suffix, then newest."""
        return iter(sorted(self.probabilities(state).items(), key=itemgetter(1), reverse=True))

    def _coupled(self, scores: dict[int, float], unknown: float, position: int) -> dict[int, float]:
        """Return the candidates' chances under the noise of a position, without those of no chance.

        They are ranked as `ddtree.sampling.noise.couple` ranks a whole vocabulary. The unknown tokens compete as one,
        with the mean of the noise.
        """
        drawn, beta, kappa = self._drawn[position], self._beta, self._kappa
        missing = [token for token in scores if token not in drawn]
        if missing and self._noise is not None:
            drawn.update(zip(missing, self._noise.few(position, missing), strict=True))
        values = [(math.log(score) + beta * drawn[token]) / kappa for token, score in scores.items()]
        rest = (math.log(unknown) + beta * _MEAN_GUMBEL) / kappa
        highest = max(rest, *values)
        chances = [math.exp(value - highest) for value in values]
        total = sum(chances) + math.exp(rest - highest)
        return {token: chance / total for token, chance in zip(scores, chances, strict=True) if chance > 0}


Children = Iterator[tuple[int, float]]
"""Tokens and probabilities, best first; each is above 0."""


class PathModel(Protocol):
    """Gives the children of any path of tokens below the root. Each path has a state, which only the model reads."""

    def start(self) -> Any:
        """Return the state of the root."""

    def step(self, state: Any, token: int) -> Any:
        """Return the state of a path with one more token; the given state stays as it is."""

    def children(self, state: Any) -> Children:
        """Return the children of the path with this state."""


class LazyTree:
    """The tree of one row as Python lists, one entry a node: quicker than tensors while it grows.

    Attributes:
        tokens, parents, depths, logprobs: as in `DraftTree`; the root is node 0.
    """

    def __init__(self, bonus: int) -> None:
        self.tokens, self.parents, self.depths, self.logprobs = [bonus], [0], [0], [0.0]

    def append(self, token: int, parent: int, depth: int, logprob: float) -> None:
        """Add a node at the end."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.logprobs.append(logprob)


def grow_lazily(row: DraftRow, model: PathModel) -> LazyTree:
    """Return the best nodes of one row within its budget and depth; ties by depth, then rank, then parent."""
    tree = LazyTree(row.tokens[-1])
    states: dict[int, Any] = {}
    # An entry is the best child of a node that is not in the tree yet, and its later siblings:
    # (cost, depth, rank among siblings, parent, token, siblings).
    waiting: list[tuple[float, int, int, int, int, Children]] = []
    node = 0
    while node < row.budget:
        depth = tree.depths[node]
        if depth < row.depth:
            before = states.get(tree.parents[node])
            states[node] = model.step(before, tree.tokens[node]) if node else model.start()
            children = model.children(states[node])
            first = next(children, None)
            if first is not None:
                cost = -math.log(first[1]) - tree.logprobs[node]
                heapq.heappush(waiting, (cost, depth + 1, 0, node, first[0], children))
        if not waiting:
            break
        cost, depth, rank, parent, token, siblings = waiting[0]
        tree.append(token, parent, depth, -cost)
        node += 1
        following = None if row.chain else next(siblings, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            # Siblings descend, but for rounding.
            cost = max(cost, -math.log(following[1]) - tree.logprobs[parent])
            heapq.heapreplace(waiting, (cost, depth, rank + 1, parent, following[0], siblings))
    return tree


def batched(trees: list[LazyTree], device: torch.device) -> DraftTree:
    """Return the rows' trees as one batch of tensors on a device."""
    sizes = [len(tree.tokens) for tree in trees]
    width = max(sizes)

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        lists = [getattr(tree, name) for tree in trees]
        return torch.tensor([own + [fill] * (width - len(own)) for own in lists], dtype=dtype, device=device)

    return DraftTree(
        column("tokens", 0, torch.int64),
        column("parents", 0, torch.int64),
        column("depths", 0, torch.int64),
        column("logprobs", -math.inf, torch.float32),
        sizes,
    )
