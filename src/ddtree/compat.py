"""What differs between the transformers releases of the supported range (>=5.17, <6), in one place."""

import inspect
import sys
from types import FrameType
from typing import Any

from torch import nn
from transformers import GenerationMixin

# The newest first; the last two are those of recurrent models.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_argument(model: nn.Module) -> str:
    """Name of the keyword by which `model` takes its cache.

    transformers renamed `past_key_values` to `cache` within 5.x; the old name still works with a warning in
    newer releases, so the signature decides and not the version. Decorated forwards hide the real parameters
    behind `**kwargs` in neither case, since both releases keep `__wrapped__`.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


def cache_of(output: Any) -> Any:
    """The cache in a model output, under any of its names; None where it has none."""
    fields = output.keys()
    return next((output[name] for name in CACHE_NAMES if name in fields), None)


def dropped_argument(name: str) -> Any:
    """An argument of the `generate` call that runs our `custom_generate`, read from its frame; None without one.

    transformers does not forward `streamer` to a callable `custom_generate`, in any release of the range: it goes
    through the documented signature, is fed the prompt, and is then lost.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
