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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.storage import atomic_write
from ddtree.train.distributed import Group
from ddtree.train.training_log import progress_bar

_NOTE = "features.json"
_PASS_TOKENS = 65_536  # of one pass in training, padding included
_CPU_TEXT_TOKENS = 1024  # of one pass over whole texts: on a CPU what stays in its caches
_TEXT_TOKENS = 8192


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

    def answers(self) -> Iterator[list[int]]:
        """Iterate over the answers of the training split as token ids."""
        for index in self.train:
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

    def prepare(self, target: Target, layers: tuple[int, ...]) -> None:
        """Store the features that are missing, or that were made for other layers."""
        if self._noted() != _note(target, layers):
            for path in (*self.folder.glob("feats[0-9]*.npy"), self.folder / "prefix_feats.npy"):
                path.unlink(missing_ok=True)
            (self.folder / _NOTE).write_text(json.dumps(_note(target, layers)), encoding="utf-8")
        if not (self.folder / "prefix_feats.npy").exists():
            [features] = teacher_pass(target, [self.prefix], layers)
            save_features(self.folder / "prefix_feats.npy", features)
        indices = shard_indices(self.folder)
        missing = [index for index in indices if not features_path(self.folder, index).exists()]
        with progress_bar("features", len(indices), "shards", len(indices) - len(missing)) as bar:
            for index in missing:
                _, conversations = read_shard(shard_path(self.folder, index))
                texts = [self.prefix + c.tokens.tolist() for c in conversations]
                none = torch.empty((0, len(layers) + 1, target.hidden_size))
                parts = [part[len(self.prefix) :] for part in teacher_pass(target, texts, layers)]
                save_features(features_path(self.folder, index), torch.cat([none, *parts]))
                bar.update()

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
        return make_examples(self.prefix, [self.conversations[index] for index in indices], target, layers)

    def _noted(self) -> Any:
        path = self.folder / _NOTE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def make_example(prefix: list[int], conversation: Conversation, features: Tensor) -> Example:
    """Join a conversation and the features [n, F + 1, H] of prefix and conversation, as `teacher_pass` makes them."""
    tokens = torch.tensor(prefix + conversation.tokens.tolist())
    start = len(prefix) + conversation.answer_start
    return Example(tokens, start, conversation.greedy, features[:, :-1], features[:, -1])


def make_examples(
    prefix: list[int], conversations: list[Conversation], target: Target, layers: tuple[int, ...]
) -> list[Example]:
    """Return conversations with features that the target computes."""
    found = teacher_pass(target, [prefix + c.tokens.tolist() for c in conversations], layers)
    return [make_example(prefix, c, own) for c, own in zip(conversations, found, strict=True)]


def _note(target: Target, layers: tuple[int, ...]) -> dict[str, Any]:
    return {"layers": list(layers), "hidden_size": target.hidden_size}


class Teacher:
    """Runs the frozen target over padded batches of texts.

    Args:
        target: the target.
        layers: its feature layers, as in (1, 14, 27).
        group: the processes that compute features at the same time, each of its own texts.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], group: Group | None = None) -> None:
        self._target = target
        self._layers = layers
        self._group = group or Group()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return features [C, n, F + 1, H] of tokens int64 [C, n], on the target's device and in its dtype.

        The last of the F + 1 is what enters the target's head. Texts are padded at their end and attention is causal:
        padding changes nothing before it.
        """
        texts = tokens.split(max(1, _PASS_TOKENS // tokens.shape[1]))
        found = [self._pass(part) for part in texts]
        # Layers of a sharded target run in all processes or in none.
        passes = self._group.largest(len(texts)) if self._group.sharded else len(texts)
        for _ in range(len(texts), passes):
            self._pass(tokens[:1, :1])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pass(self, tokens: Tensor) -> Tensor:
        target, entering = self._target, []
        before = target.feature_layers
        target.use_features(self._layers)
        # The target computes logits of the last token only, so the head's own input would not be that of every token.
        decoder = target.model.get_decoder()
        hook = decoder.register_forward_hook(lambda _module, _inputs, output: entering.append(output[0]))
        try:
            depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            forward = target.extend(_PassCache(len(tokens)), tokens, depths, None, keep=1)
        finally:
            hook.remove()
            target.use_features(before)
        [hidden] = entering
        if forward.features is None:
            return hidden[:, :, None]
        layers = forward.features.unflatten(-1, (len(self._layers), -1))
        return torch.cat([layers, hidden[:, :, None]], dim=2)


class _PassCache(KVCache):
    """The cache of a single pass: nothing is read again, so it keeps nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__(0)
        self.lengths = [0] * rows

    def open(self, start: int, stop: int, columns: int, pending: int = 0) -> int:
        """Take the keys to be those of the pass alone."""
        return columns

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the pass's own keys and values."""
        return key, value


def teacher_pass(target: Target, texts: list[list[int]], layers: tuple[int, ...]) -> list[Tensor]:
    """Compute the target's features of whole texts: per text, bfloat16 [n, F + 1, H] on the CPU (see `Teacher`)."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    teacher = Teacher(target, layers)
    most = _CPU_TEXT_TOKENS if target.device.type == "cpu" else _TEXT_TOKENS
    while order:
        width = len(texts[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, most // width)))]
        padded = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, i in enumerate(batch):
            padded[row, : len(texts[i])] = torch.tensor(texts[i])
        features = teacher(padded.to(target.device)).to("cpu", torch.bfloat16)
        for row, i in enumerate(batch):
            # A copy, so that the pass's padding does not live as long as the text.
            found[i] = features[row, : len(texts[i])].clone()
    return found


def save_features(path: Path, features: Tensor) -> None:
    """Write features [n, F + 1, H] in one step, as int16 with the bits of bfloat16."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, features.to(torch.bfloat16).contiguous().view(torch.int16).numpy())


def load_features(bits: NDArray[np.int16]) -> Tensor:
    """Return what `save_features` wrote as bfloat16."""
    return torch.from_numpy(bits).view(torch.bfloat16)
