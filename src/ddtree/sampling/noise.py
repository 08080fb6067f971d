"""Gumbel noise as a pure function of (seed, position, token).

`argmax_v [log p(v) + g(v)]` with independent standard Gumbel g draws v with probability p(v) (Gumbel-max).
Because g depends on nothing but (seed, position, token), the token drawn at a position is the same whether
or not a drafter proposed it, whatever else is in the batch and whichever part of the vocabulary is looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import ConfigError, is_whole

MAX_SEED = 2**63
MAX_POSITION = 2**31

_WORD = 2**64 - 1
# Constants of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_BLOCK = 32768
_ROWS_KEPT = 32


def _signed(word: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def _mix(word: Any) -> Any:
    """Return SplitMix64's finalizer of a Python int, or of each of an array of uint64, modulo 2**64."""
    for shift, multiplier in _STEPS:
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word ^ (word >> _LAST_SHIFT)


def _mix_(words: Tensor, scratch: Tensor) -> None:
    """`_mix` on int64 words, in place; integer arithmetic wraps, so every device gives the same bits."""
    for shift, multiplier in _STEPS:
        _shift_xor_(words, shift, scratch)
        words.mul_(_signed(multiplier))
    _shift_xor_(words, _LAST_SHIFT, scratch)


def _shift_xor_(words: Tensor, bits: int, scratch: Tensor) -> None:
    # int64 >> copies the sign bit; the mask makes the shift logical.
    torch.bitwise_right_shift(words, bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - bits)) - 1)
    words.bitwise_xor_(scratch)


def _gumbel(words: Tensor) -> Tensor:
    """Return float32 noise of int64 words, which are used up."""
    _mix_(words, torch.empty_like(words))
    words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    # Odd multiples of 2**-53 are exact in float64 and never 0 or 1, so both logarithms are finite.
    words.bitwise_or_(1)
    return words.double().mul_(2.0**-53).log_().neg_().log_().neg_().float()


@lru_cache(maxsize=8)
def _token_words(vocab_size: int, device: torch.device) -> Tensor:
    """Return the word that each token adds to the key of a (seed, position): int64 [V], shared by all sequences."""
    return torch.arange(vocab_size, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))


