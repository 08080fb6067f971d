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

# torch and transformers take seconds to import: they wait until something needs them.
_LATER = {
    "Model": "ddtree.api",
    "Piece": "ddtree.api",
    "Result": "ddtree.api",
    "SamplingParams": "ddtree.sampling.params",
    "Stream": "ddtree.api",
    "custom_generate": "ddtree.integrations.transformers",
    "load": "ddtree.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
