"""All that differs between the transformers releases of the supported range (>=5.17, <6)."""

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, MappingProxyType
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

_F = TypeVar("_F", bound=Callable[..., Any])
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


def dropped_argument(name: str) -> Any:
    """Return an argument of the `generate` call that runs our `custom_generate`, from its frame; None without one.

    transformers does not forward `streamer` to a callable `custom_generate`, in any release of the range: it goes
    through the documented signature, is fed the prompt, and is then lost.
    """
    frame = _caller(_GENERATE)
    return None if frame is None else frame.f_locals.get(name)


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


class _TokenizerSignature(inspect.Signature):
    """A signature that gives the tokenizer back to `generate` when it asks for the callable's parameters.

    transformers removes `tokenizer` from its arguments before it looks which of them the callable names, in any
    release of the range, so that its own stop strings would lack it. It reads nothing else of the callable before.
    """

    __slots__ = ()

    @property
    def parameters(self) -> MappingProxyType[str, inspect.Parameter]:
        """Return the callable's parameters; put the tokenizer back first where `generate` asks for them."""
        frame = _caller(_TAKE_ARGUMENTS)
        if frame is not None:
            taken = frame.f_locals.get("generation_mode_kwargs", {}).get("tokenizer")
            if taken is not None:
                frame.f_locals["kwargs"].setdefault("tokenizer", taken)
        return super().parameters


def takes_tokenizer(function: _F) -> _F:
    """Decorate a `custom_generate` that has a `tokenizer` parameter, so that transformers' stop strings have it too."""
    own = inspect.signature(function)
    function.__signature__ = _TokenizerSignature(  # type: ignore[attr-defined]
        list(own.parameters.values()), return_annotation=own.return_annotation
    )
    return function


def _caller(code: CodeType | None) -> FrameType | None:
    """Return the nearest frame around this one that runs `code`; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


_TAKE_ARGUMENTS = getattr(getattr(GenerationMixin, "_extract_generation_mode_kwargs", None), "__code__", None)
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
