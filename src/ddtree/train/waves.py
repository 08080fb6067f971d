"""A wave: conversations that start together, decoded in lockstep with all state on the device.

Every row goes through: user turn (written by the target, or given), template tokens, answer. A step is one pass of the
target and a few dozen operations on vectors over all rows; the host looks at the outcome only now and then, to take
ended rows out of the batch. State keeps the rows' first numbering throughout; only keys, values and logits are packed.

A row's tokens are a function of the target, the rules and its own uniform draws, one a step: how often the host looks
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.train.choice import draw, draw_nucleus, greedy
from ddtree.train.loops import REACH, looping

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
