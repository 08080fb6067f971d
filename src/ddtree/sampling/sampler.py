"""Choose the target's token at a position, as a pure function of (logits, prefix, parameters, seed, position)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams, check_vocabulary
from ddtree.sampling.processors import Processors, best_ids, support


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the target at one position, before any processing.

    Attributes:
        token: the chosen id.
        logprob: its log-probability, natural logarithm.
        top: the n most likely (id, log-probability), by (log-probability descending, id ascending).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one sequence.

    Args:
        params: the request; a missing seed is drawn (`self.params.seed` tells which).
        vocab_size: V, the width of the target's logits.
        eos_ids: the model's end-of-sequence ids.
        prompt_length: tokens of the prompt; the rest of a prefix is output.
        device: where the logits are.

    Raises:
        ConfigError: the parameters name a token that the model does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        prompt_length: int,
        device: torch.device | str = "cpu",
    ) -> None:
        check_vocabulary(params, vocab_size)
        params = params.with_seed()
        assert params.seed is not None
        self.params = params
        self.noise = Noise(params.seed, vocab_size, device)
        own = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self.stop_ids: frozenset[int] = own | frozenset(params.stop_token_ids)
        """Ids that end the sequence."""
        self._filtered = bool(params.top_k or params.top_p < 1.0 or params.min_p > 0.0)
        self._processors: Processors | None = None
        if params.processed:
            self._processors = Processors(
                params, prompt_length, vocab_size, self.stop_ids, torch.device(device)
            )

    @property
    def plain(self) -> bool:
        """Whether choices depend on nothing but logits, temperature and noise."""
        return self._processors is None and (self.params.greedy or not self._filtered)

    @torch.inference_mode()
    def choose(self, logits: Tensor, prefix: list[int], committed: int = 0) -> int:
        """Choose the token at position len(prefix).

        Args:
            logits: the target's raw logits [V], any floating dtype.
            prefix: prompt and all tokens before the chosen one. Any prefix may follow any other.
            committed: how many leading tokens of `prefix` no later call will change; saves comparing them.

        Returns:
            The id; of equal scores the lowest.

        Raises:
            ConfigError: no token is left, or a custom processor misbehaves.
            UnsupportedModelError: the logits contain NaN or +inf.
        """
        params = self.params
        scores = logits if self._processors is None else self._processors(logits, prefix, committed)
        if params.greedy:
            token, best = _highest(scores)
            self._check(best, logits, prefix)
            return token
        scores = scores.float()
        if params.temperature != 1.0:
            scores = scores / params.temperature
        if self._filtered:
            self._check(float(scores.amax()), logits, prefix)
            kept = support(scores, params.top_k, params.top_p, params.min_p)
            if kept is not None:
                return int(kept[_highest(scores[kept] + self.noise.gumbel(len(prefix), kept))[0]])
        token, best = _highest(scores + self.noise.gumbel(len(prefix)))
        self._check(best, logits, prefix)
        return token

    def _check(self, best: float, logits: Tensor, prefix: list[int]) -> None:
        if abs(best) < float("inf"):
            return
        raw = float(logits.float().amax())
        if abs(raw) < float("inf"):
            raise ConfigError(
                f"no token is left at position {len(prefix)}; relax bad_words, min_tokens or processors"
            )
        raise UnsupportedModelError(
            f"the target's logits at position {len(prefix)} are NaN or infinite; use bfloat16 or float32"
        )


@torch.inference_mode()
def choose_ahead(
    samplers: Sequence[Sampler], logits: Tensor, depths: Tensor, lengths: Sequence[int], deepest: int
) -> Tensor:
    """Choose after all nodes of a batch of trees at once, on the device; nothing is read from it.

    That is for greedy rows and rows that sample at a plain temperature. The choices are those of `Sampler.choose`.

    Args:
        samplers: of R rows.
        logits: the target's raw logits [R, N, V].
        depths: int64 [R, N], of the nodes.
        lengths: tokens of each row up to its root, the bonus token included.
        deepest: no node is deeper, at most 31.

    Returns:
        int64 [R, N]; -1 where `Sampler.choose` must: for other rows, and where the scores are no finite numbers.
    """
    if all(sampler.plain and sampler.params.greedy for sampler in samplers):
        return _finite_choice(logits)
    chosen = torch.full(depths.shape, -1, device=depths.device)
    for sampler, own, levels, length, out in zip(samplers, logits, depths, lengths, chosen, strict=True):
        if not sampler.plain:
            continue
        if sampler.params.greedy:
            out.copy_(_finite_choice(own))
            continue
        noise = sampler.noise.rows(length, deepest + 1)
        for start in range(0, len(own), _NODES_AT_ONCE):
            part = slice(start, start + _NODES_AT_ONCE)
            scores = own[part].float()
            if sampler.params.temperature != 1.0:
                scores = scores / sampler.params.temperature
            out[part] = _finite_choice(scores + noise[levels[part]])
    return chosen


def _finite_choice(scores: Tensor) -> Tensor:
    """Return the place of the highest of scores [..., V], the first of equals; -1 where it is no finite number."""
    best = scores.max(dim=-1)
    return best.indices.masked_fill(~best.values.isfinite(), -1)


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities of raw logits [V]: of `token` and of the `count` most likely ids."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = best_ids(values, count)
        top = tuple(zip(ids.tolist(), values[ids].tolist(), strict=True))
    return TokenLogprobs(token, float(values[token]), top)


_NODES_AT_ONCE = 128
"""Nodes whose scores are held in float32 at a time: 75 MB of a vocabulary of 150,000."""
_LOWEST_BITS = {torch.bfloat16: 0xFF80, torch.float16: 0xFC00}
"""The bits of -inf in half precision; only a NaN with a sign has more."""


def _highest(scores: Tensor) -> tuple[int, float]:
    """Return index and value of the highest of scores [n] of a floating dtype: first of equals, NaN before all."""
    if scores.device.type == "cpu":
        lowest = _LOWEST_BITS.get(scores.dtype)
        if lowest is not None:
            # Positive numbers, NaN last, stand in the order of their bits, above all negative ones as signed numbers.
            bits = scores.view(torch.int16).numpy()
            token = int(bits.argmax())
            if bits[token] > 0 and bits.view(np.uint16).max() <= lowest:
                return token, float(scores[token])
        # Several times as fast as torch's.
        values = scores.float().numpy()
        token = int(values.argmax())
        return token, float(values[token])
    token = int(scores.argmax())
    return token, float(scores[token])
