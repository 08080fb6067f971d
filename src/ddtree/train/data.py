"""Conversations on disk: shards of token ids, and the target's features of them.

A corpus is a folder of numbered shards `shard00000.npz`, each written whole or not at all. A shard holds a few
conversations one behind the other, without the template tokens that all of them begin with:

    tokens        uint16 or uint32 [n]; per conversation: user turn, rest of the template, answer
    lengths       int32 [c]; tokens of each conversation
    answer_start  int32 [c]; offset of the answer's first token within its conversation
    greedy        uint8 [c]; 1 when the answer was decoded greedily, 0 when sampled at temperature 1
    prefix        template tokens before the user turn

Beside it lies a cache that can be deleted and made again from the target: `feats00000.npy` with, for each token, the
outputs of the feature layers and, last, what enters the target's head; int16 [n, F + 1, H], the bits of bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.errors import CheckpointError, ConfigError
from ddtree.target import Target
from ddtree.train.record import Recorder

_PASS_TOKENS = 8192  # tokens of one teacher pass, padding included


@dataclass(frozen=True, eq=False)
class Conversation:
    """One conversation: `tokens` (after the prefix), where the answer starts in it, and how it was decoded."""

    tokens: NDArray[np.integer]
    answer_start: int
    greedy: bool

    @property
    def answer(self) -> list[int]:
        return [int(token) for token in self.tokens[self.answer_start :]]


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
    return folder / f"shard{index:05d}.npz"


def features_path(folder: Path, index: int) -> Path:
    return folder / f"feats{index:05d}.npy"


def shard_indices(folder: Path) -> list[int]:
    """Numbers of the finished shards in a folder, ascending."""
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
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, path)


def read_shard(path: Path) -> tuple[list[int], list[Conversation]]:
    """The prefix and conversations of a shard, or of any `.npz` with the same arrays.

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

    A conversation whose user turn came up before (in an earlier shard) is left out. The split depends on a
    conversation's user turn alone, so it stays the same while shards are added (but one is always held out).

    Raises:
        CheckpointError: the folder has no finished shard.
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
            self.prefix, conversations = read_shard(shard_path(folder, index))
            offset = 0
            for conversation in conversations:
                turn = conversation.tokens[: conversation.answer_start].astype(np.uint32).tobytes()
                if turn not in fractions:
                    fractions[turn] = _fraction(turn)
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
        return sum(len(c.tokens) - c.answer_start for c in self.conversations)

    def answers(self, indices: list[int] | None = None) -> Iterator[list[int]]:
        """Answers as token ids; of the training split by default."""
        for index in self.train if indices is None else indices:
            yield self.conversations[index].answer

    def prepare(self, target: Target, layers: tuple[int, ...]) -> None:
        """Make the features that are not there yet, or that were made for other layers."""
        wanted = {"layers": list(layers), "hidden_size": target.hidden_size}
        note = self.folder / "features.json"
        if not note.exists() or json.loads(note.read_text(encoding="utf-8")) != wanted:
            for path in (*self.folder.glob("feats[0-9]*.npy"), self.folder / "prefix_feats.npy"):
                path.unlink(missing_ok=True)
            note.write_text(json.dumps(wanted), encoding="utf-8")
        if not (self.folder / "prefix_feats.npy").exists():
            [features] = teacher_pass(target, [self.prefix], layers)
            save_features(self.folder / "prefix_feats.npy", features)
        for index in shard_indices(self.folder):
            if features_path(self.folder, index).exists():
                continue
            _, conversations = read_shard(shard_path(self.folder, index))
            texts = [self.prefix + [int(t) for t in c.tokens] for c in conversations]
            parts = [part[len(self.prefix) :] for part in teacher_pass(target, texts, layers)]
            save_features(features_path(self.folder, index), torch.cat(parts))

    def example(self, index: int) -> Example:
        """A conversation with its features, the template's prefix in front; `prepare` comes first."""
        shard, offset = self._where[index]
        if shard not in self._maps:
            self._maps[shard] = np.load(features_path(self.folder, shard), mmap_mode="r")
        if self._prefix_features is None:
            self._prefix_features = load_features(np.load(self.folder / "prefix_feats.npy"))
        conversation = self.conversations[index]
        part = np.array(self._maps[shard][offset : offset + len(conversation.tokens)])
        return make_example(
            self.prefix, conversation, torch.cat([self._prefix_features, load_features(part)])
        )


def make_example(prefix: list[int], conversation: Conversation, features: Tensor) -> Example:
    """`features` [n, F + 1, H] of prefix and conversation, the last along F + 1 being what enters the head."""
    tokens = torch.tensor(prefix + [int(t) for t in conversation.tokens])
    start = len(prefix) + conversation.answer_start
    return Example(tokens, start, conversation.greedy, features[:, :-1], features[:, -1])


def teacher_pass(target: Target, texts: list[list[int]], layers: tuple[int, ...]) -> list[Tensor]:
    """The target's features of whole texts: per text, bfloat16 [n, F + 1, H] on the CPU (see `Example`)."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with Recorder(target, layers) as recorder:
        while order:
            width = len(texts[order[-1]])
            batch = [order.pop() for _ in range(min(len(order), max(1, _PASS_TOKENS // width)))]
            padded = torch.zeros((len(batch), width), dtype=torch.int64, device=target.device)
            for row, i in enumerate(batch):
                padded[row, : len(texts[i])] = torch.tensor(texts[i])
            cache = target.new_cache()
            for _ in batch:
                cache.add_row()
            depths = torch.arange(width, device=target.device).expand(len(batch), width)
            # Texts are padded at their end and attention is causal: padding changes nothing before it.
            target.extend(cache, padded, depths, None, keep=1)
            features = recorder.take()
            for row, i in enumerate(batch):
                found[i] = features[row, : len(texts[i])].to("cpu", torch.bfloat16)
    return found


def save_features(path: Path, features: Tensor) -> None:
    """Write features [n, F + 1, H] in one step."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.save(file, features.to(torch.bfloat16).contiguous().view(torch.int16).numpy())
    os.replace(partial, path)


def load_features(bits: NDArray[np.int16]) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def draft_vocabulary(corpus: Corpus, size: int, always: frozenset[int]) -> Tensor:
    """The `size` most frequent answer tokens (those of `always` among them): int64, ascending; ties to the lower id.

    Raises:
        ConfigError: fewer than two tokens are asked for.
    """
    if size < 2:
        raise ConfigError(
            f"draft_vocabulary={size} is too small; use at least 2, or 0 for the target's own vocabulary"
        )
    counts: Counter[int] = Counter()
    for answer in corpus.answers():
        counts.update(answer)
    ranked = sorted(counts.keys() | always, key=lambda token: (token not in always, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def _fraction(key: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
