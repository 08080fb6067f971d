"""Files on the user's disk: the cache folder, and writes that are whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError


def cache_folder() -> Path:
    """Return the folder for what can be made or fetched again: `ddtree` in the platform's cache folder."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "ddtree"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ddtree" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ddtree"
    return Path.home() / ".cache" / "ddtree"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a new file to write; it becomes `path` in one step when the block ends without an exception.

    After a crash `path` is the old file or the new one, never a part. Several processes may write the same path at
    once: the last one to finish wins. The folder is made where it is missing.

    Raises:
        OSError: the folder cannot be made, or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)  # mkstemp leaves the file to its owner alone; a shared drafter must be readable
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, values: Any) -> None:
    """Write values to a file as indented JSON, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    try:
        with atomic_write(file) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{file} cannot be written ({why}): name another file or free the folder"
        ) from error
