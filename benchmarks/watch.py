"""Seconds inside some methods of models, timed from inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Watch:
    """Times methods.

    Attributes:
        seconds: inside all of them so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, *names: str) -> None:
        """Time these methods of an object from now on; none may call another."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - since

        return timed
