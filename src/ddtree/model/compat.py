"""Bridge the differences of transformers releases in models and checkpoints (>=5.17, <6)."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Names of the cache in calls and outputs, the newest first; the last two are those of recurrent models."""


def cache_argument(model: nn.Module) -> str:
    """Return the name of the keyword by which `model` takes its cache.

    transformers renamed `past_key_values` to `cache` within 5.x; the old name still works with a warning in
    newer releases, so the signature decides and not the version. Decorated forwards hide the real parameters
    behind `**kwargs` in neither case, since both releases keep `__wrapped__`.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


def cache_of(output: Any) -> Any:
    """Return the cache in a model output, under any of its names; None where it has none."""
    fields = output.keys()
    return next((output[name] for name in CACHE_NAMES if name in fields), None)


def places_in_model(model: Any) -> Callable[[str], tuple[set[str], bool]]:
    """Return a function that says where a checkpoint's tensors go when transformers loads them into a model.

    The function takes a tensor's name in the file. It returns its names in the model, and False where the tensor is
    split or joined with others on its way.

    Args:
        model: a `PreTrainedModel`.
    """
    needed = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def places(key: str) -> tuple[set[str], bool]:
        """Return the names in the model of a tensor of the file, and whether it goes there whole."""
        if key in needed:
            return {key}, True
        name, source = rename_source_key(key, renamings, converters, model.base_model_prefix, needed)
        if source is None:
            return {name}, True
        parts = [converter.target_patterns for converter in converters if source in converter.source_patterns]
        return {name} | {name.replace(part[0], other) for part in parts for other in part}, False

    return places
