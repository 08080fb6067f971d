"""The D2SD drafter: a second pass drafts again from where the first one is likely to go wrong."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.drafters import DraftRow, keep_chains
from ddtree.drafters.dflash import BlockDrafter
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.errors import ConfigError, check_whole
from ddtree.model.kv_cache import KVFootprint
from ddtree.sampling.noise import PLAIN
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, best_first, grow, merge, prune
from ddtree.tree.build import ABSENT, cheapest, costs_of

# Prefixes expanded a level, and children of a branch's; trees of up to as many nodes are the best.
_WIDTH = 64


class D2SD(BlockDrafter):
    """Drafts twice with a DFlash network (D2SD, arXiv 2606.04446), and makes one tree of both passes.

    The first pass is DFlash's. At a prefix that it holds likely and whose next token it is unsure of, a drafter goes
    wrong most often: the chance that the first error comes right after a prefix n is r(n) = P(n) (1 - c), where c is
    the first pass's highest probability at the depth after n. The second pass drafts again, in one batch, after the
    `branches` prefixes of the highest r, this time with their tokens given. The root is not among them: there a
    second pass sees what the first one saw.

    Published D2SD takes prefixes of the greedy chain and verifies the chain and one chain more of each branch. Here,
    by default, prefixes are taken from the first pass's whole tree, and a node's children have the probabilities of
    the pass that knows most of its path: of the branch at its deepest ancestor that has one, the node itself
    included, and of the first pass where there is none. The best nodes of that tree fill the budget.

    Args:
        backbone: the network over the rows' contexts, the first pass.
        second: another over the same features, trained with longer given prefixes; the first one by default.
        branches: most prefixes to draft again from, 1..64. A row that wants a chain gets the first pass's.
        trees: False verifies chains, as published: the first and that of each branch, shared prefixes once.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Raises:
        ConfigError: branches, beta or kappa is out of range, or the networks read different features.
    """

    name = "d2sd"

    def __init__(
        self,
        backbone: Backbone,
        second: Backbone | None = None,
        *,
        branches: int = 4,
        trees: bool = True,
        coupling: tuple[float, float] = PLAIN,
    ) -> None:
        check_whole("branches", branches, 1, _WIDTH)
        if second is not None and second.feature_layers != backbone.feature_layers:
            raise ConfigError(
                f"the second pass reads layers {list(second.feature_layers)} and the first "
                f"{list(backbone.feature_layers)}: give networks over the same features"
            )
        super().__init__(backbone, coupling=coupling)
        self.second = second or backbone
        self.branches = branches
        self.trees = trees
        self.max_depth = max(self.backbone.depth, self.second.depth)
        if second is not None:
            self.backbones.append(second)

    def kv_footprints(self) -> list[KVFootprint]:
        """Return the contexts' caches with the most memory that they can take."""
        return [part.kv_footprint(self.branches if part is self.second else 1) for part in self.backbones]

    def _draft(self, rows: list[DraftRow], bonus: list[int], width: int, clock: Clock) -> DraftTree:
        first, depth = self.backbone, max(row.depth for row in rows)
        states = first.states(bonus, min(depth, first.depth))
        marginals = _Marginals(*self.likeliest(first, rows, states[:, None], width))
        with clock("build"):
            points = self._points(rows, bonus, marginals)
        if points is not None:
            known = torch.cat((_column(bonus, points.prefixes), points.prefixes), dim=2)
            counts, seen = 1 + points.lengths, min(depth, self.second.depth)
            states = self.second.branches(known, counts, seen)
            again = _Marginals(*self.likeliest(self.second, rows, states, min(width, _WIDTH)))
            marginals = _joined(marginals, again)
        with clock("build"):
            keep_chains(marginals.scores, rows)
            if not self.trees:
                marginals.scores[..., 1:] = float("-inf")
            if points is None or self.trees:
                return _tree(rows, bonus, marginals, points)
            return _chains(rows, bonus, marginals, points)

    def _points(self, rows: list[DraftRow], bonus: list[int], first: _Marginals) -> _Points | None:
        """Return the prefixes of the highest risk, where the second pass begins; None when there is no place for it."""
        depths = [0 if row.chain or row.budget == 0 else row.depth for row in rows]
        limit = min(first.tokens.shape[2], max(depths) - 1, self.second.depth - 1)
        if limit < 1:
            return None
        tokens, scores = first.tokens[:, 0], first.scores[:, 0]
        budgets = [min(4 * self.branches, MAX_BUDGET)] * len(rows)
        if not self.trees:
            tokens, scores, budgets = tokens[:, :, :1], scores[:, :, :1], [limit] * len(rows)
        found = best_first(bonus, tokens, scores, budgets, [min(limit, max(own - 1, 0)) for own in depths])
        # The first pass says nothing beyond its own depth: whatever comes there is its error.
        later = scores[:, 1 : limit + 1, 0]
        unsure = torch.ones(len(rows), limit, device=scores.device)
        unsure[:, : later.shape[1]] = -torch.expm1(later)
        risks = costs_of(found.logprobs + unsure.gather(1, (found.depths - 1).clamp(min=0)).log())
        risks.masked_fill_(found.depths == 0, ABSENT)  # the root and padding
        nodes = cheapest(risks, min(self.branches, risks.shape[1]))
        lengths = found.depths.gather(1, nodes).masked_fill(risks.gather(1, nodes) >= ABSENT, 0)
        return _Points(_prefixes(found, nodes, limit), lengths)


