"""Which drafter is in use where: each keeps state of every row, so two users would spoil each other's."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

from ddtree.drafters import with_parts
from ddtree.errors import ConfigError

# A user holds its drafters, so that an id stays theirs for as long as the user is here.
_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = threading.Lock()


def claim(drafter: Any, user: object) -> None:
    """Note that `user`, which must hold `drafter`, is the one to use it, with the parts that it merges.

    Raises:
        ConfigError: it, or a part of it, is in use elsewhere.
    """
    parts = with_parts(drafter)
    with _lock:
        for part in parts:
            if _users.get(id(part), user) is not user:
                raise ConfigError(
                    f"the drafter {part.name!r} is in use by another model and keeps state of its rows: make one for "
                    "each model, or close the other first"
                )
        for part in parts:
            _users[id(part)] = user


def release(drafter: Any, user: object) -> None:
    """Let others use what `user` had claimed; nothing happens to what it had not."""
    with _lock:
        for part in with_parts(drafter):
            if _users.get(id(part)) is user:
                del _users[id(part)]
