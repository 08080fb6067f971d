"""Which conversations are of use."""

import numpy as np
import pytest

from ddtree.train.conversations import ConversationFilter, is_looping, unprintable_tokens
from ddtree.train.data import Conversation

EOS = 5
GOOD = [20, 21, 22, 23, EOS]


def conversation(message, answer):
    """With a middle of two tokens."""
    return Conversation(np.array([*message, 90, 91, *answer]), len(message) + 2, True)


def marked(*tokens):
    found = np.zeros(100, bool)
    found[list(tokens)] = True
    return found


def filtered(found, unprintable=None, own_messages=True, known=()):
    chosen = ConversationFilter(2, frozenset({EOS}), unprintable, own_messages)
    return chosen.keep(found, set(known)), chosen.left_out


def test_each_reason_is_counted_once_and_the_rest_is_kept():
    found = [
        conversation([10, 11, 12], GOOD),
        conversation([10, 11, 12], [30, 31, 32, 33]),  # duplicate
        conversation([10, 11, 13], [20, 21, EOS]),  # too short
        conversation([10, 11, 14], [20, 99, 22, 23]),  # unprintable answer
        conversation([10, 99, 15], GOOD),  # unprintable message
        conversation([16] * 40, GOOD),  # message in a loop
        conversation([10, 11, 17], GOOD),
        conversation([10, 11, 18], GOOD),  # known
        "turn without an end",
    ]
    kept, left_out = filtered(found, marked(99), known=[conversation([10, 11, 18], []).key])
    assert kept == [found[0], found[6]]
    assert left_out == {
        "duplicate turn": 2,
        "answer too short": 1,
        "unprintable": 2,
        "turn in a loop": 1,
        "turn without an end": 1,
    }


def test_given_messages_are_not_judged():
    found = [conversation([99] * 40, [20, 21, 22, 23])]
    assert filtered(found, marked(99), own_messages=False)[0] == found


def test_a_special_token_at_the_answers_end_is_not_counted_against_it():
    found = [conversation([10, 11, 12], [20, 21, 22, EOS])]
    assert filtered(found, marked(EOS))[0] == found


def test_a_key_depends_on_the_user_message_alone():
    same = [conversation([1, 2, 3], [9]), conversation([1, 2, 3], [8, 7])]
    assert same[0].key == same[1].key
    small = Conversation(same[0].tokens.astype(np.uint16), 5, False)
    assert small.key == same[0].key
    assert len({same[0].key, conversation([1, 2, 4], [9]).key, conversation([1, 2], [9]).key}) == 3


def test_control_characters_and_special_tokens_are_unprintable():
    texts = ["a", "\x07", "\n", "<|end|>", "\ufffd", "é", "\ue000"]

    class Tokenizer:
        all_special_ids = (3, 200)

        def __len__(self):
            return len(texts)

        def batch_decode(self, ids):
            return [texts[i] for (i,) in ids]

    assert np.flatnonzero(unprintable_tokens(Tokenizer(), 10)).tolist() == [1, 3, 6]


PHRASE = list(range(10, 20))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([50, 51, *PHRASE * 4], True),
        (PHRASE * 4 + [50], False),
        (PHRASE * 3, False),
        ([7] * 25, True),
        ([7] * 24, False),
        (list(range(100)), False),
        ([], False),
        ([9] * 30 + [10, 11] * 12, False),
        ([9] * 30 + [10, 11] * 13, True),
        *[([9] * 30 + list(range(10, 10 + period)) * 4, period <= 40) for period in (9, 39, 40, 41)],
    ],
)
def test_loops_are_four_repeats_of_a_period(text, expected):
    assert is_looping(text) == expected
