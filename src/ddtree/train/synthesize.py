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
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from ddtree.errors import CacheMemoryError, ConfigError
from ddtree.model import attention
from ddtree.model.kv_cache import available_bytes
from ddtree.model.target import Target
from ddtree.train.data import Conversation, read_shard, shard_indices, shard_path, write_shard, written_whole

_SENTINEL = "@@user-text@@"


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
        before, _, after = _templated(tokenizer, _SENTINEL).partition(_SENTINEL)
        if not before or not after:
            raise ConfigError("the target's chat template does not keep the user's text whole")
        prefix, middle = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return Template(prefix, middle)


def read_turns(path: Path) -> list[str]:
    """The first user turn of each line of a file of JSON lines; blank lines are passed over.

    A line is `{"turns": [text, ...]}`, `{"prompt": text}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Raises:
        ConfigError: the file cannot be read or holds no turn, or a line is none of these; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read ({why}): give a file of JSON lines") from error
    turns = [_first_turn(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not turns:
        raise ConfigError(f"--prompts {path} holds no prompt: give a file of JSON lines")
    return turns


def encode_turns(
    tokenizer: Any, template: Template, texts: list[str], longest: int
) -> tuple[list[list[int]], Counter[str]]:
    """Token ids of each different turn, as they stand in the template; and how many were left out, by reason.

    Args:
        longest: most tokens of a turn; longer ones are left out.
    """
    left_out: Counter[str] = Counter()
    different = list(dict.fromkeys(texts))
    left_out["duplicate turn"] = len(texts) - len(different)
    whole = [_templated(tokenizer, text) for text in different]
    before, after = template.prefix, template.middle
    turns = []
    for ids in tokenizer(whole, add_special_tokens=False)["input_ids"]:
        turn = ids[len(before) : len(ids) - len(after)]
        # A tokenizer may join the ends of a turn with the template's text around it.
        if not turn or ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            left_out["turn merges with the template"] += 1
        elif len(turn) > longest:
            left_out["turn too long"] += 1
        else:
            turns.append([int(token) for token in turn])
    return turns, +left_out


def _templated(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return rendered


def _first_turn(line: str, where: str) -> str:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})") from error
    text = None
    if isinstance(raw, dict):
        turns, messages = raw.get("turns"), raw.get("messages")
        if isinstance(turns, list) and turns:
            text = turns[0]
        elif isinstance(messages, list):
            users = (m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user")
            text = next(users, None)
        else:
            text = raw.get("prompt")
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f'{where} has no user turn: write {{"turns": [text]}}, {{"prompt": text}} or {{"messages": [...]}}'
        )
    return text


PERIOD = 40
TOKENS = 24
REACH = 4 * PERIOD
"""How many of a text's last tokens `looping` looks at."""


def looping(tails: Tensor, lengths: Tensor) -> Tensor:
    """Whether each text ends in four turns of one period up to 40, or 24 tokens and one period more: bool [R].

    Args:
        tails: [R, w], the last w tokens of each text; at least `REACH`, unless no text has more than w.
        lengths: [R], tokens of each text. What stands before a shorter text's first token is not looked at.
    """
    width = tails.shape[1]
    found = torch.zeros(len(tails), dtype=torch.bool, device=tails.device)
    for period in range(1, PERIOD + 1):
        span = max(3 * period, TOKENS)
        if span + period > width:
            break
        same = tails[:, width - span :] == tails[:, width - span - period : width - period]
        found |= same.all(dim=1) & (lengths >= span + period)
    return found


def tails_of(tokens: Tensor, ends: Tensor) -> Tensor:
    """The `REACH` tokens of each row [R, T] before its end [R]; those of a shorter row begin with others."""
    columns = ends[:, None] + torch.arange(-REACH, 0, device=tokens.device)
    return tokens.gather(1, columns.clamp(0, tokens.shape[1] - 1))


