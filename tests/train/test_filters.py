"""Which conversations are of use."""

import numpy as np
import torch

from ddtree.train.synthesize import (
    ANSWERED,
    OPEN_TURN,
    REACH,
    Rows,
    Sieve,
    first_of_each,
    looping,
    share_marked,
    tails_of,
    text_keys,
    unprintable_tokens,
)

EOS = 5


def rows(texts, fates=None):
    """Rows of (turn, answer) with a middle of two tokens."""
    width = max(len(turn) + 2 + len(answer) for turn, answer in texts)
    tokens = np.zeros((len(texts), width), np.int32)
    for row, (turn, answer) in enumerate(texts):
        text = [*turn, 90, 91, *answer]
        tokens[row, : len(text)] = text
    starts = np.array([len(turn) + 2 for turn, _ in texts])
    ends = starts + np.array([len(answer) for _, answer in texts])
    fates = np.array(fates or [ANSWERED] * len(texts), np.uint8)
    ended = fates == ANSWERED
    return Rows(tokens, starts * ended, np.zeros(len(texts), bool), ends * ended, fates)


def test_each_reason_is_counted_once_and_the_rest_is_kept():
    marked = np.zeros(100, bool)
    marked[99] = True
    good = [20, 21, 22, 23, EOS]
    found = rows(
        [
            ([10, 11, 12], good),
            ([10, 11, 12], good),  # duplicate
            ([10, 11, 13], [20, 21, EOS]),  # too short
            ([10, 11, 14], [20, 99, 22, 23]),  # unprintable answer
            ([10, 99, 15], good),  # unprintable turn
            ([16] * 40, good),  # turn in a loop
            ([10, 11, 17], good),
            ([10, 11, 18], good),  # known
            ([10, 11, 19], good),
        ],
        [ANSWERED] * 8 + [OPEN_TURN],
    )
    sieve = Sieve(2, (EOS,), marked, own_turns=True)
    known = text_keys(np.array([[10, 11, 18, 90, 91]]), np.array([5]))
    assert sieve.keep(found, known).tolist() == [0, 6]
    assert +sieve.left_out == {
        "duplicate turn": 2,
        "answer too short": 1,
        "unprintable": 2,
        "turn in a loop": 1,
        "turn without an end": 1,
    }


def test_given_turns_are_not_judged():
    marked = np.zeros(100, bool)
    marked[99] = True
    found = rows([([99] * 40, [20, 21, 22, 23])])
    assert Sieve(2, (EOS,), marked, own_turns=False).keep(found, np.zeros(0, np.uint64)).tolist() == [0]


def test_a_special_token_at_the_answers_end_is_not_counted_against_it():
    marked = np.zeros(100, bool)
    marked[EOS] = True
    sieve = Sieve(2, (EOS,), marked, own_turns=True)
    assert len(sieve.keep(rows([([10, 11, 12], [20, 21, 22, EOS])]), np.zeros(0, np.uint64))) == 1


def test_keys_tell_texts_apart_and_nothing_else():
    a = text_keys(np.array([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 4, 9], [1, 2, 0, 0]]), np.array([3, 3, 3, 2]))
    b = text_keys(np.array([[1, 2, 3], [1, 2, 0]], np.uint16), np.array([3, 3]))
    assert a[0] == a[1] == b[0]
    assert len({*a[1:].tolist(), int(b[1])}) == 4


def test_the_first_of_equal_keys_is_fresh_unless_known():
    keys = np.array([4, 7, 4, 9, 7], np.uint64)
    assert first_of_each(keys, np.array([9], np.uint64)).tolist() == [True, True, False, False, False]


def test_the_share_of_marked_tokens_is_of_the_span_alone():
    marked = np.array([False, True])
    tokens = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    share = share_marked(tokens, marked, np.array([1, 1, 2]), np.array([4, 3, 2]))
    assert share.tolist() == [2 / 3, 0, 0]


def test_control_characters_and_special_tokens_are_unprintable():
    texts = ["a", "\x07", "\n", "<|end|>", "\ufffd", "é", "\ue000"]

    class Tokenizer:
        all_special_ids = (3, 200)

        def __len__(self):
            return len(texts)

        def batch_decode(self, ids):
            return [texts[i] for (i,) in ids]

    assert np.flatnonzero(unprintable_tokens(Tokenizer(), 10)).tolist() == [1, 3, 6]


def plain_loops(tokens):
    for period in range(1, 41):
        span = max(3 * period, 24)
        if len(tokens) >= span + period and tokens[-span:] == tokens[-span - period : -period]:
            return True
    return False


def test_loops_are_found_by_their_period():
    phrase = list(range(10, 20))
    texts = [[50, 51, *phrase * 4], [7] * 30, phrase * 2, list(range(100)), phrase * 3, [7] * 24, [7] * 25]
    texts += [[9] * n + list(range(10, 10 + p)) * 4 for p in (1, 2, 9, 39, 40, 41) for n in (0, 1, 300)]
    expected = [plain_loops(text) for text in texts]
    assert expected[:7] == [True, True, False, False, False, False, True]
    width = max(map(len, texts))
    tokens = torch.zeros((len(texts), width), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    tails = tails_of(tokens, lengths)
    assert tails.shape[1] == REACH
    assert looping(tails, lengths).tolist() == expected
