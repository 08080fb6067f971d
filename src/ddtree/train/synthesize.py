"""Answers for training, made by the target itself: it writes the user's turn, then answers it.

A chat model's template, cut where the user's text begins, is a prompt that the model continues with a plausible
request. So no prompt set is needed, and the answers follow the target's own law, which is what a drafter must learn
(DFlash's recipe likewise regenerates the answers of a prompt set with the target, arXiv 2602.06036). User turns may
also be given.

Conversations are made in waves of rows in lockstep (see `waves`). Wave i is a shard, drawn with a generator keyed by
(seed, i), without the user turns of the shards before it: on one kind of device, the data are a function of target
and settings, and a kill loses the unfinished wave.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.target import Target
from ddtree.train.data import Conversation, read_shard, shard_indices, shard_path, write_shard
from ddtree.train.filters import Sieve, text_keys, unprintable_tokens
from ddtree.train.lockstep import Lockstep
from ddtree.train.turns import Template, encode_turns, read_turns
from ddtree.train.waves import Rows, Rules, Wave
from ddtree.train.whole import written_whole

_EMPTY_SHARDS = 3
_ROWS_ON_ACCELERATORS = 4096
_NOTE = "synthesis.json"
_ORDER = 2**63
"""The stream of draws for the order of waves; waves have those from 0."""


@dataclass(frozen=True)
class SynthesisConfig:
    """Settings of a synthesis run.

    Attributes:
        tokens: answer tokens wanted.
        rows: conversations of a wave, and so of a shard.
        max_turn: most tokens of a user turn that the target writes; one that does not end by then is dropped.
        max_prompt: most tokens of a given user turn; longer ones are left out.
        max_answer: most tokens of an answer; a longer one is cut.
        greedy_share: share of greedy answers; the others are sampled at temperature 1.
        turn_top_p: nucleus of user turns, sampled at temperature 1.
        seed: of all draws.
    """

    tokens: int = 1_000_000
    rows: int = 192
    max_turn: int = 112
    max_prompt: int = 512
    max_answer: int = 288
    greedy_share: float = 0.5
    turn_top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "max_turn", "max_prompt", "max_answer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share={self.greedy_share} is outside 0..1")
        if not 0 < self.turn_top_p <= 1:
            raise ConfigError(f"turn_top_p={self.turn_top_p} is outside (0, 1]")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} is outside 0..2**63 - 1")


@dataclass
class Synthesis:
    """What a folder holds, and what the last run left out.

    Attributes:
        tokens: answer tokens in the folder's shards.
        conversations: conversations in them.
        left_out: conversations of this run that were not kept, by reason.
    """

    tokens: int
    conversations: int
    left_out: Counter[str]

    def __str__(self) -> str:
        text = f"{self.tokens:,} answer tokens in {self.conversations:,} conversations"
        if not +self.left_out:
            return text
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in (+self.left_out).most_common())
        return f"{text}; left out in this run: {reasons}"


class Synthesizer:
    """Makes waves of conversations until a folder holds enough answer tokens.

    Args:
        target: writes the answers, and the user turns if none are given.
        template: what stands around a user turn.
        folder: where the shards go.
        config: see `SynthesisConfig`.
        turns: user turns to answer; a run ends when all have been answered, whatever number of tokens was wanted.

    Raises:
        ConfigError: the longest conversation would not fit the target's context.
    """

    def __init__(
        self,
        target: Target,
        template: Template,
        folder: Path,
        config: SynthesisConfig,
        turns: list[str] | None = None,
    ) -> None:
        self._target = target
        self._template = template
        self._folder = folder
        self._config = config
        self._rules = Rules(
            tuple(template.middle),
            tuple(sorted(target.eos_ids)),
            config.max_turn,
            config.max_answer,
            config.turn_top_p,
        )
        left_out: Counter[str] = Counter()
        self._turns: list[list[list[int]]] | None = None
        self._digest = ""
        longest = config.max_turn
        if turns is not None:
            encoded, left_out = encode_turns(target.tokenizer, template, turns, config.max_prompt)
            self._turns = _in_waves(encoded, config)
            self._digest = hashlib.sha256(json.dumps(encoded).encode()).hexdigest()
            longest = max(map(len, encoded), default=0)
        longest += len(template.prefix) + len(template.middle) + config.max_answer
        if longest > target.max_context:
            raise ConfigError(
                f"conversations of up to {longest} tokens exceed the target's context of {target.max_context}; "
                "lower max_turn, max_prompt or max_answer"
            )
        tokenizer = target.tokenizer
        marked = None if tokenizer is None else unprintable_tokens(tokenizer, target.vocab_size)
        self._sieve = Sieve(len(template.middle), self._rules.eos, marked, own_turns=turns is None)
        self._sieve.left_out += left_out

    def run(self, report: Callable[[int], None] | None = None) -> Synthesis:
        """Go on until the shards hold the wanted answer tokens, or all given turns are answered.

        `report` is called with the answer tokens held at the start and after each shard.

        Raises:
            ConfigError: the folder was filled with other settings; or the target ends no turn of its own.
            CacheMemoryError: the rows do not fit the device's memory.
        """
        self._claim()
        keys: dict[int, NDArray[np.uint64]] = {}
        result = Synthesis(0, 0, self._sieve.left_out)
        for index in shard_indices(self._folder):
            conversations = read_shard(shard_path(self._folder, index))[1]
            keys[index] = _keys(conversations)
            result.tokens += _answer_tokens(conversations)
            result.conversations += len(conversations)
        index = empty = 0
        while True:
            if report:
                report(result.tokens)
            while index in keys:
                index += 1
            if result.tokens >= self._config.tokens:
                return result
            if self._turns is not None and index >= len(self._turns):
                return result
            known = np.concatenate([np.zeros(0, np.uint64), *(keys[i] for i in keys if i < index)])
            rows = self._wave(index)
            conversations = [
                Conversation(
                    rows.tokens[row, : rows.ends[row]], int(rows.answer_start[row]), bool(rows.greedy[row])
                )
                for row in self._sieve.keep(rows, known)
            ]
            write_shard(shard_path(self._folder, index), self._template.prefix, conversations)
            keys[index] = _keys(conversations)
            result.tokens += _answer_tokens(conversations)
            result.conversations += len(conversations)
            empty = 0 if conversations else empty + 1
            if empty == _EMPTY_SHARDS and self._turns is None:
                reason, _ = self._sieve.left_out.most_common(1)[0]
                raise ConfigError(
                    f"the target ends no user turn of its own that can be used ({reason}); raise max_turn, or use a "
                    "chat model"
                )

    def _claim(self) -> None:
        """Note what makes the folder's shards what they are, or see that it is as noted."""
        settings = {**asdict(self._config), "prompts": self._digest}
        del settings["tokens"]
        note = self._folder / _NOTE
        if note.exists():
            before = json.loads(note.read_text(encoding="utf-8"))
            for name, value in settings.items():
                if before.get(name) != value:
                    raise ConfigError(
                        f"{self._folder} holds answers made with {name}={before.get(name)!r}, not {value!r}: "
                        "give another folder, or the same settings"
                    )
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with written_whole(note) as partial:
            partial.write_text(json.dumps(settings), encoding="utf-8")

    def _wave(self, index: int) -> Rows:
        """Decode wave `index`."""
        config, prefix = self._config, self._template.prefix
        draws = _draws(config.seed, index)
        turns = self._turns[index] if self._turns is not None else None
        greedy = draws.random(config.rows if turns is None else len(turns)) < config.greedy_share
        rows = (
            Rows.unwritten(greedy, self._rules) if turns is None else Rows.given(turns, greedy, self._rules)
        )
        decoder = Lockstep(self._target, len(greedy), len(prefix) + rows.tokens.shape[1])
        return Wave(decoder, self._rules, rows, draws).run(prefix)