class _Marginals(NamedTuple):
    """The likeliest tokens int64 [R, K, L, C] of each block and depth, best first, and their log-probabilities."""

    tokens: Tensor
    scores: Tensor


class _Points(NamedTuple):
    """Branch points: tokens after the bonus int64 [R, K, n], and how many of them count [R, K]; 0 of none."""

    prefixes: Tensor
    lengths: Tensor


class _Passes:
    """A `Scorer`: children have the probabilities of the block that knows most of their path.

    Block 0 is the first pass's, block k that of branch point k - 1.
    """

    def __init__(self, marginals: _Marginals, points: _Points) -> None:
        self._marginals, self._points = marginals, points
        rows = len(points.lengths)
        self._block = torch.zeros(rows, 1, dtype=torch.int64, device=points.lengths.device)
        # bool [R, W, K], the branch points that each prefix leads to.
        self._leads = (points.lengths > 0)[:, None]

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the children of a level's prefixes; see `ddtree.tree.Scorer`."""
        prefixes, lengths = self._points
        if depth > 1:
            self._block, self._leads = self._block.gather(1, parents), _rows_of(self._leads, parents)
            if depth - 1 <= prefixes.shape[2]:
                self._leads &= prefixes[:, None, :, depth - 2] == tokens[:, :, None]
                here = self._leads & (lengths == depth - 1)[:, None]
                self._block = torch.where(here.any(2), here.int().argmax(2) + 1, self._block)
        candidates, scores = (part[:, :, depth - 1] for part in self._marginals)
        return _rows_of(candidates, self._block), _rows_of(scores, self._block)


def _column(bonus: list[int], like: Tensor) -> Tensor:
    """Return the bonus tokens as int64 [R, K, 1]."""
    own = torch.tensor(bonus, device=like.device)
    return own[:, None, None].expand(-1, like.shape[1], 1)


def _rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Return values [R, n, ...] at index [R, W]: [R, W, ...]."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _joined(first: _Marginals, second: _Marginals) -> _Marginals:
    """Return the blocks of both passes, as deep and wide as the larger of them."""
    depth, width = (max(first.tokens.shape[axis], second.tokens.shape[axis]) for axis in (2, 3))

    def padded(part: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(part, (0, width - part.shape[3], 0, depth - part.shape[2]), value=fill)

    return _Marginals(
        torch.cat((padded(first.tokens, 0), padded(second.tokens, 0)), dim=1),
        torch.cat((padded(first.scores, float("-inf")), padded(second.scores, float("-inf"))), dim=1),
    )


def _tree(rows: list[DraftRow], bonus: list[int], marginals: _Marginals, points: _Points | None) -> DraftTree:
    """Return the best nodes of both passes, of each row's budget and depth."""
    budgets, depths = [row.budget for row in rows], [row.depth for row in rows]
    if points is None:
        return best_first(bonus, marginals.tokens[:, 0], marginals.scores[:, 0], budgets, depths)
    keep = max(budgets)
    device, depth = marginals.tokens.device, min(marginals.tokens.shape[2], MAX_DEPTH)
    passes = _Passes(marginals, points)
    whole = grow(bonus, passes, min(keep, _WIDTH), depth, keep=keep, device=device)
    return prune(whole, budgets, depths=depths)


def _chains(rows: list[DraftRow], bonus: list[int], marginals: _Marginals, points: _Points) -> DraftTree:
    """Return the first chain and that of each branch point, which begins as the first one, in one tree."""
    tokens, scores = marginals.tokens[..., 0], marginals.scores[..., 0]
    depth = tokens.shape[2]
    lengths = torch.nn.functional.pad(points.lengths, (1, 0))[:, :, None]
    given = torch.arange(depth, device=tokens.device) < lengths
    tokens = torch.where(given, tokens[:, :1], tokens)
    scores = torch.where(given, scores[:, :1], scores)
    limits = torch.tensor([row.depth for row in rows], device=tokens.device)
    beyond = torch.arange(depth, device=tokens.device) >= limits[:, None]
    scores = scores.masked_fill(beyond[:, None], float("-inf"))
    # Blocks that belong to no branch point have no tokens.
    scores[:, 1:].masked_fill_((points.lengths == 0)[:, :, None], float("-inf"))
    whole = [depth] * len(rows)
    trees = [
        best_first(bonus, tokens[:, block, :, None], scores[:, block, :, None], whole, whole)
        for block in range(tokens.shape[1])
    ]
    return merge(trees, [row.budget for row in rows])


def _prefixes(tree: DraftTree, nodes: Tensor, length: int) -> Tensor:
    """Return the paths of nodes [R, K] without the root: int64 [R, K, length], with any tokens behind their ends."""
    path = torch.zeros(*nodes.shape, length + 1, dtype=torch.int64, device=nodes.device)
    for _ in range(length):
        depths, tokens = tree.depths.gather(1, nodes), tree.tokens.gather(1, nodes)
        path.scatter_(2, depths[:, :, None], tokens[:, :, None])
        nodes = tree.parents.gather(1, nodes)
    return path[:, :, 1:]
