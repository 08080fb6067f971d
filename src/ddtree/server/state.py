"""State that the handlers of all requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import HTTPConnection

from ddtree.server.config import HttpSettings
from ddtree.server.engine_thread import EngineThread
from ddtree.server.http import ApiError
from ddtree.server.schemas import sampling_defaults

T = TypeVar("T")


class AppState:
    """The engine's thread behind one application, and what its handlers need besides.

    Attributes:
        worker: makes the answers.
        sampling_defaults: fields of `SamplingParams` for requests that leave them out.
        created: Unix time at which the application was made, in seconds.
    """

    def __init__(self, worker: EngineThread, settings: HttpSettings) -> None:
        self.worker = worker
        self.sampling_defaults = (
            sampling_defaults(worker.model.target.model) if settings.model_sampling else {}
        )
        self.created = int(time.time())
        # One thread: long texts take a while, and not all tokenizers may be used by several.
        self._executor = ThreadPoolExecutor(1, "ddtree-encode")

    @staticmethod
    def of(connection: HTTPConnection) -> AppState:
        """Return the state of a request's application."""
        found = connection.app.state.ddtree
        assert isinstance(found, AppState)
        return found

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs beside the event loop; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request asks for another model."""
        if name not in (None, "", self.worker.name):
            message = f"the model {name!r} is not served here: ask for {self.worker.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
