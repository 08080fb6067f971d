"""A DFlash network over the rows' contexts: states of blocks after each, and what all drafters on it share."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ddtree.drafters.dflash.network import DFlashNet
from ddtree.model.attention import key_positions, uncommitted_columns, visible_keys
from ddtree.model.kv_cache import KVCache, KVFootprint, drop_row
from ddtree.model.packed_weights import pack, pack_own
from ddtree.model.target import Target
from ddtree.tree import MAX_DEPTH

# More new tokens than this are a prompt's, and are projected at once: their features are large. Fewer wait until a
# block is wanted, so that a backbone that is not asked for a while costs next to nothing.
_AT_ONCE = 128


class Backbone:
    """A DFlash network (arXiv 2602.06036) over each row's committed tokens, the base of drafters and their heads.

    The context cache holds committed tokens only: keys and values of the target's features, never of drafts. A
    round's features are kept until the next block, which projects those of all rows in one pass. A backbone has
    the `BackboneParts` that heads use.

    Args:
        network: the draft network; moved to the target's device and dtype.
        target: gives embedding and head.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary; None for the whole.
        head: own weights [Vd, H] in place of the target's head.
        embedding: own weights [V, H] in place of the target's input embedding.
        mask_embedding: own embedding [H] of the masked slots.

    Attributes:
        size: Vd, tokens of the draft vocabulary.
        depth: most tokens that a block predicts.
        packs: it runs on packed copies of its weights, as its target does.
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
    ) -> None:
        config = network.config
        self.device, self.dtype = target.device, target.dtype
        self.network = network.to(self.device, self.dtype).eval()
        self.feature_layers = tuple(config.target_layer_ids)
        self.depth = min(config.depth, MAX_DEPTH)
        self.draft_ids = None if draft_ids is None else draft_ids.to(self.device)
        self.size = target.vocab_size if self.draft_ids is None else len(self.draft_ids)
        self._index: Tensor | None = None
        if self.draft_ids is not None:
            self._index = torch.full((target.vocab_size,), -1, device=self.device)
            self._index[self.draft_ids] = torch.arange(self.size, device=self.device)
        self._embedding = cast(Tensor, target.embed.weight)
        if embedding is not None:
            self._embedding = embedding.to(self.device, self.dtype)
        self._mask_embedding = None if mask_embedding is None else mask_embedding.to(self.device, self.dtype)
        own_head = head is not None or self.draft_ids is not None
        scores = _linear(target, self.draft_ids, head) if own_head else target.head
        self._head: Callable[[Tensor], Tensor] = scores
        self.packs = target.packs
        if target.packs:
            pack_own(self.network)
            self._head = pack(scores) or scores
        self._cache = KVCache(target.max_context + config.block_size, config.num_hidden_layers)
        self._unread: list[list[Tensor]] = []

    def add_row(self) -> None:
        """Open an empty row at the end."""
        self._cache.add_row()
        self._unread.append([])

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its index."""
        self._cache.drop_row(row)
        drop_row(self._unread, row)

    def kv_footprint(self, blocks: int = 1) -> KVFootprint:
        """Return the most memory of the context, of `blocks` blocks a row, and of features that wait for the next."""
        config, most = self.network.config, self._cache.max_tokens - self.network.config.block_size
        states = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        features = len(config.target_layer_ids) * config.hidden_size
        size = self.dtype.itemsize
        # Columns are as wide as the longest row with the most that any row has unread, or with the blocks.
        spare = max(_AT_ONCE, blocks * config.block_size)
        return KVFootprint(self._cache, lambda: states * size, spare, most, row=_AT_ONCE * features * size)

    @torch.inference_mode()
    def observe(self, row: int, features: Tensor | None) -> None:
        """Take the features [n, F * H] of tokens newly committed to a row."""
        assert features is not None, "DFlash drafts from target features"
        self._unread[row].append(features.to(self.device, self.dtype))
        if sum(map(len, self._unread[row])) > _AT_ONCE:
            self._read(row, row + 1)

    def states(self, bonus: list[int], depth: int) -> Tensor:
        """Return states [R, depth, H], before the final norm, of the slots after each row's context and bonus token."""
        known = torch.tensor(bonus, device=self.device)[:, None, None]
        return self.branches(known, None, depth)[:, 0]

    @torch.inference_mode()
    def branches(self, known: Tensor, counts: Tensor | None, depth: int) -> Tensor:
        """Return states of several blocks a row in one pass. Their first tokens are given; no block sees another.

        Args:
            known: int64 [R, K, n], n up to the block size; each block begins with the row's bonus token.
            counts: int64 [R, K], how many of a block's tokens are given, 1..n; the other slots are masked ones. None
                gives all n.
            depth: how many slots are wanted.

        Returns:
            [R, K, depth, H], before the final norm, of the slots that predict depths 1..depth.
        """
        config, (rows, blocks, given), size = self.network.config, known.shape, self.network.config.block_size
        self._read(0, rows)
        tokens = torch.full((rows, blocks, size), config.mask_token_id, device=self.device)
        tokens[:, :, :given] = known
        if counts is not None:
            masked = torch.arange(size, device=self.device) >= counts[..., None]
            tokens.masked_fill_(masked, config.mask_token_id)
        slots = self.network.embed(self._embedding, tokens)
        if self._mask_embedding is not None and counts is None:
            slots[:, :, given:] = self._mask_embedding
        elif self._mask_embedding is not None:
            slots = torch.where(masked[..., None], self._mask_embedding, slots)
        positions = self._positions(0, rows, size)
        if blocks > 1:
            positions = positions.repeat(1, blocks)
        # The blocks' columns are never committed: the next ones overwrite them.
        width = self._cache.open(0, rows, blocks * size)
        columns, mask = self._visible(positions, blocks, width)
        states = self.network.block(slots.flatten(1, 2), positions, self._cache, columns, mask)
        first = config.first_slot
        return states.view(rows, blocks, size, -1)[:, :, first : first + depth].contiguous()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [..., H] of the target's token ids [...]."""
        return self.network.embed(self._embedding, tokens)

    def norm(self, states: Tensor) -> Tensor:
        """Return the states after the network's final norm."""
        return self.network.norm(states)

    def logits(self, normed: Tensor) -> Tensor:
        """Return float32 scores [..., Vd] of normed states [..., H]."""
        return self.network.logits(self._head(normed))

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft tokens of the target's token ids; -1 for those outside the draft vocabulary."""
        return tokens if self._index is None else self._index[tokens]

    def tokens(self, index: Tensor) -> Tensor:
        """Return the target's token ids of draft tokens."""
        return index if self.draft_ids is None else self.draft_ids[index]

    def _visible(self, positions: Tensor, blocks: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Return positions [R, L] of the key columns, and which of them each slot sees: bool [R, S, L].

        A slot sees its row's context and its own block. None when all slots see all columns.

        Args:
            positions: int64 [R, S], of the slots of all blocks.
            blocks: of a row.
            width: L.
        """
        rows, slots = positions.shape
        lengths = self._cache.lengths
        if blocks == 1 and min(lengths) == max(lengths):
            return torch.arange(width, device=self.device).expand(rows, width), None
        block = torch.arange(slots, device=self.device).div(slots // blocks, rounding_mode="floor")
        columns = uncommitted_columns(lengths, slots, self.device)
        seen = visible_keys(columns, block[:, None] == block, width)
        return key_positions(columns, positions, width), seen

    def _read(self, start: int, stop: int) -> None:
        """Project the features kept for rows start..stop-1 and append their keys and values to the context."""
        counts = [sum(map(len, parts)) for parts in self._unread[start:stop]]
        most = max(counts)
        if most == 0:
            return
        own = [torch.cat(parts) if parts else self._no_features() for parts in self._unread[start:stop]]
        features = own[0][None] if len(own) == 1 else pad_sequence(own, batch_first=True)
        positions = self._positions(start, stop, most)
        self._cache.open(start, stop, most)
        self.network.inject(self.network.context(features), positions, self._cache)
        self._cache.commit([list(range(count)) for count in counts])
        self._unread[start:stop] = [[] for _ in counts]

    def _positions(self, start: int, stop: int, count: int) -> Tensor:
        """Return int64 [stop - start, count], the positions from each row's committed length on."""
        return uncommitted_columns(self._cache.lengths[start:stop], count, self.device)

    def _no_features(self) -> Tensor:
        weight = self.network.fc.weight
        return weight.new_zeros((0, weight.shape[1]))


def _linear(target: Target, draft_ids: Tensor | None, own: Tensor | None) -> nn.Linear:
    """Return a head of its own weights, or of the target's rows of the draft vocabulary."""
    if own is not None:
        weight, bias = own.to(target.device, target.dtype), None
    else:
        weight, bias = cast(Tensor, target.head.weight)[draft_ids], getattr(target.head, "bias", None)
        bias = None if bias is None else bias[draft_ids]
    linear = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
