"""Conversations on disk: shards of token ids, and the target's features of them.

A corpus is a folder of numbered shards `shard00000.npz`, each written whole or not at all. A shard holds a few
conversations one behind the other, without the template tokens that all of them begin with:

    tokens        uint16 or uint32 [n]; per conversation: user message, rest of the template, answer
    lengths       int32 [c]; tokens of each conversation
    answer_start  int32 [c]; offset of the answer's first token within its conversation
    greedy        uint8 [c]; 1 when the answer was decoded greedily, 0 when sampled at temperature 1
    prefix        template tokens before the user message

Beside it lies a cache that can be deleted and made again from the target: `feats00000.npy` with, for each token, the
outputs of the feature layers and, last, what enters the target's head; int16 [n, F + 1, H], the bits of bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from ddtree.storage import atomic_write
from ddtree.train.features import load_features, save_features, teacher_pass

_NOTE = "features.json"


@dataclass(frozen=True, eq=False)
class Conversation:
    """A user message and its answer.

    Attributes:
        tokens: user message, rest of the template, answer; without the prefix that all conversations share.
        answer_start: index of the answer's first token.
        greedy: True if the answer was decoded greedily, False if it was sampled at temperature 1.
    """

    tokens: NDArray[np.integer]
    answer_start: int
    greedy: bool

    @property
    def answer(self) -> list[int]:
        """The answer's token ids."""
        return self.tokens[self.answer_start :].tolist()

    @property
    def key(self) -> bytes:
        """Eight bytes that tell the user message from others, the same in every process and on every machine."""
        message = self.tokens[: self.answer_start].astype(np.uint32).tobytes()
        return hashlib.blake2b(message, digest_size=8).digest()


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation with the target's features.

    Attributes:
        tokens: int64 [n], the template's prefix included; a token's index is its position.
        answer_start: index of the answer's first token.
        features: bfloat16 [n, F, H], outputs of the feature layers.
        hidden: bfloat16 [n, H], what enters the target's head at each token.
    """

    tokens: Tensor
    answer_start: int
    greedy: bool
    features: Tensor
    hidden: Tensor


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of a shard."""
    return folder / f"shard{index:05d}.npz"


def features_path(folder: Path, index: int) -> Path:
    """Return the path of the features of a shard."""
    return folder / f"feats{index:05d}.npy"


def shard_indices(folder: Path) -> list[int]:
    """Return the numbers of the finished shards in a folder, ascending."""
    return sorted(int(path.stem.removeprefix("shard")) for path in folder.glob("shard[0-9]*.npz"))


def write_shard(path: Path, prefix: list[int], conversations: list[Conversation]) -> None:
    """Write a shard in one step: a reader never sees half of it, and a kill leaves it absent."""
    highest = max([*prefix, *(int(c.tokens.max()) for c in conversations)], default=0)
    dtype = np.uint16 if highest < 2**16 else np.uint32
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([c.tokens for c in conversations] or [np.array([], dtype)]).astype(dtype),
        "lengths": np.array([len(c.tokens) for c in conversations], np.int32),
        "answer_start": np.array([c.answer_start for c in conversations], np.int32),
        "greedy": np.array([c.greedy for c in conversations], np.uint8),
        "prefix": np.array(prefix, dtype),
    }
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)


def read_shard(path: Path) -> tuple[list[int], list[Conversation]]:
    """Read the prefix and conversations of a shard, or of any `.npz` with the same arrays.

    Raises:
        CheckpointError: the file is missing or is no shard.
    """
    try:
        with np.load(path) as arrays:
            tokens, lengths, starts, greedy, prefix = (
                arrays[name] for name in ("tokens", "lengths", "answer_start", "greedy", "prefix")
            )
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a shard of answers: {error}; delete it and synthesize again"
        ) from error
    ends = lengths.cumsum()
    conversations = [
        Conversation(tokens[end - n : end], int(start), bool(flag))
        for end, n, start, flag in zip(ends, lengths, starts, greedy, strict=True)
    ]
    return [int(token) for token in prefix], conversations


