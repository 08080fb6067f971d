"""Sampling parameters of a request: fields, ranges, errors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor

from ddtree.errors import ConfigError, is_whole
from ddtree.sampling.noise import MAX_SEED

Processor = Callable[[list[int], Tensor], Tensor]
"""Custom processor: (prefix token ids, logits float32 [V]) -> logits [V], a pure function."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow, and the noise no longer matters."""

MAX_TOKEN = 2**31 - 1


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not is_whole(value):
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, not {value}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    # NaN is in no range, and whole numbers need not fit into a float.
    number: Any = value
    if not low <= number <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, not {value}")
    return float(number)


def _items(name: str, value: Any, what: str) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of {what}, not {value!r}")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(
        _integer(f"a token id in {name}", token, 0, MAX_TOKEN) for token in _items(name, value, "token ids")
    )


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(_items(name, value, "strings"))
    for string in strings:
        if not isinstance(string, str):
            raise ConfigError(f"stop must be a string or a list of strings, not {string!r}")
        if not string:
            raise ConfigError("stop contains an empty string; leave it out")
    return strings


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON has only string keys, so OpenAI clients send "42".
        token: Any = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token = _integer("a token id in logit_bias", token, 0, MAX_TOKEN)
        if token in bias:
            raise ConfigError(f"logit_bias names token {token} twice")
        bias[token] = _real(f"logit_bias of token {token}", number, -100.0, 100.0)
    return bias


def _bad_words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = []
    for word in _items(name, value, "token id lists"):
        if isinstance(word, str):
            raise ConfigError(
                f"bad_words takes token ids, not {word!r}; convert it with ddtree.engine.detokenizer.bad_word_ids"
            )
        ids = _token_ids(name, word)
        if not ids:
            raise ConfigError("bad_words contains an empty list; leave it out")
        words.append(ids)
    return tuple(words)


def _processors(name: str, value: Any) -> tuple[Processor, ...]:
    processors = tuple(_items(name, value, "functions (prefix ids, logits) -> logits"))
    for processor in processors:
        if not callable(processor):
            raise ConfigError(
                f"processors must be functions (prefix ids, logits) -> logits, not {processor!r}"
            )
    return processors


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": partial(_real, low=0.0, high=100.0),
    "top_k": partial(_integer, low=-1, high=MAX_TOKEN),
    "top_p": partial(_real, low=0.0, high=1.0),
    "min_p": partial(_real, low=0.0, high=1.0),
    "repetition_penalty": partial(_real, low=1e-3, high=1e3),
    "presence_penalty": partial(_real, low=-2.0, high=2.0),
    "frequency_penalty": partial(_real, low=-2.0, high=2.0),
    "logit_bias": _logit_bias,
    "bad_words": _bad_words,
    "min_tokens": partial(_integer, low=0, high=MAX_TOKEN),
    "stop_token_ids": _token_ids,
    "stop": _stop_strings,
    "include_stop": _switch,
    "max_tokens": partial(_integer, low=1, high=MAX_TOKEN),
    "seed": partial(_integer, low=0, high=MAX_SEED - 1),
    "logprobs": partial(_integer, low=0, high=1000),
    "prompt_logprobs": partial(_integer, low=0, high=1000),
    "ignore_eos": _switch,
    "skip_special_tokens": _switch,
    "processors": _processors,
}
_FOR_NONE = {
    "top_k": 0,
    **dict.fromkeys(("bad_words", "stop_token_ids", "stop", "processors"), ()),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), None),
}


@dataclass(frozen=True)
class SamplingParams:
    """Says how one sequence is sampled and when it ends. Every field is checked on construction.

    Order of processing: repetition, presence and frequency penalties; logit bias; bad words; minimum tokens;
    custom processors; temperature; top-k; top-p; min-p. Each step sees the prefix of the node it is applied
    to, so on a draft tree the result is that of plain decoding.

    Fields:
        temperature: 0 to 100; below 1e-5 is greedy, and then top_k, top_p, min_p and seed have no effect.
        top_k: keep the k most likely tokens (tokens equal to the k-th stay too); 0, -1 or None keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, after top-k; 1 keeps
            all.
        min_p: keep tokens at least this fraction as likely as the likeliest one; 0 keeps all.
        repetition_penalty: above 0; divides positive and multiplies negative logits of tokens in prompt or
            output.
        presence_penalty: -2 to 2; taken off the logit of each token that the output contains.
        frequency_penalty: -2 to 2; taken off the logit for each time the output contains the token.
        logit_bias: token id (int or decimal string) -> -100 to 100, added to its logit.
        bad_words: token id sequences that the output may not complete; see `ddtree.engine.detokenizer.bad_word_ids` for
            strings.
        min_tokens: end-of-sequence and stop ids are ruled out, and stop strings ignored, before that many
            tokens.
        stop_token_ids: ids that end the sequence, besides the model's own.
        stop: a string or strings that end the sequence; kept as a tuple.
        include_stop: leave the stop string in the text.
        max_tokens: most tokens to generate.
        seed: 0 to 2**63 - 1, or None for a fresh one (`with_seed`).
        logprobs: None, or how many most likely tokens to report beside each chosen one, 0 to 1000.
        prompt_logprobs: the same of the prompt's tokens. The prompt is then processed whole, without the prefix
            cache.
        ignore_eos: the model's end-of-sequence ids do not end the sequence.
        skip_special_tokens: leave special tokens out of the text.
        processors: functions (prefix ids, logits float32 [V]) -> logits [V], applied in order. They must be
            pure functions: they run once for each node on the accepted path of a draft tree, and perhaps for a
            few nodes after the end of the answer.

    Raises:
        ConfigError: a field has a wrong type or is out of range; the message names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    max_tokens: int = 256
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            kept = _FOR_NONE[name] if value is None and name in _FOR_NONE else check(name, value)
            object.__setattr__(self, name, kept)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def processed(self) -> bool:
        """Return whether anything changes the logits before temperature and filters."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.processors
        )

    def with_seed(self) -> SamplingParams:
        """Return these parameters, with a fresh random seed where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ConfigError: names the field and the id.
    """
    named: Sequence[tuple[str, Iterable[int]]] = (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", (token for word in params.bad_words for token in word)),
    )
    for name, tokens in named:
        worst = max(tokens, default=0)
        if worst >= vocab_size:
            raise ConfigError(f"{name} names token {worst}, but the model's ids end at {vocab_size - 1}")
