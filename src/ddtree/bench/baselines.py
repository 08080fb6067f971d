"""transformers' own `generate` as it comes, on the same model object: plain, with prompt lookup, or assisted."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ddtree.bench.answers import Answer
from ddtree.drafters import parts_of
from ddtree.drafters.draft_model import DraftModel
from ddtree.errors import ConfigError
from ddtree.sampling import SamplingParams

NAMES = ("hf", "prompt-lookup", "assisted")
_LOOKUP_TOKENS = 10  # the value that transformers' documentation uses


class Baseline:
    """One kind of `generate`. The model runs with its own attention and without our hooks meanwhile.

    Args:
        name: one of `NAMES`.
        target: whose model it is.
        drafter: of the pair; `assisted` uses the draft model in it.

    Raises:
        ConfigError: the name is unknown, or there is no draft model to assist.
    """

    def __init__(self, name: str, target: Any, drafter: Any) -> None:
        if name not in NAMES:
            raise ConfigError(f"unknown baseline {name!r}: choose from {', '.join(NAMES)}")
        self.name = name
        self._target = target
        self._options: dict[str, Any] = {}
        if name == "prompt-lookup":
            self._options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if name == "assisted":
            model = next((part.model for part in parts_of(drafter) if isinstance(part, DraftModel)), None)
            if model is None:
                raise ConfigError("baseline 'assisted' needs a draft model: give --drafter draft:MODEL")
            self._options["assistant_model"] = model.model

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone, greedily or by sampling at a temperature without filters."""
        self._target.use_features(())
        torch.manual_seed(params.seed or 0)
        ids = torch.tensor([prompt], device=self._target.device)
        model, watch = self._target.model, _Watch(len(prompt))
        own, model.generation_config = model.generation_config, self._config(params)
        started = time.perf_counter()
        try:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **self._options)
            tokens = output[0, len(prompt) :].tolist()
            ended = time.perf_counter()
        finally:
            model.generation_config = own
        first = watch.first if watch.first is not None else ended
        return Answer(tokens, ended - started, first - started, comparable=params.greedy)

    def learnt(self) -> list[dict[str, Any]]:
        return []

    def _config(self, params: SamplingParams) -> GenerationConfig:
        ends = sorted(self._target.eos_ids)
        sampling = {} if params.greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            do_sample=not params.greedy,
            max_new_tokens=params.max_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **sampling,
        )


class _Watch:
    """A streamer that notes when the first token came; transformers gives it the prompt first."""

    def __init__(self, prompt_tokens: int) -> None:
        self.first: float | None = None
        self._prompt_given = False

    def put(self, value: Tensor) -> None:
        if self._prompt_given and self.first is None:
            self.first = time.perf_counter()
        self._prompt_given = True

    def end(self) -> None:
        """Nothing is kept back."""
