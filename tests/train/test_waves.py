"""Waves of rows in lockstep, against decoding one row after the other."""

import numpy as np
import pytest
import torch

from ddtree.train.synthesize import (
    ANSWERED,
    LOOPING_TURN,
    OPEN_TURN,
    SHORT_TURN,
    Rows,
    Rules,
    Wave,
    draw,
    draw_nucleus,
)

VOCAB, EOS, CLOSE = 40, 5, 6
BEGINNING = [1, 7]
RULES = Rules(middle=(CLOSE, 3, 11), eos=(EOS,), max_turn=60, max_answer=70, turn_top_p=0.9)


class Scripted:
    """A model whose logits depend on the last three tokens; keeps texts as a cache would, rows packed."""

    device = torch.device("cpu")

    def __init__(self, rows, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tables = torch.randn((3, VOCAB, VOCAB), generator=generator)
        self.texts = [[] for _ in range(rows)]

    def logits(self, text):
        last = text[-3:]
        out = sum(self.tables[i, token] for i, token in enumerate(reversed(last)))
        out[[EOS, CLOSE]] -= 0.5
        return out * 1.5

    def begin(self, tokens):
        self.texts = [list(tokens) for _ in self.texts]
        return self.logits(tokens).expand(len(self.texts), -1)

    def step(self, tokens):
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.append(token)
        return torch.stack([self.logits(text) for text in self.texts])

    def move_rows(self, sources, places, rows):
        for source, place in zip(sources.tolist(), places.tolist(), strict=True):
            self.texts[place] = list(self.texts[source])
        self.texts = self.texts[:rows]


def loops(tokens):
    """Four turns of one period, or 24 tokens and a period more, at the end."""
    for period in range(1, 41):
        span = max(3 * period, 24)
        if len(tokens) >= span + period and tokens[-span:] == tokens[-span - period : -period]:
            return True
    return False


def one_row(model, greedy, uniforms, turn=None):
    """(tokens, answer start, fate) of a row by itself."""
    middle = list(RULES.middle)
    tokens, start = ([*turn, *middle], len(turn) + len(middle)) if turn else ([], 0)
    step = 0
    while True:
        if step >= len(tokens):
            logits = model.logits([*BEGINNING, *tokens])[None]
            uniform = torch.tensor([uniforms[step]])
            if not start:
                token = int(draw_nucleus(logits, uniform, RULES.turn_top_p))
            else:
                token = int(logits.argmax()) if greedy else int(draw(logits, uniform))
            tokens.append(token)
            if not start:
                if token == CLOSE:
                    if step < 3:
                        return tokens, 0, SHORT_TURN
                    tokens += middle[1:]
                    start = len(tokens)
                elif token == EOS or step + 1 >= RULES.max_turn:
                    return tokens, 0, OPEN_TURN
            elif token == EOS or len(tokens) - start >= RULES.max_answer:
                return tokens, start, ANSWERED
        step += 1
        if step % 16 == 0:
            if not start and loops(tokens):
                return tokens, 0, LOOPING_TURN
            if start and step > start and loops(tokens[start:step]):
                return tokens, start, ANSWERED


def uniforms(rows, steps, seed=1):
    draws = np.random.Generator(np.random.Philox(seed))
    return np.concatenate([draws.random((16, rows), np.float32) for _ in range(-(-steps // 16))])


def decode(rows, stride, seed=0, turns=None):
    greedy = np.arange(rows) % 2 == 0
    begun = Rows.given(turns, greedy, RULES) if turns else Rows.unwritten(greedy, RULES)
    draws = np.random.Generator(np.random.Philox(1))
    return Wave(Scripted(rows, seed), RULES, begun, draws, steps_between_looks=stride).run(BEGINNING)


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_a_wave_gives_what_each_row_gives_by_itself(stride):
    fates = set()
    for seed in range(2):
        rows = decode(48, stride, seed)
        drawn = uniforms(48, rows.tokens.shape[1])
        for row in range(48):
            tokens, start, fate = one_row(Scripted(1, seed), bool(rows.greedy[row]), drawn[:, row])
            assert rows.fates[row] == fate
            fates.add(fate)
            if fate == ANSWERED:
                assert rows.answer_start[row] == start
                assert rows.ends[row] == len(tokens)
                assert rows.tokens[row, : len(tokens)].tolist() == tokens
    assert fates >= {ANSWERED, SHORT_TURN, OPEN_TURN}


@pytest.mark.parametrize("stride", [1, 16])
def test_given_turns_are_answered_as_each_is_by_itself(stride):
    generator = np.random.default_rng(0)
    turns = [generator.integers(8, VOCAB, n).tolist() for n in (1, 2, 9, 30, 61, 4)]
    rows = decode(len(turns), stride, turns=turns)
    drawn = uniforms(len(turns), rows.tokens.shape[1])
    for row, turn in enumerate(turns):
        tokens, start, fate = one_row(Scripted(1), bool(rows.greedy[row]), drawn[:, row], turn)
        assert (rows.answer_start[row], rows.fates[row]) == (start, fate)
        assert rows.tokens[row, : rows.ends[row]].tolist() == tokens


def test_turns_in_a_loop_are_void_and_answers_in_a_loop_are_cut():
    class Stuck(Scripted):
        def logits(self, text):
            out = torch.full((VOCAB,), -50.0)
            closing = len(text) == 8 and text[0] == 1
            out[CLOSE if closing else 20 + len(text) % 5] = 50.0
            return out

    greedy = np.array([True, False])
    draws = np.random.Generator(np.random.Philox(1))
    cut = Wave(Stuck(2), RULES, Rows.unwritten(greedy, RULES), draws).run(BEGINNING)
    assert (cut.fates == ANSWERED).all()
    # The answer starts at column 9 (6 turn tokens, 3 of the template) and is looked at every 16th column.
    assert cut.answer_start.tolist() == [9, 9]
    assert cut.ends.tolist() == [48, 48]
    void = Wave(Stuck(2), RULES, Rows.unwritten(greedy, RULES), draws).run([2, 7])
    assert (void.fates == LOOPING_TURN).all()


def test_rows_that_have_ended_leave_the_batch():
    batches = []

    class Counting(Scripted):
        def step(self, tokens):
            batches.append(len(tokens))
            return super().step(tokens)

    model = Counting(32)
    draws = np.random.Generator(np.random.Philox(1))
    rows = Wave(model, RULES, Rows.unwritten(np.zeros(32, bool), RULES), draws).run(BEGINNING)
    lasts = np.where(rows.fates == ANSWERED, rows.ends, 0)
    assert batches == sorted(batches, reverse=True)
    assert batches[-1] == (lasts == lasts.max()).sum()
