"""Which conversations of a wave are of use for training."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.train.loops import looping, tails_of
from ddtree.train.waves import ANSWERED, LOOPING_TURN, OPEN_TURN, SHORT_TURN, Rows

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
