"""Requests checked in vLLM's front end, so that what cannot be kept exact is a 400 and never reaches a worker."""

from __future__ import annotations

from typing import NoReturn

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from ddtree.errors import ConfigError
from ddtree.integrations.vllm import requests

_FIELDS: tuple[str, ...] = SamplingParams.__struct_fields__
_DEFAULTS = SamplingParams()


class Admission(LogitsProcessor):
    """Named as a logits processor of the engine, whose `validate_params` vLLM calls for each request.

    It processes nothing: the worker takes it off its model's config before the batch is built.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise VLLMValidationError for a request that asks for what drafting cannot keep exact."""
        wrong = requests.unsupported(sampling_params, _DEFAULTS, _FIELDS)
        if wrong is not None:
            raise VLLMValidationError(wrong[1], parameter=wrong[0])
        try:
            requests.sampling(sampling_params, requests.asked(sampling_params.extra_args))
        except ConfigError as error:
            message = str(error)
            field = requests.named_in(message, (*_FIELDS, "method", "budget", "depth"))
            raise VLLMValidationError(message, parameter=field) from error

    def __init__(self, *_: object) -> None:
        _never()

    def apply(self, logits: object) -> NoReturn:
        _never()

    def is_argmax_invariant(self) -> NoReturn:
        _never()

    def update_state(self, batch_update: object) -> NoReturn:
        _never()


def _never() -> NoReturn:
    raise NotImplementedError("requests are checked here, and nothing is processed")