class Noise:
    """Standard Gumbel noise of one sequence, keyed by absolute position and token id.

    Word number `token` of a SplitMix64 stream whose start is a hash of (seed, position) gives 52 random
    bits, hence u in (0, 1), hence g = -log(-log u), computed in float64 and rounded to float32. A subset of
    tokens therefore has the values of the full row. Devices agree as far as their float64 logarithms do: a
    last-bit difference there survives the rounding to float32 about once in 10**8 values, as one unit in the
    last place.

    Rows are remembered for the 32 positions used last, because drafting and verification look at the same
    ones. One takes 4 * V bytes.

    Args:
        seed: integer in [0, 2**63).
        vocab_size: V, the width of a full row.
        device: where rows are made and kept; a device without float64 gets them from the CPU.

    Raises:
        ConfigError: the seed is not an integer in range.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        if not is_whole(seed) or not 0 <= seed < MAX_SEED:
            raise ConfigError(f"seed must be an integer from 0 to 2**63 - 1, not {seed!r}")
        if vocab_size < 1:
            raise ConfigError(f"vocab_size must be at least 1, not {vocab_size}")
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._compute = torch.device("cpu") if self.device.type == "mps" else self.device
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self._stream = _mix((seed + _GAMMA) & _WORD)

    def gumbel(self, position: int, tokens: Tensor | None = None) -> Tensor:
        """Noise at an absolute position (prompt tokens count).

        Args:
            position: 0-based position of the token to be chosen, below 2**31.
            tokens: integer token ids below V of any shape, or None for the whole vocabulary.

        Returns:
            float32 [V], or the shape of `tokens`, on `device`. A full row is shared: do not write to it.

        Raises:
            ConfigError: the position is out of range.
        """
        if tokens is not None and position not in self._rows:
            with torch.inference_mode(False), torch.no_grad():
                words = tokens.to(self._compute, torch.int64) * _signed(_GAMMA) + _signed(self._key(position))
                return _gumbel(words).to(self.device)
        row = self._full_rows([position])[0]
        return row if tokens is None else row[tokens]

    def rows(self, first: int, count: int) -> Tensor:
        """Return full rows of the positions from `first` on: float32 [count, V], at most 32. Raises ConfigError."""
        return torch.stack(self._full_rows(range(first, first + count)))

    def _full_rows(self, positions: Sequence[int]) -> list[Tensor]:
        """Return the rows [V] of positions, made together or remembered."""
        missing = [position for position in positions if position not in self._rows]
        keys = [_signed(self._key(position)) for position in missing]
        words = _token_words(self.vocab_size, self._compute)
        # Rows outlive the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if not missing:
                made = []
            elif self._compute.type == "cpu":
                # Each thread's part of a block stays in its cache; a GPU wants few launches.
                parts = words.split(_BLOCK * torch.get_num_threads())
                made = [torch.cat([_gumbel(part + key) for part in parts]) for key in keys]
            else:
                made = list(_gumbel(words + torch.tensor(keys, device=self._compute)[:, None]))
        self._rows.update(zip(missing, (row.to(self.device) for row in made), strict=True))
        for position in positions:
            self._rows.move_to_end(position)
        while len(self._rows) > _ROWS_KEPT:
            self._rows.popitem(last=False)
        return [self._rows[position] for position in positions]

    def few(self, position: int, tokens: Sequence[int]) -> list[float]:
        """`gumbel` of a few tokens, to within a float32 rounding: several times as quick, good enough for drafting."""
        row = self._rows.get(position)
        if row is not None and row.device.type == "cpu":
            return row.numpy().take(np.array(tokens, dtype=np.int64)).tolist()
        words = _mix(np.array(tokens, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(self._key(position)))
        uniform = (words >> np.uint64(11) | np.uint64(1)).astype(np.float64) * 2.0**-53
        return (-np.log(-np.log(uniform))).tolist()

    def _key(self, position: int) -> int:
        if not 0 <= position < MAX_POSITION:
            raise ConfigError(f"position must be from 0 to 2**31 - 1, not {position}")
        return _mix((self._stream + (position + 1) * _GAMMA) & _WORD)


PLAIN = (0.0, 1.0)
"""The coupling that leaves a drafter's distribution as it is."""


def check_coupling(beta: float, kappa: float) -> None:
    """Raises ConfigError when beta or kappa is out of range."""
    if not 0.0 <= beta < float("inf"):
        raise ConfigError(f"beta must be finite and not negative, not {beta!r}")
    if not 0.0 < kappa < float("inf"):
        raise ConfigError(f"kappa must be finite and positive, not {kappa!r}")


def couple(logq: Tensor, gumbel: Tensor, beta: float, kappa: float) -> Tensor:
    """Rank a drafter's candidates by their chance to win under the noise that the target will use.

    The score of a token is (log q + beta * g) / kappa, renormalised over the drafter's whole vocabulary.
    beta = 0 and kappa = 1 give the drafter's own distribution back; beta = 1 trusts q fully. The target
    never looks at the scores, so they decide how much is accepted and not what is said. (Communication-free
    coupling: arXiv 2408.07978.)

    Args:
        logq: drafter log-probabilities at the request's temperature, [..., V].
        gumbel: `Noise` at the same positions, broadcastable to [..., V].
        beta: weight of the noise, finite and not negative.
        kappa: softness of the result, finite and positive.

    Returns:
        float32 log-probabilities [..., V].

    Raises:
        ConfigError: beta or kappa is out of range.
    """
    check_coupling(beta, kappa)
    score = torch.add(logq.float(), gumbel, alpha=beta).div_(kappa)
    return torch.log_softmax(score, dim=-1)