def _keys(conversations: list[Conversation]) -> NDArray[np.uint64]:
    """Keys of the conversations' user turns."""
    starts = np.array([c.answer_start for c in conversations], np.int64)
    turns = np.zeros((len(conversations), int(starts.max(initial=0))), np.int32)
    for row, conversation in enumerate(conversations):
        turns[row, : starts[row]] = conversation.tokens[: starts[row]]
    return text_keys(turns, starts)


def _answer_tokens(conversations: list[Conversation]) -> int:
    return sum(len(c.tokens) - c.answer_start for c in conversations)


def _in_waves(turns: list[list[int]], config: SynthesisConfig) -> list[list[list[int]]]:
    """Turns of like length together, since a wave's short ones wait for its long ones; the waves in random order."""
    ordered = sorted(turns, key=len)
    groups = [ordered[at : at + config.rows] for at in range(0, len(ordered), config.rows)]
    return [groups[i] for i in _draws(config.seed, _ORDER).permutation(len(groups))]


def _draws(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ddtree train synthesize`."""
    group = parser.add_argument_group("synthesize")
    default = SynthesisConfig()
    for option, value, text in (
        ("--tokens", default.tokens, "answer tokens wanted"),
        ("--max-turn", default.max_turn, "tokens of a user turn that the target writes"),
        ("--max-prompt", default.max_prompt, "tokens of a given user turn; longer ones are left out"),
        ("--max-answer", default.max_answer, "tokens of an answer"),
        ("--greedy-share", default.greedy_share, "share of greedy answers; the others are sampled"),
    ):
        group.add_argument(option, type=type(value), default=value, help=f"{text} (default: %(default)s)")
    group.add_argument(
        "--rows",
        type=int,
        help=f"conversations at once (default: {default.rows} on a CPU, {_ROWS_ON_ACCELERATORS} elsewhere)",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        help='JSON lines with user turns to answer, {"prompt"}, {"turns"} or {"messages"}: the first turn of each '
        "(default: the target writes its own)",
    )


def synthesis_config(args: argparse.Namespace, device: torch.device) -> SynthesisConfig:
    """The settings that the options stand for on a device."""
    values = {f.name: getattr(args, f.name) for f in fields(SynthesisConfig) if hasattr(args, f.name)}
    if args.rows is None:
        values["rows"] = SynthesisConfig.rows if device.type == "cpu" else _ROWS_ON_ACCELERATORS
    return SynthesisConfig(**values)


def synthesizer_of(args: argparse.Namespace, target: Target, folder: Path) -> Synthesizer:
    """What the options ask for. Raises ConfigError for a prompt file or template that cannot be used."""
    turns = read_turns(args.prompts) if args.prompts else None
    config = synthesis_config(args, target.device)
    return Synthesizer(target, Template.of(target.tokenizer), folder, config, turns)
