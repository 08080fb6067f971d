"""What the handlers of requests share: the service, the settings, the model's tokenizer, and a thread to encode in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import HTTPConnection

from ddtree.server.http import ApiError
from ddtree.server.parameters import sampling_defaults
from ddtree.server.worker import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How the HTTP side behaves.

    Attributes:
        api_keys: one of these must be sent as bearer token; none are needed when it is empty.
        cors_origins: origins whose pages may call; none by default.
        hosts: the only names a request may call the server by, without ports; None for any.
        model_sampling: fields of sampling that a request leaves out follow the model's generation_config.json.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    model_sampling: bool = True


class Serving:
    """One service behind HTTP.

    Attributes:
        service: decodes.
        settings: see `Settings`.
        tokens: texts of single tokens.
        defaults: fields of `SamplingParams` that requests begin with.
        created: when, in seconds of Unix time.
    """

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.settings = settings
        self.tokens = service.texts
        self.defaults = sampling_defaults(service.model.target.model) if settings.model_sampling else {}
        self.created = int(time.time())
        # One thread, as long texts take a while and tokenizers are not safe in all of several.
        self._encoder = ThreadPoolExecutor(1, "ddtree-encode")

    @staticmethod
    def of(connection: HTTPConnection) -> Serving:
        found = connection.app.state.serving
        assert isinstance(found, Serving)
        return found

    async def away(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs beside the event loop; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError when another model was asked for."""
        if name not in (None, "", self.service.name):
            raise ApiError(
                404,
                f"the model {name!r} is not served here: ask for {self.service.name!r}",
                param="model",
                code="model_not_found",
            )
