"""The DFlash drafter: one pass gives the marginals of every depth; a chain or a best-first tree is made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ddtree.cache import KVCache
from ddtree.drafters import DraftRow, checkpoint
from ddtree.drafters.dflash_net import DFlashConfig, DFlashNet
from ddtree.noise import couple
from ddtree.rows import drop_row
from ddtree.stats import Clock
from ddtree.target import Target
from ddtree.tree import MAX_DEPTH, DraftTree, best_first

__all__ = ["DFlash", "DFlashConfig", "DFlashNet"]

# More new tokens than a round commits are a prompt's, and are projected at once: their features are large.
_AT_ONCE = MAX_DEPTH + 1
PLAIN = (0.0, 1.0)


class DFlash:
    """Drafts with a DFlash network (arXiv 2602.06036), as a chain or as DDTree's tree (arXiv 2604.12989).

    The context cache holds committed tokens only: keys and values of the target's features, never of drafts. A
    round's features are kept until the next draft, which projects those of all rows in one pass.

    Args:
        network: the draft network; moved to the target's device and dtype.
        target: gives embedding and head.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary; None for the whole.
        head: own weights [Vd, H] in place of the target's head.
        embedding: own weights [V, H] in place of the target's input embedding.
        mask_embedding: own embedding [H] of the masked slots.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.

    Raises:
        ConfigError: beta or kappa is out of range.
    """

    def __init__(
        self,
        network: DFlashNet,
        target: Target,
        *,
        draft_ids: Tensor | None = None,
        head: Tensor | None = None,
        embedding: Tensor | None = None,
        mask_embedding: Tensor | None = None,
        coupling: tuple[float, float] = PLAIN,
        name: str = "dflash",
    ) -> None:
        couple(torch.zeros(1), torch.zeros(1), *coupling)  # refuses values out of range
        config = network.config
        device, dtype = target.device, target.dtype
        self.name = name
        self.network = network.to(device, dtype).eval()
        self.feature_layers = tuple(config.target_layer_ids)
        self.max_depth = min(config.depth, MAX_DEPTH)
        self.coupling = coupling
        self.draft_ids = None if draft_ids is None else draft_ids.to(device)
        self.trace: Callable[[DraftRow, Tensor], None] | None = None
        """Called with each row and its marginals' log-probabilities [L, Vd] before coupling; they are overwritten
        afterwards, so keep a copy."""
        self._device, self._dtype = device, dtype
        self._embedding = cast(Tensor, target.embed.weight)
        if embedding is not None:
            self._embedding = embedding.to(device, dtype)
        self._mask_embedding = None if mask_embedding is None else mask_embedding.to(device, dtype)
        self._head: Callable[[Tensor], Tensor] = target.head
        if head is not None or self.draft_ids is not None:
            self._head = _linear(target, self.draft_ids, head)
        self._cache = KVCache(target.max_context + config.block_size)
        self._unread: list[list[Tensor]] = []

    def add_row(self) -> None:
        self._cache.add_row()
        self._unread.append([])

    def drop_row(self, row: int) -> None:
        self._cache.drop_row(row)
        drop_row(self._unread, row)

    @torch.inference_mode()
    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        assert features is not None, "DFlash drafts from target features"
        self._unread[row].append(features.to(self._device, self._dtype))
        if sum(map(len, self._unread[row])) > _AT_ONCE:
            self._read(row, row + 1)

    @torch.inference_mode()
    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        bonus, depths = [row.tokens[-1] for row in rows], [row.depth for row in rows]
        widest = max(_width(row) for row in rows)
        if widest == 0:
            return DraftTree.root(bonus, self._device)
        logprobs = self._marginals(bonus, max(depths))
        if self.trace is not None:
            for row, own in zip(rows, logprobs, strict=True):
                self.trace(row, own)
        self._couple(rows, logprobs)
        best = logprobs.topk(min(widest, logprobs.shape[-1]), dim=-1)
        with clock("build"):
            scores, tokens = best.values, best.indices
            if self.draft_ids is not None:
                tokens = self.draft_ids[tokens]
            for index, row in enumerate(rows):
                if row.chain:
                    scores[index, :, 1:] = float("-inf")
            return best_first(bonus, tokens, scores, [row.budget for row in rows], depths)

    def _read(self, start: int, stop: int) -> None:
        """Project the features kept for rows start..stop-1 and append their keys and values to the context."""
        counts = [sum(map(len, parts)) for parts in self._unread[start:stop]]
        most = max(counts)
        if most == 0:
            return
        features = torch.nn.utils.rnn.pad_sequence(
            [torch.cat(parts) if parts else self._no_features() for parts in self._unread[start:stop]],
            batch_first=True,
        )
        positions = self._positions(start, stop, most)
        self._cache.open(start, stop, most)
        self.network.inject(self.network.context(features), positions, self._cache)
        self._cache.advance()
        self._cache.commit([list(range(count)) for count in counts])
        self._unread[start:stop] = [[] for _ in counts]

    def _marginals(self, bonus: list[int], depth: int) -> Tensor:
        """Log-probabilities float32 [R, L, Vd] of depths 1..L after each row's context and bonus token."""
        config, rows = self.network.config, len(bonus)
        self._read(0, rows)
        block = torch.full((rows, config.block_size), config.mask_token_id, device=self._device)
        block[:, 0] = torch.tensor(bonus, device=self._device)
        slots = self.network.embed(self._embedding, block)
        if self._mask_embedding is not None:
            slots[:, 1:] = self._mask_embedding
        positions = self._positions(0, rows, config.block_size)
        # The block's columns are never committed: the next one overwrites them.
        width = self._cache.open(0, rows, config.block_size)
        columns = torch.arange(width, device=self._device).expand(rows, width)
        mask = None
        if min(self._cache.lengths) < max(self._cache.lengths):
            mask = (columns <= positions[:, -1:])[:, None].expand(-1, config.block_size, -1)
        hidden = self.network.block(slots, positions, self._cache, columns, mask)
        first = config.first_slot
        logits = self._head(hidden[:, first : first + depth].contiguous())
        return self.network.logits(logits).log_softmax(dim=-1)

    def _couple(self, rows: list[DraftRow], logprobs: Tensor) -> None:
        """Replace the log-probabilities of sampling rows by their chances under the row's noise.

        The target picks argmax(log p / T + g), which is argmax(log p + T * g): in that form the drafter's error, and
        so the fitted kappa, do not depend on the temperature.
        """
        beta, kappa = self.coupling
        if self.coupling == PLAIN:
            return
        for index, row in enumerate(rows):
            if row.noise is None or row.depth == 0:
                continue
            # Whole rows are drawn, because verification reads the same ones.
            drawn = [row.noise.gumbel(len(row.tokens) + depth) for depth in range(row.depth)]
            noise = torch.stack(drawn if self.draft_ids is None else [full[self.draft_ids] for full in drawn])
            own = logprobs[index, : row.depth]
            own.copy_(couple(own, noise, beta * row.temperature, kappa))

    def _positions(self, start: int, stop: int, count: int) -> Tensor:
        """int64 [stop - start, count], from each row's committed length on."""
        lengths = torch.tensor(self._cache.lengths[start:stop], device=self._device)
        return lengths[:, None] + torch.arange(count, device=self._device)

    def _no_features(self) -> Tensor:
        weight = self.network.fc.weight
        return weight.new_zeros((0, weight.shape[1]))


