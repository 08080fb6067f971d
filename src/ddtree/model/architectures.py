"""Facts about a transformers model: whether it verifies trees, its longest text, its end tokens, its cache's name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ddtree.errors import ConfigError, check_whole, is_whole

TREE_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers whose state is keys and values by token, so that rejected tokens can be cut off."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Names of the cache in calls and outputs, the newest first; the last two are those of recurrent models."""
_CONTEXT_NAMES = ("max_position_embeddings", "max_target_positions", "max_seq_len", "n_positions")
_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
UNLIMITED = 2**31 - 1
"""The context of a model that has no end."""


def why_no_tree(model: Any) -> str | None:
    """Return why draft trees cannot be verified on a `PreTrainedModel`, naming the layer type.

    None when its config does not tell; `Target` then runs the model to see.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if _has_soft_prompts(model):
        return f"{name} has soft prompts or other inputs that a wrapper adds"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{name} shares key/value caches between layers"
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - TREE_LAYERS:
        return f"{name} has {', '.join(sorted(kinds - TREE_LAYERS))} layers, whose state cannot be cut back"
    if getattr(model, "_is_stateful", False) and not kinds:
        return f"{name} keeps a recurrent state, which cannot be cut back"
    if not decoder_layers(model):
        return f"{name} keeps its decoder layers where they are not found"
    return None


def _has_soft_prompts(model: Any) -> bool:
    """Return whether a wrapper adds inputs, on itself (PEFT's prompt learning) or on the model that it holds."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    replaced = prepare is not None and getattr(prepare, "__self__", None) is not model
    return replaced or bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def decoder_layers(model: Any) -> Any:
    """Return a causal LM's decoder layers, first to last: the first list of modules that is as long as the config says.

    Empty where there is none.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    parts = (part for root in (model.get_decoder(), model) for part in root.modules())
    return next((part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count), [])


def context_limit(model: Any, wanted: int | None) -> int:
    """Return the most tokens of a sequence: the model's own limit (8,192, for example), or the one asked for.

    The limit is the config's, times the factor of "yarn" or "linear" angles where that is the length before them; a
    learned table of positions may end earlier. With "longrope" it is the length of the short factors: for
    longer texts transformers turns every position of a forward by other angles, also positions whose keys are cached,
    so that a token's logits would depend on the tokens beside it.

    Raises:
        ConfigError: `wanted` is no whole number, less than 2, or above the limit where positions do not extrapolate.
    """
    config = model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    own = next((size for size in sizes if is_whole(size) and size > 0), UNLIMITED)
    ropes, given = _ropes(config), own
    for rope in ropes:
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        # Where kinds of layers have angles of their own (Gemma 3), the config's length is that of all of them.
        left = given <= original if original else len(ropes) == 1
        if kind in ("yarn", "linear") and left:
            own = max(own, int(given * (rope.get("factor") or 1)))
        if kind == "longrope":
            own = min(own, original or getattr(config, "original_max_position_embeddings", None) or own)
    own = min(own, _learned_positions(model))
    if wanted is None:
        return own
    if check_whole("max_context", wanted, 2) > own and not extrapolates(config):
        raise ConfigError(f"max_context={wanted} is more than {own}, the model's own limit")
    return wanted


def extrapolates(config: Any) -> bool:
    """Return whether RoPE goes beyond the model's limit and changes nothing before it.

    Rotary angles that are fixed do. Learned positions end with their table; "dynamic" and "longrope" angles depend on
    the length of the text.
    """
    ropes = _ropes(config)
    return bool(ropes) and all(rope.get("rope_type") in _FIXED_ANGLES for rope in ropes)


def _learned_positions(model: Any) -> int:
    """Return how many positions a learned table has for text, where a model counts them from after its padding id."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return UNLIMITED
    left = [
        part.num_embeddings - part.padding_idx - 1
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding)
        and name.endswith("position_embeddings")
        and part.padding_idx is not None
    ]
    return min(left, default=UNLIMITED)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a text model: one set, or one for each kind of layer that has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: the generation config's, the config's and the tokenizer's.

    Raises:
        ConfigError: one of them names something else.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids = value if isinstance(value, list | tuple | set) else [value]
            if not all(isinstance(one, int) for one in ids):
                raise ConfigError(
                    f"eos_token_id={value!r} is no token id and no list of them: correct the config"
                )
            found.update(ids)
    return frozenset(found)


def input_device(model: Any) -> torch.device:
    """Return the device that a model takes ids on: its own, or for offloaded weights the one that runs them."""
    if model.device.type != "meta":
        return model.device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device("cpu" if device is None else device)


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