_BLOCK = 256
_CANDIDATES = (
    512  # user turns are sampled among so many most likely tokens, which hold nearly all of a top-p of 0.95
)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of logits [R, V], the first of equals; int64 [R]."""
    return logits.float().max(dim=-1).indices


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V] at temperature 1, by inversion of `uniform` [R] in [0, 1); int64 [R].

    A block of tokens is found by the blocks' masses, then the token within it: a running sum over the whole
    vocabulary takes several times as long as everything else here.
    """
    size = logits.shape[-1]
    scores = logits.float()
    mass = scores.sub(scores.amax(dim=-1, keepdim=True)).exp_()
    if size % _BLOCK:
        mass = pad(mass, (0, -size % _BLOCK))
    blocks = mass.view(len(mass), -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    running = sums.cumsum(dim=-1)
    aim = uniform.to(running.dtype)[:, None] * running[:, -1:]
    block = _invert(sums, running, aim)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    rest = (aim - (running.gather(1, block) - sums.gather(1, block))).clamp_(min=0)
    return (block * _BLOCK + _invert(inner, inner.cumsum(dim=-1), rest))[:, 0]


def draw_nucleus(logits: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """As `draw`, from the smallest set of most likely tokens whose mass reaches `top_p`."""
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    best, order = scores.topk(min(_CANDIDATES, scores.shape[-1]), dim=-1)
    mass = (best - total).exp()
    mass = mass * (mass.cumsum(dim=-1) - mass < top_p)
    running = mass.cumsum(dim=-1)
    aim = uniform.to(running.dtype)[:, None] * running[:, -1:]
    return order.gather(1, _invert(mass, running, aim))[:, 0]


def _invert(mass: Tensor, running: Tensor, aim: Tensor) -> Tensor:
    """Where the running sums [R, n] pass `aim` [R, 1]: int64 [R, 1], always a place with some mass."""
    index = torch.searchsorted(running, aim, right=True)
    # A rounded aim may reach the total itself, past the last place with any mass.
    places = torch.arange(mass.shape[-1], device=mass.device)
    last = (mass > 0).mul(places).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last)


SHORTEST_TURN = 3
LOOP_EVERY = 16
RUNNING, ANSWERED, SHORT_TURN, OPEN_TURN, LOOPING_TURN = range(5)
"""A row's fate: still running; answered; void, because its turn was too short, did not end, or looped."""
_CHOICE_ROWS = 1024  # logits in float32 are made for so many rows at a time
_STEPS_BETWEEN_LOOKS = 16
_DRAWN_STEPS = 16


@dataclass(frozen=True)
class Rules:
    """What ends a turn and an answer.

    Attributes:
        middle: template tokens after a user turn, up to where the answer begins; the first one ends the turn.
        eos: tokens that end an answer, and void a turn.
        max_turn: most tokens of a turn that the target writes; one that does not end by then is void.
        max_answer: most tokens of an answer; a longer one is cut.
        turn_top_p: nucleus of turns that the target writes.
    """

    middle: tuple[int, ...]
    eos: tuple[int, ...]
    max_turn: int
    max_answer: int
    turn_top_p: float


@dataclass
class Rows:
    """The rows of a wave, on the host, one numbering from start to end.

    Attributes:
        tokens: int32 [R, T]; given tokens where the row begins with some. T holds the longest row.
        answer_start: int64 [R]; the answer's first column, 0 where the target writes the turn and has not ended it.
        greedy: bool [R]; how the answer is decoded.
        ends: int64 [R]; columns in use once answered, else 0.
        fates: uint8 [R].
    """

    tokens: NDArray[np.int32]
    answer_start: NDArray[np.int64]
    greedy: NDArray[np.bool_]
    ends: NDArray[np.int64]
    fates: NDArray[np.uint8]

    @staticmethod
    def unwritten(greedy: NDArray[np.bool_], rules: Rules) -> Rows:
        """Rows whose turns the target will write."""
        rows = len(greedy)
        width = rules.max_turn + len(rules.middle) + rules.max_answer
        return Rows._make(np.zeros((rows, width), np.int32), np.zeros(rows, np.int64), greedy)

    @staticmethod
    def given(turns: list[list[int]], greedy: NDArray[np.bool_], rules: Rules) -> Rows:
        """Rows whose turns are given, as token ids without the template."""
        starts = np.array([len(turn) + len(rules.middle) for turn in turns], np.int64)
        tokens = np.zeros((len(turns), int(starts.max()) + rules.max_answer), np.int32)
        for row, turn in enumerate(turns):
            tokens[row, : starts[row]] = [*turn, *rules.middle]
        return Rows._make(tokens, starts, greedy)

    @staticmethod
    def _make(tokens: NDArray[np.int32], starts: NDArray[np.int64], greedy: NDArray[np.bool_]) -> Rows:
        return Rows(tokens, starts, greedy, np.zeros_like(starts), np.zeros(len(starts), np.uint8))


class Decoder(Protocol):
    """What a wave needs of a model; see `lockstep.Lockstep`."""

    device: torch.device

    def begin(self, tokens: list[int]) -> Tensor: ...
    def step(self, tokens: Tensor) -> Tensor: ...
    def move_rows(self, sources: Tensor, places: Tensor, rows: int) -> None: ...


class Wave:
    """Runs the rows of a wave from the common beginning to the end of the last one.

    Args:
        decoder: the model, with as many rows.
        rules: see `Rules`.
        rows: how they begin.
        draws: source of one uniform per row and step.
        steps_between_looks: by default 1 on the CPU, where a look costs nothing, and 16 elsewhere.
    """

    def __init__(
        self,
        decoder: Decoder,
        rules: Rules,
        rows: Rows,
        draws: np.random.Generator,
        steps_between_looks: int | None = None,
    ) -> None:
        device = decoder.device
        self._decoder = decoder
        self._rules = rules
        self._draws = draws
        self._stride = steps_between_looks or (1 if device.type == "cpu" else _STEPS_BETWEEN_LOOKS)
        self._rows = rows
        self._tokens = torch.from_numpy(rows.tokens).to(device, torch.int64)
        self._start = torch.from_numpy(rows.answer_start).to(device, copy=True)
        self._ends = torch.zeros_like(self._start)
        self._fate = torch.zeros(len(rows.greedy), dtype=torch.uint8, device=device)
        self._middle = torch.tensor(rules.middle, device=device)
        self._eos = torch.tensor(rules.eos, dtype=torch.int64, device=device)
        self._alive = np.arange(len(rows.greedy))
        self._packed = torch.from_numpy(self._alive).to(device)  # row of each row of the cache
        self._longest_turn = 0 if rows.answer_start.all() else rules.max_turn
        self._uniforms = torch.empty(0)
        self._writing: list[Tensor] = []
        self._greedy: list[Tensor] = []
        self._sampled: list[Tensor] = []

    @torch.inference_mode()
    def run(self, beginning: list[int]) -> Rows:
        """Decode to the end; `beginning` are the tokens that all rows have before their first column."""
        width = self._tokens.shape[1]
        logits = self._decoder.begin(beginning)
        self._look(0)
        for t in range(width):
            if t % _DRAWN_STEPS == 0:
                drawn = self._draws.random((_DRAWN_STEPS, len(self._fate)), np.float32)
                self._uniforms = torch.from_numpy(drawn).to(self._decoder.device)
            self._take(self._choose(logits, t), t)
            if t + 1 == width or ((t + 1) % self._stride == 0 and not self._look(t + 1)):
                break
            logits = self._decoder.step(self._tokens[self._packed, t])
        return Rows(
            self._tokens.to("cpu", torch.int32).numpy(),
            self._start.cpu().numpy(),
            self._rows.greedy,
            self._ends.cpu().numpy(),
            self._fate.cpu().numpy(),
        )

    def _look(self, t: int) -> bool:
        """Take ended rows out, and foresee which choices the steps up to the next look need; False at the end."""
        fate, start = torch.stack([self._fate.long(), self._start]).cpu().numpy()
        running = fate[self._alive] == RUNNING
        count = int(running.sum())
        if count == 0:
            return False
        if count < len(running):
            places = np.flatnonzero(~running[:count])
            sources = np.flatnonzero(running[count:]) + count
            packed = self._alive[:count].copy()
            packed[places] = self._alive[sources]
            self._alive = packed
            self._packed = self._on_device(self._alive)
            self._decoder.move_rows(self._on_device(sources), self._on_device(places), count)
        start, last = start[self._alive], t + self._stride - 1
        writing = start == 0
        # A turn that ends at once is followed by the template's tokens, and then by the answer.
        answers = np.where(writing, t + len(self._rules.middle) <= last, start <= last)
        greedy = self._rows.greedy[self._alive]
        self._writing = self._parts(writing)
        self._greedy = self._parts(answers & greedy)
        self._sampled = self._parts(answers & ~greedy)
        return True

    def _choose(self, logits: Tensor, t: int) -> Tensor:
        """A token for each row, int64 [all rows], 0 for those no longer in the batch."""
        uniform = self._uniforms[t % _DRAWN_STEPS][self._packed]
        chosen = torch.zeros_like(self._packed)
        for part in self._greedy:
            chosen[part] = greedy(logits[part])
        for part in self._sampled:
            chosen[part] = draw(logits[part], uniform[part])
        for part in self._writing:
            own = draw_nucleus(logits[part], uniform[part], self._rules.turn_top_p)
            chosen[part] = torch.where(self._start[self._packed[part]] == 0, own, chosen[part])
        everywhere = torch.zeros_like(self._start)
        everywhere[self._packed] = chosen
        return everywhere

    def _take(self, chosen: Tensor, t: int) -> None:
        """Write column t, from the choice or as given, and see what ends with it."""
        rules, middle = self._rules, self._middle
        running = self._fate == RUNNING
        writing = running & (self._start == 0)
        answering = running & (self._start > 0) & (self._start <= t)
        column = torch.where(writing | answering, chosen, self._tokens[:, t])
        self._tokens[:, t] = column
        eos = (column[:, None] == self._eos).any(dim=1)

        if t < self._longest_turn:
            closing = writing & (column == middle[0])
            if t < SHORTEST_TURN:
                self._void(closing, SHORT_TURN)
            else:
                ahead = self._tokens[:, t : t + len(middle)]
                ahead.copy_(torch.where(closing[:, None], middle, ahead))
                self._start = self._start.masked_fill(closing, t + len(middle))
            open_end = eos if t + 1 < rules.max_turn else torch.ones_like(eos)
            self._void(writing & ~closing & open_end, OPEN_TURN)
        self._end(answering & (eos | (t + 1 - self._start >= rules.max_answer)), t)
        if (t + 1) % LOOP_EVERY == 0:
            tails = self._tokens[:, max(0, t + 1 - REACH) : t + 1]
            caught = (self._fate == RUNNING) & looping(tails, t + 1 - self._start)
            self._void(caught & (self._start == 0), LOOPING_TURN)
            self._end(caught & (self._start > 0), t)

    def _void(self, which: Tensor, fate: int) -> None:
        self._fate = self._fate.masked_fill(which, fate)

    def _end(self, which: Tensor, t: int) -> None:
        self._fate = self._fate.masked_fill(which, ANSWERED)
        self._ends = self._ends.masked_fill(which, t + 1)

    def _parts(self, which: NDArray[np.bool_]) -> list[Tensor]:
        """Places where `which` holds, a few at a time."""
        places = np.flatnonzero(which)
        return [self._on_device(places[i : i + _CHOICE_ROWS]) for i in range(0, len(places), _CHOICE_ROWS)]

    def _on_device(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(indices).to(self._decoder.device)


SHORTEST_ANSWER = 4
_MOST_UNPRINTABLE = 0.02
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_VOID = {SHORT_TURN: "turn too short", OPEN_TURN: "turn without an end", LOOPING_TURN: "turn in a loop"}


class Sieve:
    """Tells which rows of a wave to keep, and counts why others are left out.

    Args:
        middle: template tokens between turn and answer, how many.
        eos: tokens that end an answer.
        unprintable: bool [V], see `unprintable_tokens`; None to let all pass.
        own_turns: the target wrote the user turns, so they are looked at too.
    """

    def __init__(
        self, middle: int, eos: tuple[int, ...], unprintable: NDArray[np.bool_] | None, own_turns: bool
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._middle = middle
        self._eos = eos
        self._unprintable = unprintable
        self._own_turns = own_turns

    def keep(self, rows: Rows, known: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The rows worth keeping, ascending; `known` are the keys of user turns that came up before."""
        starts, ends, tokens = rows.answer_start, rows.ends, rows.tokens
        turn_ends = (starts - self._middle).clip(0)
        kept = np.ones(len(starts), np.bool_)

        def leave_out(reason: str, which: NDArray[np.bool_]) -> None:
            self.left_out[reason] += int((kept & which).sum())
            kept[which] = False

        for fate, reason in _VOID.items():
            leave_out(reason, rows.fates == fate)
        assert (rows.fates[kept] == ANSWERED).all()
        leave_out("answer too short", ends - starts < SHORTEST_ANSWER)
        if self._own_turns:
            # A turn may end in a loop between two looks for loops.
            texts, lengths = torch.from_numpy(tokens), torch.from_numpy(turn_ends)
            leave_out("turn in a loop", looping(tails_of(texts, lengths), lengths).numpy())
        if self._unprintable is not None:
            stopped = np.isin(tokens[np.arange(len(ends)), (ends - 1).clip(0)], self._eos)
            spans = [(starts, ends - stopped)]
            if self._own_turns:
                spans.append((np.zeros_like(starts), turn_ends))
            for first, end in spans:
                share = share_marked(tokens, self._unprintable, first, end)
                leave_out("unprintable", share > _MOST_UNPRINTABLE)
        fresh = np.zeros_like(kept)
        chosen = np.flatnonzero(kept)
        fresh[chosen[first_of_each(text_keys(tokens[chosen], starts[chosen]), known)]] = True
        leave_out("duplicate turn", ~fresh)
        return np.flatnonzero(kept)


def text_keys(tokens: NDArray[np.integer], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each row's first `ends` tokens; equal texts have equal keys, whatever follows them."""
    keys = np.zeros(len(tokens), np.uint64)
    for column in range(int(ends.max(initial=0))):
        mixed = (keys ^ (tokens[:, column].astype(np.uint64) + np.uint64(1))) * _FACTOR
        keys = np.where(column < ends, mixed ^ (mixed >> np.uint64(29)), keys)
    return keys


def first_of_each(keys: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which keys are neither among the known ones nor equal to one before them: bool [n]."""
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, return_index=True)[1]] = True
    fresh: NDArray[np.bool_] = first & ~np.isin(keys, known)
    return fresh


def unprintable_tokens(tokenizer: Any, size: int) -> NDArray[np.bool_]:
    """Tokens that no text for people holds: control characters, unassigned ones, special tokens; bool [size].

    Parts of a character, which many tokenizers have, are none of these.
    """
    marked = np.zeros(size, np.bool_)
    texts = tokenizer.batch_decode([[token] for token in range(min(size, len(tokenizer)))])
    for token, text in enumerate(texts):
        marked[token] = any(unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\t\n\r" for c in text)
    marked[[token for token in tokenizer.all_special_ids if token < size]] = True
    return marked


def share_marked(
    tokens: NDArray[np.integer],
    marked: NDArray[np.bool_],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Share of marked tokens among columns starts..ends-1 of each row: float64 [R]; 0 where there are none."""
    columns = np.arange(tokens.shape[1])
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    share: NDArray[np.float64] = (marked[tokens] & inside).sum(axis=1) / inside.sum(axis=1).clip(1)
    return share


# cuDNN's attention is planned anew for each length of the keys, and here every step has another.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LockstepCache:
    """Keys and values of R rows of one length, passed to a transformers model as its cache.

    Args:
        rows: R.
        tokens: most tokens of a row.
        layers: the model's layers, which all count for the memory that is asked for.
        spare: bytes that must stay free beside the cache.
    """

    is_compileable = False

    def __init__(self, rows: int, tokens: int, layers: int, spare: int = 0) -> None:
        self.rows = rows
        self.length = 0
        self._tokens = tokens
        self._layers = layers
        self._spare = spare
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's [R, H, n, D], or [1, H, n, D] for all rows; returns views [R or 1, H, length + n, D]."""
        if layer_idx == len(self._buffers):
            if layer_idx == 0:
                self._check_memory(key, value)
            self._buffers.append((self._room(key), self._room(value)))
        end = self.length + key.shape[2]
        keys, values = self._buffers[layer_idx]
        keys[: self.rows, :, self.length : end] = key
        values[: self.rows, :, self.length : end] = value
        return keys[: key.shape[0], :, :end], values[: key.shape[0], :, :end]

    def advance(self, tokens: int) -> None:
        """All layers have appended so many tokens."""
        self.length += tokens

    @torch.inference_mode()
    def move_rows(self, sources: Tensor, places: Tensor, rows: int) -> None:
        """Put rows `sources` into `places` (int64 [k] both), and keep the first `rows` rows."""
        for buffers in self._buffers:
            for buffer in buffers:
                filled = buffer[:, :, : self.length]
                filled[places] = filled[sources]
        self.rows = rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def _room(self, states: Tensor) -> Tensor:
        # Views end where the rows do, so what was never written is never read.
        shape = (self.rows, states.shape[1], self._tokens, states.shape[3])
        return torch.empty(shape, dtype=states.dtype, device=states.device)

    def _check_memory(self, key: Tensor, value: Tensor) -> None:
        per_token = sum(s.shape[1] * s.shape[3] * s.element_size() for s in (key, value)) * self._layers
        need = self.rows * self._tokens * per_token + self._spare
        free = available_bytes(key.device)
        if free is not None and need > free:
            fit = max(0, int(self.rows * free / need))
            raise CacheMemoryError(
                f"{self.rows} conversations of up to {self._tokens} tokens at once need {need / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free: lower --rows to {fit} or less"
            )


class Lockstep:
    """Runs the target over rows in lockstep.

    Args:
        target: the model.
        rows: rows at the start; they can only become fewer.
        tokens: most tokens of a row, the common beginning included.
    """

    def __init__(self, target: Target, rows: int, tokens: int) -> None:
        self.device = target.device
        self._target = target
        # Logits of all rows, and a copy of those that a choice is made from.
        spare = 2 * rows * target.vocab_size * target.dtype.itemsize
        self._cache = LockstepCache(rows, tokens, target.num_layers, spare)
        self._positions = torch.arange(tokens, device=target.device)[None]

    def begin(self, tokens: list[int]) -> Tensor:
        """Process what all rows begin with; logits [R, V] of the token after it (one row, seen R times)."""
        logits = self._forward(torch.tensor([tokens], device=self.device))
        return logits.expand(self._cache.rows, -1)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 [R]; logits [R, V]."""
        return self._forward(tokens[:, None])

    def move_rows(self, sources: Tensor, places: Tensor, rows: int) -> None:
        """Rows `sources` take the `places` of rows no longer wanted, and the first `rows` rows stay."""
        self._cache.move_rows(sources, places, rows)

    def _forward(self, tokens: Tensor) -> Tensor:
        start, n = self._cache.length, tokens.shape[1]
        positions = self._positions[:, start : start + n]
        columns = self._positions[:, : start + n]
        visible = None if n == 1 else columns[:, None, :] <= positions[:, :, None]
        first = start == 0 and n > 1
        seen = attention.Visibility(
            visible, positions, columns, self._target.dtype, causal=first, steady=False
        )
        with _kernels(self.device):
            logits, _ = self._target.run(self._cache, tokens, positions, seen, keep=1)
        self._cache.advance(n)
        return logits[:, -1]


@contextmanager
def _kernels(device: torch.device) -> Iterator[None]:
    with sdpa_kernel(_KERNELS) if device.type == "cuda" else nullcontext():
        yield


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
