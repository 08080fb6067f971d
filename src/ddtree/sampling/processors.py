"""Logits processors of one sequence, applied to each prefix by itself."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.sampling.params import Processor, SamplingParams

_BANNED = float("-inf")


def common_length(first: list[int], second: list[int]) -> int:
    """Return the length of the longest common prefix of two texts."""
    # By bisection: slices are compared at C speed.
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


class TokenCounts:
    """Counts how often each token occurs in a prefix, on the device.

    Prefixes differ in their last few tokens only, so the counts follow from one prefix to the next by taking
    tokens off the end and putting others on. Distinct tokens are listed by first occurrence; those that are no
    longer there are therefore the last ones of the list.

    Args:
        start: prefix positions before this are not counted.
        vocab_size: V; ids from here on are not counted (embeddings may be wider than the head).
        device: where the counts live.

    Attributes:
        times: float32 [V], how often each token occurs.
    """

    def __init__(self, start: int, vocab_size: int, device: torch.device) -> None:
        self._start = start
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._final = 0
        self._occurrences: Counter[int] = Counter()
        self._ids: list[int] = []
        self._device_ids = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self.times = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def follow(self, prefix: list[int], committed: int = 0) -> Tensor:
        """Return the distinct ids of a prefix, int64 [U]; `times` then holds their counts.

        `committed` leading tokens are those of every later prefix and are not compared again.
        """
        held = self._tokens
        fixed = min(self._final, len(held), max(0, len(prefix) - self._start))
        tail = prefix[self._start + fixed :]
        common = common_length(held[fixed:], tail)
        self._replace(held[fixed + common :], tail[common:])
        held[fixed + common :] = tail[common:]
        self._final = max(fixed, min(committed - self._start, len(held)))
        return self._device_ids[: len(self._ids)]

    def _replace(self, old: list[int], new: list[int]) -> None:
        """Count `new` tokens at the end of the prefix in place of `old` ones."""
        self._occurrences.subtract(old)
        while self._ids and not self._occurrences[self._ids[-1]]:
            self._ids.pop()
        known = len(self._ids)
        for token in new:
            if not self._occurrences[token] and token < self._vocab_size:
                self._ids.append(token)
            self._occurrences[token] += 1
        device = self._device_ids.device
        if known < len(self._ids):
            self._device_ids[known : len(self._ids)] = torch.tensor(self._ids[known:], device=device)
        changed = [token for token in {*old, *new} if token < self._vocab_size]
        if changed:
            times = [float(self._occurrences[token]) for token in changed]
            self.times[torch.tensor(changed, device=device)] = torch.tensor(times, device=device)


class BadWords:
    """Finds the tokens that would complete a banned sequence after a prefix."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        # By the last token before the one that completes a word; None before words of one token.
        self._by_last: dict[int | None, list[tuple[list[int], int]]] = {}
        for *head, last in words:
            self._by_last.setdefault(head[-1] if head else None, []).append((head, last))

    def banned(self, prefix: list[int]) -> list[int]:
        """Return the ids of the tokens that would complete a banned sequence after `prefix`."""
        candidates = [word for key in (None, *prefix[-1:]) for word in self._by_last.get(key, ())]
        return [last for head, last in candidates if prefix[len(prefix) - len(head) :] == head]


