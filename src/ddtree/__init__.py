"""Lossless draft-tree decoding for Hugging Face causal language models."""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from ddtree.errors import (
    CacheMemoryError,
    CheckpointError,
    ConfigError,
    DDTreeError,
    PromptError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from ddtree.api import Model, Piece, Result, Stream, load
    from ddtree.integrations.transformers import custom_generate
    from ddtree.sampling.params import SamplingParams

__version__ = _version("ddtree")

__all__ = [
    "CacheMemoryError",
    "CheckpointError",
    "ConfigError",
    "DDTreeError",
    "Model",
    "Piece",
    "PromptError",
    "Result",
    "SamplingParams",
    "Stream",
    "UnsupportedModelError",
    "__version__",
    "custom_generate",
    "load",
]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: they wait until something needs them.
    if name not in __all__:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    module = "ddtree.integrations.transformers" if name == "custom_generate" else "ddtree.api"
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
