"""Answers for training, made by the target itself: it writes a user's message, then answers it.

A chat model's template, cut where the user's text begins, is a prompt that the model continues with a plausible
request. So no prompt set is needed, and the answers follow the target's own law, which is what a drafter must learn
(DFlash's recipe likewise regenerates the answers of a prompt set with the target, arXiv 2602.06036). User messages may
also be given.

The engine decodes them, without drafts and many rows at once. Shard i is drawn with a generator keyed by (seed, i):
the data are a function of target and settings, and a kill loses the unfinished shard.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ddtree.engine.engine import Engine, Sequence
from ddtree.errors import CacheMemoryError, ConfigError
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from ddtree.storage import atomic_write
from ddtree.train.arguments import SynthesisConfig
from ddtree.train.conversations import (
    SHORTEST_MESSAGE,
    ChatTemplate,
    ConversationFilter,
    encode_user_messages,
    is_looping,
    unprintable_tokens,
)
from ddtree.train.data import Conversation, read_shard, shard_indices, shard_path, write_shard
from ddtree.train.training_log import progress_bar

_LOOP_EVERY = 16  # tokens between checks for a loop
_EMPTY_SHARDS = 3
_NOTE = "synthesis.json"
_PREFIX_BYTES = 2**28  # for what prompts share: the template, and messages that the target has written
_SHARD_ORDER = 2**63  # stream of draws for the order of shards; shard i has stream i


@dataclass
class SynthesisSummary:
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
        if not self.left_out:
            return text
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.left_out.most_common())
        return f"{text}; left out in this run: {reasons}"

    def add(self, conversations: list[Conversation]) -> None:
        """Count the conversations of a shard."""
        self.tokens += sum(len(c.tokens) - c.answer_start for c in conversations)
        self.conversations += len(conversations)


class Synthesizer:
    """Makes shards of conversations until a folder holds enough answer tokens.

    Args:
        target: writes the answers, and the user messages if none are given.
        template: the chat template around a user message.
        folder: where the shards go.
        config: settings.
        messages: user messages to answer; a run ends when all have been answered, however few tokens that gave.

    Raises:
        ConfigError: the longest conversation would not fit the target's context.
    """

    def __init__(
        self,
        target: Target,
        template: ChatTemplate,
        folder: Path,
        config: SynthesisConfig,
        messages: list[str] | None = None,
    ) -> None:
        self._target = target
        self._template = template
        self._folder = folder
        self._config = config
        self._given: list[list[list[int]]] | None = None
        self._digest = ""
        left_out: Counter[str] = Counter()
        longest = config.max_turn
        if messages is not None:
            encoded, left_out = encode_user_messages(target.tokenizer, template, messages, config.max_prompt)
            self._given = _in_shards(encoded, config)
            self._digest = hashlib.sha256(json.dumps(encoded).encode()).hexdigest()
            longest = max(map(len, encoded), default=0)
        longest += len(template.prefix) + len(template.middle) + config.max_answer
        if longest > target.max_context:
            raise ConfigError(
                f"conversations of up to {longest} tokens exceed the target's context of {target.max_context}; "
                "lower max_turn, max_prompt or max_answer"
            )
        tokenizer = target.tokenizer
        unprintable = None if tokenizer is None else unprintable_tokens(tokenizer, target.vocab_size)
        self._filter = ConversationFilter(
            len(template.middle), target.eos_ids, unprintable, own_messages=messages is None
        )
        self._filter.left_out += left_out

    def run(self) -> SynthesisSummary:
        """Make shards until they hold the wanted answer tokens, or all given messages are answered.

        Raises:
            ConfigError: the folder was filled with other settings; or the target ends no message of its own.
            CacheMemoryError: the rows do not fit the device's memory.
        """
        self._note_settings()
        keys: dict[int, set[bytes]] = {}
        summary = SynthesisSummary(0, 0, self._filter.left_out)
        for index in shard_indices(self._folder):
            prefix, conversations = read_shard(shard_path(self._folder, index))
            self._check_template(prefix, conversations)
            keys[index] = {conversation.key for conversation in conversations}
            summary.add(conversations)
        empty = 0
        indices = count() if self._given is None else range(len(self._given))
        with progress_bar("synthesize", self._config.tokens, "answer tokens", summary.tokens) as bar:
            for index in indices:
                if summary.tokens >= self._config.tokens:
                    break
                if index in keys:
                    continue
                # Shards after this one do not count: they are not there in a run that nothing has stopped.
                known = set().union(*(own for other, own in keys.items() if other < index))
                conversations = self._filter.keep(self._shard(index), known)
                write_shard(shard_path(self._folder, index), self._template.prefix, conversations)
                keys[index] = {conversation.key for conversation in conversations}
                summary.add(conversations)
                bar.update(summary.tokens - bar.n)
                empty = 0 if conversations else empty + 1
                if empty == _EMPTY_SHARDS and self._given is None:
                    reason, _ = self._filter.left_out.most_common(1)[0]
                    raise ConfigError(
                        f"the target ends no user turn of its own that can be used ({reason}); raise max_turn, or use "
                        "a chat model"
                    )
        return summary

    def _check_template(self, prefix: list[int], conversations: list[Conversation]) -> None:
        """Raise ConfigError for a shard made with another chat template, or with the date of another day in it."""
        middle = self._template.middle
        found = [c.tokens[c.answer_start - len(middle) : c.answer_start].tolist() for c in conversations[:1]]
        if prefix != self._template.prefix or found not in ([], [middle]):
            raise ConfigError(
                f"{self._folder} holds answers made with another chat template, or on a day whose date the template "
                "writes: give another folder, or begin anew with --fresh"
            )

    def _note_settings(self) -> None:
        """Write down the settings that the folder's shards depend on, or check that they are those written down."""
        settings = {**asdict(self._config), "prompts": self._digest}
        del settings["tokens"]
        note = self._folder / _NOTE
        if not note.exists():
            with atomic_write(note) as partial:
                partial.write_text(json.dumps(settings), encoding="utf-8")
            return
        before = json.loads(note.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{self._folder} holds answers made with {name}={before.get(name)!r}, not {value!r}: "
                    "give another folder, or the same settings"
                )

    def _shard(self, index: int) -> list[Conversation | str]:
        """Decode the conversations of shard `index`; the reason in place of one that has no usable user message."""
        config, template = self._config, self._template
        draws = _draws(config.seed, index)
        count = config.rows if self._given is None else len(self._given[index])
        greedy = draws.random(count) < config.greedy_share
        seeds = draws.integers(2**63, size=(2, count)).tolist()
        engine = Engine(self._target, max_rows=count, prefix_bytes=_PREFIX_BYTES)
        try:
            written: list[list[int] | str]
            written = self._write_messages(engine, seeds[0]) if self._given is None else [*self._given[index]]
            usable = [row for row, message in enumerate(written) if not isinstance(message, str)]
            prompts = [[*template.prefix, *written[row], *template.middle] for row in usable]
            params = [
                SamplingParams(
                    temperature=0.0 if greedy[row] else 1.0, seed=seeds[1][row], max_tokens=config.max_answer
                )
                for row in usable
            ]
            answers = _generate(engine, prompts, params)
        finally:
            engine.close()
        found: list[Conversation | str] = [message if isinstance(message, str) else "" for message in written]
        for row, answer in zip(usable, answers, strict=True):
            start = answer.prompt_length - len(template.prefix)
            tokens = np.array(answer.tokens[len(template.prefix) :])
            found[row] = Conversation(tokens, start, bool(greedy[row]))
        return found

    def _write_messages(self, engine: Engine, seeds: list[int]) -> list[list[int] | str]:
        """Have the target write a user message for each seed; the reason in place of one that cannot be used."""
        config, closing = self._config, self._template.middle[0]
        params = [
            SamplingParams(
                top_p=config.turn_top_p, seed=seed, max_tokens=config.max_turn, stop_token_ids=(closing,)
            )
            for seed in seeds
        ]
        written: list[list[int] | str] = []
        for sequence in _generate(engine, [self._template.prefix] * len(seeds), params):
            message = sequence.output[:-1]
            if sequence.finish_reason == "cancelled":
                written.append("turn in a loop")
            elif sequence.output[-1] != closing:
                written.append("turn without an end")
            elif len(message) < SHORTEST_MESSAGE:
                written.append("turn too short")
            else:
                written.append(message)
        return written


def _generate(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sequence]:
    """Decode all prompts together without drafts; those that fall into a loop are cut there ("cancelled")."""
    sequences = [engine.add(prompt, own, method="off") for prompt, own in zip(prompts, params, strict=True)]
    try:
        while not engine.idle:
            for sequence in engine.step():
                check = sequence.output_length % _LOOP_EVERY == 0 and sequence.finish_reason is None
                if check and is_looping(sequence.output):
                    engine.cancel(sequence)
        for sequence in sequences:
            if sequence.error:
                raise sequence.error
    except CacheMemoryError as error:
        raise CacheMemoryError(
            f"{len(prompts)} conversations at once do not fit: lower --rows ({error})"
        ) from error
    return sequences


def _in_shards(messages: list[list[int]], config: SynthesisConfig) -> list[list[list[int]]]:
    """Put messages of like length together, so that rows end at like times; the shards come in random order."""
    ordered = sorted(messages, key=len)
    groups = [ordered[at : at + config.rows] for at in range(0, len(ordered), config.rows)]
    return [groups[i] for i in _draws(config.seed, _SHARD_ORDER).permutation(len(groups))]


def _draws(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