class Corpus:
    """The shards of a folder, their features, and a split into training and held-out conversations.

    A conversation whose user message came up before (in an earlier shard) is left out. The split depends on the user
    message alone, so it stays the same while shards are added; one conversation is always held out.

    Args:
        folder: holds the shards.
        held_out: share of the conversations that are not trained on, as in 0.02; 0 for none.

    Attributes:
        folder: as given.
        prefix: template tokens that all conversations begin with.
        conversations: all of them.
        train: indices of those to train on.
        held_out: indices of the others.

    Raises:
        CheckpointError: the folder has no finished shard, or shards of several templates.
    """

    def __init__(self, folder: Path, held_out: float = 0.02) -> None:
        self.folder = folder
        self.prefix: list[int] = []
        self.conversations: list[Conversation] = []
        self.train: list[int] = []
        self.held_out: list[int] = []
        self._where: list[tuple[int, int]] = []
        self._maps: dict[int, NDArray[np.int16]] = {}
        self._prefix_features: Tensor | None = None
        fractions: dict[bytes, float] = {}
        for index in shard_indices(folder):
            prefix, conversations = read_shard(shard_path(folder, index))
            if self.prefix not in ([], prefix):
                raise CheckpointError(
                    f"{shard_path(folder, index)} begins with another chat template than the shards before it, which "
                    "may hold another day's date: delete it and synthesize again"
                )
            self.prefix, offset = prefix, 0
            for conversation in conversations:
                if (key := conversation.key) not in fractions:
                    fractions[key] = int.from_bytes(key, "big") / 2**64
                    self.conversations.append(conversation)
                    self._where.append((index, offset))
                offset += len(conversation.tokens)
        if not self.conversations:
            raise CheckpointError(f"{folder} holds no answers; run `ddtree train synthesize` first")
        bound = max(held_out, min(fractions.values())) if held_out else -1.0
        for place, fraction in enumerate(fractions.values()):
            (self.held_out if fraction <= bound else self.train).append(place)

    @property
    def answer_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(c.tokens) - c.answer_start for c in self.conversations)

    def answers(self, indices: list[int] | None = None) -> Iterator[list[int]]:
        """Iterate over answers as token ids, those of the training split by default."""
        for index in self.train if indices is None else indices:
            yield self.conversations[index].answer

    def span(self, index: int) -> tuple[int, int]:
        """Return the answer's first position and the length of a conversation, the template's prefix included."""
        conversation, before = self.conversations[index], len(self.prefix)
        return before + conversation.answer_start, before + len(conversation.tokens)

    def text(self, index: int) -> NDArray[np.int64]:
        """Return a conversation's tokens, the template's prefix included."""
        return np.concatenate([self.prefix, self.conversations[index].tokens]).astype(np.int64)

    def counts(self, vocab_size: int, answers: bool = False) -> NDArray[np.int64]:
        """Count each token, int64 [vocab_size]: in all conversations, or in the answers of the training split."""
        parts = [c.tokens for c in self.conversations]
        if answers:
            parts = [c.tokens[c.answer_start :] for c in (self.conversations[i] for i in self.train)]
        return np.bincount(np.concatenate(parts), minlength=vocab_size)

    def prepared(self, target: Target, layers: tuple[int, ...]) -> bool:
        """Return whether the features of all shards lie beside them, made for these layers."""
        paths = [features_path(self.folder, index) for index in shard_indices(self.folder)]
        paths.append(self.folder / "prefix_feats.npy")
        return self._noted() == _note(target, layers) and all(path.exists() for path in paths)

    def prepare(
        self, target: Target, layers: tuple[int, ...], report: Callable[[int], None] | None = None
    ) -> None:
        """Store the features that are missing, or that were made for other layers.

        `report` is called with the number of shards that have theirs.
        """
        if self._noted() != _note(target, layers):
            for path in (*self.folder.glob("feats[0-9]*.npy"), self.folder / "prefix_feats.npy"):
                path.unlink(missing_ok=True)
            (self.folder / _NOTE).write_text(json.dumps(_note(target, layers)), encoding="utf-8")
        if not (self.folder / "prefix_feats.npy").exists():
            [features] = teacher_pass(target, [self.prefix], layers)
            save_features(self.folder / "prefix_feats.npy", features)
        for done, index in enumerate(shard_indices(self.folder)):
            if report:
                report(done)
            if features_path(self.folder, index).exists():
                continue
            _, conversations = read_shard(shard_path(self.folder, index))
            texts = [self.prefix + [int(t) for t in c.tokens] for c in conversations]
            none = torch.empty((0, len(layers) + 1, target.hidden_size))
            parts = [part[len(self.prefix) :] for part in teacher_pass(target, texts, layers)]
            save_features(features_path(self.folder, index), torch.cat([none, *parts]))
        if report:
            report(len(shard_indices(self.folder)))

    def features(self, index: int, length: int | None = None) -> Tensor:
        """Read the features [length, F + 1, H] of a conversation's first tokens, prefix included, after `prepare`."""
        shard, offset = self._where[index]
        if shard not in self._maps:
            self._maps[shard] = np.load(features_path(self.folder, shard), mmap_mode="r")
        if self._prefix_features is None:
            self._prefix_features = load_features(np.load(self.folder / "prefix_feats.npy"))
        own = len(self.conversations[index].tokens)
        if length is not None:
            own = max(0, length - len(self.prefix))
        part = np.array(self._maps[shard][offset : offset + own])
        return torch.cat([self._prefix_features, load_features(part)])[:length]

    def example(self, index: int) -> Example:
        """Read a conversation with its features, the template's prefix in front, after `prepare`."""
        return make_example(self.prefix, self.conversations[index], self.features(index))

    def examples(self, indices: list[int], target: Target, layers: tuple[int, ...]) -> list[Example]:
        """Return conversations with their features, read from disk if all are stored, else computed."""
        if self.prepared(target, layers):
            return [self.example(index) for index in indices]
        found = teacher_pass(target, [self.text(index).tolist() for index in indices], layers)
        pairs = zip(indices, found, strict=True)
        return [make_example(self.prefix, self.conversations[index], own) for index, own in pairs]

    def _noted(self) -> Any:
        path = self.folder / _NOTE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def make_example(prefix: list[int], conversation: Conversation, features: Tensor) -> Example:
    """Join a conversation and the features [n, F + 1, H] of prefix and conversation, as `teacher_pass` makes them."""
    tokens = torch.tensor(prefix + [int(t) for t in conversation.tokens])
    start = len(prefix) + conversation.answer_start
    return Example(tokens, start, conversation.greedy, features[:, :-1], features[:, -1])


def draft_vocabulary(corpus: Corpus, size: int, always: frozenset[int]) -> Tensor:
    """Choose the `size` most frequent answer tokens, as in 8192, those of `always` included.

    Returns:
        int64 [size] or fewer, ascending; of equally frequent tokens the lower id is taken.

    Raises:
        ConfigError: fewer than two tokens are asked for.
    """
    if size < 2:
        raise ConfigError(
            f"draft_vocabulary={size} is too small; use at least 2, or 0 for the target's own vocabulary"
        )
    counts = corpus.counts(max(always, default=0) + 1, answers=True)
    seen = set(np.flatnonzero(counts).tolist()) | always
    ranked = sorted(seen, key=lambda token: (token not in always, -int(counts[token]), token))
    return torch.tensor(sorted(ranked[:size]))


def _note(target: Target, layers: tuple[int, ...]) -> dict[str, Any]:
    return {"layers": list(layers), "hidden_size": target.hidden_size}