def _width(row: DraftRow) -> int:
    """Candidates that a row's tree can use at a depth."""
    if row.depth == 0 or row.budget == 0:
        return 0
    return 1 if row.chain else row.budget


def _linear(target: Target, draft_ids: Tensor | None, own: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A head of its own weights, or of the target's rows of the draft vocabulary."""
    if own is not None:
        weight, bias = own.to(target.device, target.dtype), None
    else:
        weight, bias = cast(Tensor, target.head.weight)[draft_ids], getattr(target.head, "bias", None)
        bias = None if bias is None else bias[draft_ids]
    return lambda hidden: torch.nn.functional.linear(hidden, weight, bias)


def load(name: str | os.PathLike[str], target: Target) -> DFlash:
    """The DFlash drafter of a folder or hub id, checked against its target.

    Raises:
        CheckpointError: it cannot be read or does not fit; the message says why.
    """
    found = checkpoint.read(name)
    checkpoint.check(found, target)
    return DFlash(
        found.network(),
        target,
        draft_ids=found.draft_ids,
        head=_own(found.head, target.head) if found.draft_ids is None else found.head,
        embedding=_own(found.embedding, target.embed),
        mask_embedding=found.mask_embedding,
        coupling=found.layout.coupling,
    )


def _own(weight: Tensor | None, module: torch.nn.Module) -> Tensor | None:
    """A checkpoint's copy of the target's weights is not kept beside them."""
    theirs = cast(Tensor, module.weight)
    if weight is not None and torch.equal(weight.to(theirs.device, theirs.dtype), theirs):
        return None
    return weight
