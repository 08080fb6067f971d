"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes in one step: after a kill that is the old one or the new."""
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    os.replace(partial, path)
