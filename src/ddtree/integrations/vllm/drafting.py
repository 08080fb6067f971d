"""The drafter's rows, and what they are told: which request is where, its features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.drafters import Drafter, parts_of
from ddtree.integrations.vllm.features import FeatureStore
from ddtree.integrations.vllm.request_state import Reader
from ddtree.model.kv_cache import drop_row


class Drafting:
    """A drafter over the requests that it drafts for.

    A request has a row from the end of its prompt until it is finished or preempted. Before, its features wait here.

    Args:
        drafter: holds no rows yet.
        feature_bytes: memory for features of texts that are through.

    Attributes:
        rows: the requests that have a row, in the drafter's order.
    """

    def __init__(self, drafter: Drafter, feature_bytes: int) -> None:
        self.drafter = drafter
        self.rows: list[Reader] = []
        self._store: FeatureStore | None = None
        if drafter.feature_layers and feature_bytes:
            self._store = FeatureStore(feature_bytes)
        self._waiting: dict[str, list[Tensor]] = {}
        # Tokens at the beginning of a row whose features were never seen.
        self._missing: dict[str, int] = {}

    def known(self, reader: Reader, base: int) -> None:
        """A request begins, or resumes, `base` tokens into its text, whose keys and values the engine already had."""
        if reader.seen >= base:
            return
        parts = self._store.find(reader.tokens[:base]) if self._store is not None else []
        whole = sum(map(len, parts)) == base
        self._waiting[reader.name] = [part.clone() for part in parts] if whole else []
        self._missing[reader.name] = 0 if whole else base
        reader.seen = base

    def observe(self, reader: Reader, base: int, tokens: int, features: Tensor | None) -> None:
        """The target processed `tokens` tokens of a request's text from `base` on, with features [tokens, F * H]."""
        skip = reader.seen - base
        if skip >= tokens:
            return
        if features is not None:
            features = features[skip:]
        row = self._row(reader)
        if row is None:
            if features is not None:
                self._waiting.setdefault(reader.name, []).append(features)
        else:
            self._tell(row, reader.tokens[reader.seen : base + tokens], features)
        reader.seen = base + tokens

    def join(self, reader: Reader) -> None:
        """Open a row for a request whose prompt is processed; nothing happens where it has one."""
        if self._row(reader) is not None:
            return
        row, tokens = len(self.rows), reader.tokens[: reader.seen]
        parts = self._waiting.pop(reader.name, [])
        self.drafter.add_row()
        self.rows.append(reader)
        missing = self._missing.pop(reader.name, 0)
        if self._store is not None:
            self._store.add_row(tokens, parts)
        if not self.drafter.feature_layers:
            self.drafter.observe(row, tokens, None)
            return
        # Drafters that read text alone are told all of it; what features are missing shifts a network's positions,
        # which it takes relative to each other.
        for part in parts_of(self.drafter):
            if missing and not part.feature_layers:
                part.observe(row, tokens[:missing], None)
        if parts:
            self.drafter.observe(row, tokens[missing:], torch.cat(parts))

    def leave(self, reader: Reader) -> None:
        """Forget a request that is finished or preempted; what its text leaves is kept within bounds."""
        self._waiting.pop(reader.name, None)
        self._missing.pop(reader.name, None)
        row = self._row(reader)
        if row is not None:
            if self._store is not None:
                self._store.drop_row(row, reader.tokens[: reader.seen])
            self.drafter.drop_row(row)
            drop_row(self.rows, row)
        reader.seen, reader.fresh = 0, True

    def _tell(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self.drafter.observe(row, list(tokens), features)
        if self._store is not None and features is not None:
            self._store.observe(row, features)

    def _row(self, reader: Reader) -> int | None:
        return next((place for place, own in enumerate(self.rows) if own is reader), None)
