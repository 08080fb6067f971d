"""What differs between the transformers releases of the supported range (>=5.17, <6), in one place."""

import inspect
from typing import Any

from torch import nn


def cache_argument(model: nn.Module) -> str:
    """Name of the keyword by which `model` takes its key/value cache.

    transformers renamed `past_key_values` to `cache` within 5.x; the old name still works with a warning in
    newer releases, so the signature decides and not the version. Decorated forwards hide the real parameters
    behind `**kwargs` in neither case, since both releases keep `__wrapped__`.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in a model output, under either name."""
    fields = output.keys()
    return output["cache"] if "cache" in fields else output["past_key_values"]
