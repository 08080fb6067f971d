"""Answers for training, made by the target itself: it writes the user's turn, then answers it.

A chat model's template, cut where the user's text begins, is a prompt that the model continues with a plausible
request. So no prompt set is needed, and the answers follow the target's own law, which is what a drafter must learn
(DFlash's recipe likewise regenerates the answers of a prompt set with the target, arXiv 2602.06036).

Conversations are made in waves: all rows of a wave start together and stay at the same position, so attention needs
neither mask nor padding; ended rows leave, and a wave ends with its last row. Wave i is a shard, drawn with a
generator keyed by (seed, i): the data are a function of target and settings, and a kill loses the unfinished wave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.rows import drop_row
from ddtree.target import Target
from ddtree.train.data import (
    Conversation,
    features_path,
    read_shard,
    save_features,
    shard_indices,
    shard_path,
    write_shard,
)
from ddtree.train.record import Recorder

_SENTINEL = "@@user-text@@"
_SHORTEST_TURN = 3
_SHORTEST_ANSWER = 4
_CANDIDATES = (
    512  # user turns are sampled among so many most likely tokens, which hold nearly all of a top-p of 0.95
)
_LOOP_PERIOD = 40
_LOOP_TOKENS = 24
_LOOP_EVERY = 16
_EMPTY_SHARDS = 3


@dataclass(frozen=True)
class SynthesisConfig:
    """Settings of a synthesis run.

    Attributes:
        tokens: answer tokens wanted.
        rows: conversations of a wave, and so of a shard.
        max_turn: most tokens of a user turn; one that does not end by then is dropped.
        max_answer: most tokens of an answer; a longer one is cut.
        greedy_share: share of greedy answers; the others are sampled at temperature 1.
        turn_top_p: nucleus of user turns, sampled at temperature 1.
        seed: of all draws.
    """

    tokens: int = 1_000_000
    rows: int = 192
    max_turn: int = 112
    max_answer: int = 288
    greedy_share: float = 0.5
    turn_top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "max_turn", "max_answer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share={self.greedy_share} is outside 0..1")
        if not 0 < self.turn_top_p <= 1:
            raise ConfigError(f"turn_top_p={self.turn_top_p} is outside (0, 1]")


@dataclass(frozen=True)
class Template:
    """A chat template around one user turn: token ids before it, and after it up to where the answer begins."""

    prefix: list[int]
    middle: list[int]

    @staticmethod
    def of(tokenizer: Any) -> Template:
        """Raises ConfigError where the tokenizer has no chat template, or one that changes the user's text."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so the target cannot write user turns itself"
            )
        messages = [{"role": "user", "content": _SENTINEL}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, _, after = text.partition(_SENTINEL)
        if not before or not after:
            raise ConfigError("the target's chat template does not keep the user's text whole")
        prefix, middle = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return Template(prefix, middle)


@dataclass
class _Row:
    """A conversation in flight: template tokens still to come, and the answer's start (0 within the user turn)."""

    greedy: bool
    tokens: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    answer_start: int = 0


class Synthesizer:
    """Makes waves of conversations until a folder holds enough answer tokens.

    With `layers`, the features that training wants are written beside each shard as they come, which saves a second
    pass of the target over the same tokens.

    Raises:
        ConfigError: the longest conversation would not fit the target's context.
    """

    def __init__(
        self,
        target: Target,
        template: Template,
        folder: Path,
        config: SynthesisConfig,
        layers: tuple[int, ...] = (),
    ) -> None:
        longest = len(template.prefix) + len(template.middle) + config.max_turn + config.max_answer
        if longest > target.max_context:
            raise ConfigError(
                f"conversations of up to {longest} tokens exceed the target's context of {target.max_context}; "
                "lower max_turn or max_answer"
            )
        self._target = target
        self._template = template
        self._folder = folder
        self._config = config
        self._layers = layers

    def run(self, report: Callable[[int], None] | None = None) -> int:
        """Go on until the shards hold the wanted answer tokens; returns how many they hold.

        `report` is called with that number at the start and after each shard.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        done = set(shard_indices(self._folder))
        held = sum(_answer_tokens(read_shard(shard_path(self._folder, index))[1]) for index in done)
        index = empty = 0
        while True:
            if report:
                report(held)
            if held >= self._config.tokens:
                return held
            while index in done:
                index += 1
            done.add(index)
            made = self._make_shard(index)
            held += made
            empty = 0 if made else empty + 1
            if empty == _EMPTY_SHARDS:
                raise ConfigError(
                    "the target ends no user turn of its own; raise max_turn, or use a chat model"
                )

    def _make_shard(self, index: int) -> int:
        conversations, features = self._wave(
            np.random.Generator(np.random.Philox(key=[self._config.seed, index]))
        )
        if self._layers and features:
            save_features(features_path(self._folder, index), torch.cat(features))
        # Written last: a shard that is there has its features beside it.
        write_shard(shard_path(self._folder, index), self._template.prefix, conversations)
        return _answer_tokens(conversations)

    def _wave(self, draws: np.random.Generator) -> tuple[list[Conversation], list[Tensor]]:
        """The conversations of one wave, in the order in which they ended, and the features of each."""
        target, prefix = self._target, self._template.prefix
        rows = [_Row(bool(draws.random() < self._config.greedy_share)) for _ in range(self._config.rows)]
        conversations: list[Conversation] = []
        features: list[Tensor] = []
        cache = target.new_cache()
        for _ in rows:
            cache.add_row()
        fed = torch.tensor(prefix, device=target.device).expand(len(rows), len(prefix))
        seen: list[Tensor] = []  # one [R, F + 1, H] per step after the prefix, rows compacted as they leave
        with Recorder(target, self._layers) as recorder:
            while True:
                depths = torch.arange(fed.shape[1], device=target.device).expand(fed.shape)
                logits = target.extend(cache, fed, depths, None, keep=1).logits
                cache.commit([list(range(fed.shape[1]))] * len(rows))
                assert logits is not None
                if self._layers and rows[0].tokens:
                    seen.append(recorder.take()[:, 0].to("cpu", torch.bfloat16))
                chosen = self._choose(logits[:, -1], rows, draws)
                ended = [self._append(row, token) for row, token in zip(rows, chosen, strict=True)]
                for index in reversed(range(len(rows))):
                    if ended[index] is None:
                        continue
                    row = rows[index]
                    if ended[index]:
                        conversations.append(Conversation(np.array(row.tokens), row.answer_start, row.greedy))
                        if self._layers:
                            features.append(_features(seen, index))
                    drop_row(rows, index)
                    cache.drop_row(index)
                    for step in seen:
                        step[index] = step[len(rows)]
                if not rows:
                    return conversations, features
                fed = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)

    def _append(self, row: _Row, token: int) -> bool | None:
        """Take the chosen token in; True when the conversation is complete, False when it is void, else None."""
        config, middle = self._config, self._template.middle
        if row.forced:
            row.tokens.append(row.forced.pop(0))
            return None
        if row.answer_start == 0:
            if token == middle[0] and len(row.tokens) >= _SHORTEST_TURN and not loops(row.tokens):
                row.answer_start = len(row.tokens) + len(middle)
                row.forced = middle[1:]
            elif (
                token == middle[0] or token in self._target.eos_ids or len(row.tokens) + 1 >= config.max_turn
            ):
                return False
            row.tokens.append(token)
            return None
        row.tokens.append(token)
        length = len(row.tokens) - row.answer_start
        looping = length % _LOOP_EVERY == 0 and loops(row.tokens[row.answer_start :])
        if token in self._target.eos_ids or length >= config.max_answer or looping:
            return length >= _SHORTEST_ANSWER
        return None

    def _choose(self, logits: Tensor, rows: list[_Row], draws: np.random.Generator) -> list[int]:
        """Each row's next token from logits [R, V]: nucleus in a user turn, greedy or at temperature 1 in an answer."""
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        free = [i for i, row in enumerate(rows) if row.answer_start and not row.forced]
        greedy = [i for i in free if rows[i].greedy]
        if greedy:
            chosen[greedy] = logits[greedy].float().max(dim=-1).indices
        turn = [i for i, row in enumerate(rows) if not row.answer_start]
        sampled = [i for i in free if not rows[i].greedy]
        for indices, top_p in ((turn, self._config.turn_top_p), (sampled, None)):
            if indices:
                uniform = torch.tensor(draws.random(len(indices)))
                chosen[indices] = draw(logits[indices], uniform, top_p)
        return chosen.tolist()


def _features(seen: list[Tensor], row: int) -> Tensor:
    """[n, F + 1, H] of a row's tokens; zero for the last one, which no block's context reaches and no pass has run."""
    steps = [step[row] for step in seen]
    return torch.stack([*steps, torch.zeros_like(steps[0])])


def _answer_tokens(conversations: list[Conversation]) -> int:
    return sum(len(c.tokens) - c.answer_start for c in conversations)


def draw(logits: Tensor, uniform: Tensor, top_p: float | None = None) -> Tensor:
    """One token per row of logits [R, V] at temperature 1, by inversion of `uniform` [R] in [0, 1); int64 [R].

    With `top_p`, from the smallest set of most likely tokens whose mass reaches it.
    """
    scores = logits.float()
    order = None
    if top_p is None:
        mass = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    else:
        total = scores.logsumexp(dim=-1, keepdim=True)
        scores, order = scores.topk(min(_CANDIDATES, scores.shape[-1]), dim=-1)
        mass = (scores - total).exp()
        mass = mass * (mass.cumsum(dim=-1) - mass < top_p)
    running = mass.cumsum(dim=-1)
    # Apple's GPU knows no float64: the type changes before the device.
    aim = uniform.to(running.dtype).to(running.device)[:, None] * running[:, -1:]
    # A rounded aim may reach the total itself, past the last token with any mass.
    index = torch.searchsorted(running, aim, right=True)
    last = (mass > 0).int().mul(torch.arange(mass.shape[-1], device=mass.device)).amax(dim=-1, keepdim=True)
    index = torch.minimum(index, last)
    return (index if order is None else order.gather(1, index))[:, 0]


def loops(tokens: list[int]) -> bool:
    """The text ends in at least three turns, and 24 tokens, of one period: the model is caught in a loop."""
    n = len(tokens)
    for period in range(1, _LOOP_PERIOD + 1):
        span = max(3 * period, _LOOP_TOKENS)
        if n < span + period:
            return False
        if tokens[n - span :] == tokens[n - span - period : n - period]:
            return True
    return False
