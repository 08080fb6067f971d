"""Sampling defaults of a model: what its generation_config.json asks for, and what of it cannot be done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of the same name and meaning in `SamplingParams`."""
_UNSUPPORTED = (
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "top_h", "guidance_scale", "watermarking_config", "min_length", "min_new_tokens",
    "stop_strings", "num_beams", "penalty_alpha", "dola_layers",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {}, ())


def read_generation_config(model: Any, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Read the sampling defaults of a transformers model's generation config.

    Args:
        model: has a `generation_config`, or None there.
        vocab_size: V; token ids from it on are out of range.

    Returns:
        Fields of `SamplingParams`: those of `SAMPLING`, `bad_words` (from `bad_words_ids` and `suppress_tokens`) and
        `max_tokens` (from `max_new_tokens`); and a sentence for each setting that is ignored, because it is out of
        range or asks for what there is not.
    """
    config = getattr(model, "generation_config", None)
    given = config.to_diff_dict() if config is not None else {}
    banned = [*(given.get("bad_words_ids") or []), *([token] for token in given.get("suppress_tokens") or [])]
    wanted: dict[str, tuple[str, Any]] = {
        **{name: (name, given.get(name)) for name in SAMPLING},
        "max_new_tokens": ("max_tokens", given.get("max_new_tokens")),
        "bad_words_ids or suppress_tokens": ("bad_words", banned or None),
    }
    fields: dict[str, Any] = {}
    ignored = []
    for source, (name, value) in wanted.items():
        if value is None:
            continue
        try:
            checked = replace(SamplingParams(), **{name: value})
            if any(token >= vocab_size for word in checked.bad_words for token in word):
                raise ConfigError(f"bad_words names a token beyond the model's {vocab_size}")
        except ConfigError as error:
            ignored.append(f"{source} of generation_config.json is ignored: {error}")
        else:
            fields[name] = getattr(checked, name)
    for name in _UNSUPPORTED:
        value = given.get(name)
        if not any(value == neutral for neutral in _NEUTRAL):
            ignored.append(f"{name} of generation_config.json is ignored: ddtree has no such processing")
    return fields, ignored
