"""Sampling parameters: fields, ranges and errors of a request's, and those that a model's own config sets."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor

from ddtree.errors import ConfigError, check_whole, is_whole
from ddtree.sampling.noise import MAX_SEED

Processor = Callable[[list[int], Tensor], Tensor]
"""Custom processor: (prefix token ids, logits float32 [V]) -> logits [V], a pure function."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow, and the noise no longer matters."""

MAX_TOKEN = 2**31 - 1
MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of the same name and meaning in `SamplingParams`."""
_UNSUPPORTED = (
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "top_h", "guidance_scale", "watermarking_config", "min_length", "min_new_tokens",
    "stop_strings", "num_beams", "penalty_alpha", "dola_layers",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {}, ())


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not is_whole(value):
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return check_whole(name, value, low, high)


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    # NaN is in no range, and whole numbers need not fit into a float.
    number: Any = value
    if not low <= number <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, not {value}")
    return float(number)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return value


def _token(name: str, value: Any) -> int:
    return _integer(f"a token id in {name}", value, 0, MAX_TOKEN)


def _listed(name: str, value: Any, what: str, check: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    """Return a list as a tuple, with each of its items checked."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of {what}, not {value!r}")
    return tuple(check(name, item) for item in value)


_token_ids = partial(_listed, what="token ids", check=_token)


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    def check(name: str, string: Any) -> str:
        if not isinstance(string, str):
            raise ConfigError(f"{name} must be a string or a list of strings, not {string!r}")
        if not string:
            raise ConfigError(f"{name} contains an empty string; leave it out")
        return string

    return _listed(name, [value] if isinstance(value, str) else value, "strings", check)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers, not {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON has only string keys, so OpenAI clients send "42".
        token = _token(name, int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key)
        if token in bias:
            raise ConfigError(f"{name} names token {token} twice")
        bias[token] = _real(f"{name} of token {token}", number, -100.0, 100.0)
    return bias


def _bad_word(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        raise ConfigError(
            f"{name} takes token ids, not {value!r}; convert it with ddtree.engine.detokenizer.bad_word_ids"
        )
    ids = _token_ids(name, value)
    if not ids:
        raise ConfigError(f"{name} contains an empty list; leave it out")
    return ids


def _processor(name: str, value: Any) -> Processor:
    if not callable(value):
        raise ConfigError(f"{name} must be functions (prefix ids, logits) -> logits, not {value!r}")
    return value


_bad_words = partial(_listed, what="token id lists", check=_bad_word)
_processors = partial(_listed, what="functions (prefix ids, logits) -> logits", check=_processor)
_REFUSED = object()


def _checked(check: Callable[..., Any], *bounds: float, none: Any = _REFUSED) -> dict[str, Any]:
    """Return the metadata of a field: its check, with bounds, and the value that None stands for."""

    def checked(name: str, value: Any) -> Any:
        return none if value is None and none is not _REFUSED else check(name, value, *bounds)

    return {"check": checked}


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
        seed: 0 to 2**63 - 1, or None or -1 for a fresh one (`with_seed`).
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

    temperature: float = field(default=1.0, metadata=_checked(_real, 0.0, 100.0))
    top_k: int = field(default=0, metadata=_checked(_integer, -1, MAX_TOKEN, none=0))
    top_p: float = field(default=1.0, metadata=_checked(_real, 0.0, 1.0))
    min_p: float = field(default=0.0, metadata=_checked(_real, 0.0, 1.0))
    repetition_penalty: float = field(default=1.0, metadata=_checked(_real, 1e-3, 1e3))
    presence_penalty: float = field(default=0.0, metadata=_checked(_real, -2.0, 2.0))
    frequency_penalty: float = field(default=0.0, metadata=_checked(_real, -2.0, 2.0))
    logit_bias: dict[int, float] = field(default_factory=dict, metadata=_checked(_logit_bias))
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=_checked(_bad_words, none=()))
    min_tokens: int = field(default=0, metadata=_checked(_integer, 0, MAX_TOKEN))
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_checked(_token_ids, none=()))
    stop: tuple[str, ...] = field(default=(), metadata=_checked(_stop_strings, none=()))
    include_stop: bool = field(default=False, metadata=_checked(_switch))
    max_tokens: int = field(default=256, metadata=_checked(_integer, 1, MAX_TOKEN))
    seed: int | None = field(default=None, metadata=_checked(_integer, -1, MAX_SEED - 1, none=None))
    logprobs: int | None = field(default=None, metadata=_checked(_integer, 0, 1000, none=None))
    prompt_logprobs: int | None = field(default=None, metadata=_checked(_integer, 0, 1000, none=None))
    ignore_eos: bool = field(default=False, metadata=_checked(_switch))
    skip_special_tokens: bool = field(default=True, metadata=_checked(_switch))
    processors: tuple[Processor, ...] = field(default=(), metadata=_checked(_processors, none=()))

    def __post_init__(self) -> None:
        for own in fields(self):
            object.__setattr__(self, own.name, own.metadata["check"](own.name, getattr(self, own.name)))
        object.__setattr__(self, "top_k", max(0, self.top_k))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
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


def read_generation_config(model: Any, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Read the sampling defaults of a transformers model's generation config.

    Args:
        model: has a `generation_config`, or None there.
        vocab_size: V; token ids from it on are out of range.

    Returns:
        Fields of `SamplingParams`: those of `MODEL_FIELDS`, `bad_words` (from `bad_words_ids` and `suppress_tokens`),
        `max_tokens` (from `max_new_tokens`); and a sentence for each setting that is ignored, because it is out of
        range or asks for what there is not.
    """
    config = getattr(model, "generation_config", None)
    given = config.to_diff_dict() if config is not None else {}
    single = given.get("suppress_tokens") or []
    single = [single] if isinstance(single, int) else single
    banned = [*(given.get("bad_words_ids") or []), *([token] for token in single)]
    known = [word for word in banned if all(0 <= token < vocab_size for token in word)]
    wanted: dict[str, tuple[str, Any]] = {
        **{name: (name, given.get(name)) for name in MODEL_FIELDS},
        "max_new_tokens": ("max_tokens", given.get("max_new_tokens")),
        "bad_words_ids or suppress_tokens": ("bad_words", known or None),
    }
    found: dict[str, Any] = {}
    ignored = []
    if len(known) < len(banned):
        ignored.append(
            f"some bad_words_ids or suppress_tokens of generation_config.json are beyond the {vocab_size} tokens"
        )
    for source, (name, value) in wanted.items():
        if value is None:
            continue
        try:
            checked = replace(SamplingParams(), **{name: value})
        except ConfigError as error:
            ignored.append(f"{source} of generation_config.json is ignored: {error}")
        else:
            found[name] = getattr(checked, name)
    for name in _UNSUPPORTED:
        value = given.get(name)
        if not any(value == neutral for neutral in _NEUTRAL):
            ignored.append(f"{name} of generation_config.json is ignored: ddtree has no such processing")
    return found, ignored
