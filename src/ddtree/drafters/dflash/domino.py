"""The Domino drafter: a chain, or a tree whose every branch is scored by its own path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ddtree.drafters import DraftRow, keep_chains
from ddtree.drafters.dflash import HeadDrafter
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.heads import BackboneParts, DominoHead
from ddtree.errors import ConfigError, check_whole
from ddtree.sampling.noise import PLAIN
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, DraftTree, grow, prune

_TINY = 1e-30


class Domino(HeadDrafter):
    """Drafts with a DFlash network and Domino's head (arXiv 2605.29707), as a chain or as DARTree's tree (2608.13524).

    The backbone runs once. The head then corrects its marginals for every branch, level by level: each level's
    best `width` prefixes, whatever their parents, take one batched step, and the best nodes of all levels by
    log-probability + beta * depth fill the budget. A chain is the tree of width 1.

    Only the backbone's `candidates` likeliest tokens of a depth are corrected one by one. The others count together
    as one more candidate, of their summed probability and with their mean row of the head's outer weights, so that
    log-probabilities are normalised over the whole vocabulary, to first order, and are comparable between branches
    and with other drafters' trees. (DARTree normalises over the candidates alone, which makes every branch look
    likelier than it is, and deep ones most.)

    Args:
        backbone: the network over the rows' contexts.
        head: made for it; moved to its device and dtype.
        beta: at most 0, added once a level when the tree is pruned: a deep node is worth less than its score.
        width: prefixes expanded a level, 1..1024.
        candidates: tokens of a depth that are corrected one by one, 1..1024.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise. Candidates are
            then ranked under the noise over the whole vocabulary.

    Raises:
        ConfigError: an argument is out of range, or the head was made for another backbone.
    """

    head: DominoHead

    def __init__(
        self,
        backbone: Backbone,
        head: DominoHead,
        *,
        beta: float = 0.0,
        width: int = 12,
        candidates: int = 64,
        coupling: tuple[float, float] = PLAIN,
    ) -> None:
        check_whole("width", width, 1, MAX_BUDGET)
        check_whole("candidates", candidates, 1, MAX_BUDGET)
        if not float("-inf") < beta <= 0:
            raise ConfigError(
                f"beta={beta!r} is not a finite number of at most 0: it is a penalty for each level"
            )
        hidden = backbone.network.config.hidden_size
        if (head.hidden_size, head.size) != (hidden, backbone.size):
            raise ConfigError(
                f"the head is made for hidden size {head.hidden_size} and {head.size} draft tokens, the backbone has "
                f"{hidden} and {backbone.size}: give the head that was trained on this backbone"
            )
        super().__init__(backbone, head, coupling=coupling)
        self.beta = beta
        self.width = width
        self.candidates = candidates

    def _draft(self, rows: list[DraftRow], bonus: list[int], width: int, clock: Clock) -> DraftTree:
        depth = min(max(row.depth for row in rows), self.max_depth)
        states = self.backbone.states(bonus, depth)
        self.tell(rows, states)
        paths, beam = self._paths(rows, states, width), min(self.width, width)
        tree = grow(bonus, paths, beam, depth, keep=width, device=self.backbone.device)
        with clock("build"):
            budgets, depths = [row.budget for row in rows], [row.depth for row in rows]
            return prune(tree, budgets, self.beta, depths)

    def _paths(self, rows: list[DraftRow], states: Tensor, most: int) -> _Paths:
        """Return a scorer of the paths over states [R, L, H]; trees take at most `most` children of a prefix."""
        backbone, head = self.backbone, self.head
        normed = backbone.norm(states)
        logprobs = backbone.logits(normed).log_softmax(dim=-1)
        scale = self._couple(rows, logprobs)
        best = logprobs.topk(min(self.candidates, backbone.size), dim=-1)
        outer = head.outer
        rest = logprobs.exp().scatter_(2, best.indices, 0.0)
        mass = rest.sum(dim=2, keepdim=True)
        mean = rest.div_(mass.clamp(min=_TINY)).to(outer.dtype) @ outer
        weights = torch.cat([functional.embedding(best.indices, outer), mean[:, :, None]], dim=2)
        if scale is not None:
            weights *= scale[:, None, None, None]
        return _Paths(
            head,
            backbone,
            head.inner(normed),
            backbone.tokens(best.indices),
            torch.cat([best.values, mass.log()], dim=2),
            weights,
            min(most, best.indices.shape[2]),
            rows,
        )

    def _couple(self, rows: list[DraftRow], logprobs: Tensor) -> Tensor | None:
        """Replace sampling rows' log-probabilities [R, L, Vd] by their chances under the noise.

        A corrected token's score under the noise is (log q + correction + beta * g) / kappa, so that the correction
        of a coupled row counts 1 / kappa. Returns that factor [R]; None when it is 1 for all.
        """
        if not any(map(self.couples, rows)):
            return None
        for row, own in zip(rows, logprobs, strict=True):
            self.couple(row, own)
        return torch.tensor(
            [1 / self.coupling[1] if self.couples(row) else 1.0 for row in rows],
            dtype=self.head.outer.dtype,
            device=logprobs.device,
        )


@dataclass
class _Paths:
    """A `Scorer` of paths, which carries the head's state of each branch.

    Attributes:
        head, backbone: the networks.
        inner: [R, L, rank], of the slots.
        tokens: int64 [R, L, C], the target's ids of the candidates.
        base: float32 [R, L, C + 1], their log-probabilities before correction, and that of all other tokens.
        outer: [R, L, C + 1, rank], rows of the head's outer weights.
        most: children of a prefix that are of use, at most C.
        rows: of which those that want a chain take one child only.
        state: [R, W, gru_hidden], of the last level's prefixes.
    """

    head: DominoHead
    backbone: BackboneParts
    inner: Tensor
    tokens: Tensor
    base: Tensor
    outer: Tensor
    most: int
    rows: list[DraftRow]
    state: Tensor | None = None

    def expand(self, depth: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the children of a level's prefixes; see `ddtree.tree.Scorer`."""
        head, level = self.head, depth - 1
        if self.state is None:
            self.state = head.start(self.backbone, tokens)
        else:
            before = self.state.gather(1, parents[:, :, None].expand(-1, -1, head.gru_hidden))
            self.state = head.step(self.backbone, before, tokens)
        scores = self.base[:, None, level].expand(-1, tokens.shape[1], -1)
        if depth > head.pure_prefix:
            hidden = head.hidden(self.inner[:, None, level], self.state)
            scores = (scores + hidden @ self.outer[:, level].transpose(1, 2)).log_softmax(dim=-1)
        best = scores[:, :, :-1].topk(self.most, dim=-1)
        keep_chains(best.values, self.rows)
        candidates = self.tokens[:, None, level].expand(-1, tokens.shape[1], -1)
        return candidates.gather(2, best.indices), best.values