class Processors:
    """Applies everything that changes logits before temperature, in the order that `SamplingParams` states.

    Args:
        params: the request.
        prompt_length: how many leading tokens of each prefix are prompt.
        vocab_size: V.
        end_ids: ids that end the sequence; ruled out until `min_tokens`.
        device: where the logits are.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_length: int,
        vocab_size: int,
        end_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        self._params = params
        self._prompt_length = prompt_length
        self._seen: TokenCounts | None = None
        self._output: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self._seen = TokenCounts(0, vocab_size, device)
        if params.presence_penalty or params.frequency_penalty:
            self._output = TokenCounts(prompt_length, vocab_size, device)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        self._bad_words = BadWords(params.bad_words)
        self._end_ids = sorted(token for token in end_ids if token < vocab_size)

    def __call__(self, logits: Tensor, prefix: list[int], committed: int) -> Tensor:
        """Return the processed logits float32 [V] of one prefix; the argument is left as it is.

        Raises:
            ConfigError: a custom processor returned something that cannot be sampled.
        """
        params = self._params
        scores = logits.to(torch.float32, copy=True)
        if self._seen is not None:
            ids = self._seen.follow(prefix, committed)
            found = scores[ids]
            penalty = params.repetition_penalty
            scores[ids] = torch.where(found < 0, found * penalty, found / penalty)
        if self._output is not None:
            ids = self._output.follow(prefix, committed)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * self._output.times[ids]
        if params.logit_bias:
            scores[self._bias_ids] += self._bias
        banned = self._bad_words.banned(prefix) if params.bad_words else []
        if len(prefix) - self._prompt_length < params.min_tokens:
            banned += self._end_ids
        if banned:
            scores[torch.tensor(banned, device=scores.device)] = _BANNED
        for processor in params.processors:
            scores = _checked(processor, prefix, scores)
        return scores


def _checked(processor: Processor, prefix: list[int], scores: Tensor) -> Tensor:
    shape = scores.shape
    result = processor(list(prefix), scores)
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    if not isinstance(result, Tensor) or result.shape != shape or not result.is_floating_point():
        found = f"{result.dtype}{list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"processor {name} must return floating-point logits {list(shape)}, not {found}")
    result = result.to(scores.device, torch.float32)
    best = float(result.amax())
    if best == _BANNED:
        raise ConfigError(f"processor {name} ruled out every token at position {len(prefix)}")
    if not abs(best) < float("inf"):
        raise ConfigError(f"processor {name} returned NaN or infinite logits at position {len(prefix)}")
    return result


_LEADING = 256


def support(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor | None:
    """Return the ids of the tokens kept, ascending, int64 [k]; None where all V are kept.

    Args:
        logits: float32 [V], divided by the temperature, at least one of them finite, none NaN or +inf.
        top_k, top_p, min_p: as in `SamplingParams`; 0, 1 and 0 are off.
    """
    ids: Tensor | None = None
    if 0 < top_k < logits.numel():
        ids = _at_least(logits, float(torch.topk(logits, top_k).values[-1]))
    if top_p < 1.0:
        ids = _nucleus(logits, top_p) if ids is None else ids[_nucleus(logits[ids], top_p)]
    if min_p > 0.0:
        # The likeliest token is always among those kept so far.
        floor = float(logits.amax()) + math.log(min_p)
        ids = _at_least(logits, floor) if ids is None else ids[_at_least(logits[ids], floor)]
    return ids


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest finite logits [V], by (value descending, id ascending), int64."""
    values = torch.topk(logits, min(count, logits.numel())).values
    ids = _first(logits, float(values[-1]), values.numel())
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def _at_least(logits: Tensor, floor: float) -> Tensor:
    kept = logits >= floor if floor > -math.inf else logits > floor
    return kept.nonzero().flatten()


def _first(logits: Tensor, cut: float, count: int) -> Tensor:
    """Return the first `count` ids by (value descending, id ascending), in ascending order.

    `cut` is the value of the last of them.
    """
    ids = _at_least(logits, cut)
    excess = ids.numel() - count
    if excess <= 0:
        return ids
    tied = (logits[ids] == cut).nonzero().flatten()
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[tied[-excess:]] = False
    return ids[keep]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return the ids that top-p keeps of logits [n], ascending."""
    peak = logits.amax()
    total = (logits - peak).exp_().sum().double()
    # The leading few usually reach p; sorting everything is for flat distributions.
    for leading in (_LEADING, logits.numel()):
        if leading < logits.numel():
            values = torch.topk(logits, leading).values
        elif logits.device.type == "cpu":
            # numpy sorts bare values some thirty times faster than torch sorts values with their indices.
            values = torch.from_numpy(np.sort(logits.numpy())).flip(0)
        else:
            values = torch.sort(logits, descending=True).values
        cumulative = ((values - peak).double().exp_() / total).cumsum(dim=0)
        if float(cumulative[-1]) >= top_p:
            break
    count = min(int((cumulative < top_p).sum()) + 1, values.numel())
    return _first(logits, float(values[count - 1]), count)
