"""Reads a DFlash drafter's config.json, in the layouts that are published.

z-lab and SpecForge put a Qwen3 config at the top, with the drafter's own keys beside it or inside `dflash_config`;
speculators puts the Qwen3 config into `transformer_layer_config` and counts feature layers from 1. A setting that
changes the drafter's output and is not known here is refused by name: such a checkpoint would load, and the target
would then accept nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree.drafters.dflash.network import DFlashConfig
from ddtree.errors import CheckpointError, ConfigError, is_whole
from ddtree.sampling.noise import PLAIN, check_coupling

_DEFAULT_BLOCK = 16
_MOST_LAYERS = 256
_SLIDING, _FULL = "sliding_attention", "full_attention"
_NOT_DFLASH = "the drafters known here are DFlash's, with z-lab's, SpecForge's or speculators' config.json"
# The names of successors in their checkpoints: in `projector_type`, in the class name or in speculators' type.
_SUCCESSORS = {
    "domino": "Domino",
    "causal_v5": "Domino",
    "dspark": "DSpark",
    "dflash2": "DFlash2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "treeflash": "TreeFlash",
    "jetspec": "JetSpec",
    "mtp": "MTP",
}
HEAD_KINDS = {"Domino": "domino", "DSpark": "markov", "TreeFlash": "treeflash"}
"""Successors that are DFlash with a head known here, and the head's kind."""
# Settings of successors' heads, present in their configs only.
_SUCCESSOR_KEYS = {
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "selector_rank": "DFlash2",
    "conv_kernel_size": "DFlash2",
}
# The only values of settings whose others would need another network; Domino's slots may be shifted.
_ALLOWED = {
    "shift_label": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "quantization_config": False,
    "is_neox_style": True,
}


@dataclass(frozen=True)
class Layout:
    """The content of a config.json.

    Attributes:
        name: "z-lab" (SpecForge's is the same) or "speculators".
        config: the network's.
        draft_vocab_size: tokens of a reduced draft vocabulary; None for the target's.
        vocabulary_file: file in the same folder that lists them, in checkpoints written here.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) where none was fitted.
        correction: kind of the head that the drafter is trained with; None for DFlash itself.
    """

    name: str
    config: DFlashConfig
    draft_vocab_size: int | None
    vocabulary_file: str | None
    coupling: tuple[float, float]
    correction: str | None = None


def default_layer_ids(target_layers: int, features: int) -> tuple[int, ...]:
    """Return the published choice of feature layers, as (1, 9, 17, 25, 33) for 5 of 36 layers.

    Raises:
        CheckpointError: the target is too shallow for so many.
    """
    if features == 1:
        return (target_layers // 2,)
    ids = tuple(round(1 + i * (target_layers - 4) / (features - 1)) for i in range(features))
    if target_layers < 4 or len(set(ids)) < features:
        raise CheckpointError(
            f"{features} feature layers do not fit a target of {target_layers} layers: name them in target_layer_ids"
        )
    return ids


def parse(raw: dict[str, Any], heads: bool = False) -> Layout:
    """Read the content of a config.json.

    Args:
        raw: its content.
        heads: take DFlash with a head that is known here too, and say which in `Layout.correction`.

    Raises:
        CheckpointError: a key is missing or wrong, or the drafter is of a kind not known here; says which.
    """
    speculators = "transformer_layer_config" in raw or "speculators_model_type" in raw
    backbone = _table(raw, "transformer_layer_config") if speculators else raw
    own = {**raw, **{k: v for k, v in _table(raw, "dflash_config").items() if v is not None}}
    named, correction = _check_kind(raw, own, heads)
    layers = _whole(backbone, "num_hidden_layers", most=_MOST_LAYERS)
    query_heads = _whole(backbone, "num_attention_heads")
    key_heads = _whole(backbone, "num_key_value_heads", query_heads)
    hidden = _whole(backbone, "hidden_size")
    head_dim = _whole(backbone, "head_dim", hidden // query_heads)
    if query_heads % key_heads or head_dim % 2:
        raise CheckpointError(
            f"{query_heads} attention heads with {key_heads} key heads of size {head_dim} do not fit together: the key "
            "heads must divide the heads, and their size must be even"
        )
    vocab = _whole(backbone, "vocab_size")
    targets = None if own.get("num_target_layers") is None else _whole(own, "num_target_layers")
    block_size = _whole(own, "block_size", _DEFAULT_BLOCK, least=2)
    windows, causal = _attention(raw, backbone, own, layers)
    target_hidden = _whole(own, "target_hidden_size", hidden)
    if target_hidden != hidden:
        raise CheckpointError(
            f"target_hidden_size={target_hidden} is not hidden_size={hidden}: DFlash uses the target's embedding and "
            "head, so both must be the same"
        )
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=_whole(backbone, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        block_size=block_size,
        mask_token_id=_mask_token(own),
        target_layer_ids=_layer_ids(own, speculators, targets, layers),
        num_target_layers=targets,
        rms_norm_eps=_number(backbone, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(backbone),
        attention_bias=bool(backbone.get("attention_bias", False)),
        max_position_embeddings=_whole(backbone, "max_position_embeddings", 40960),
        windows=windows,
        causal=causal,
        sample_from_anchor=bool(own.get("sample_from_anchor", named == "DSpark") or own.get("shift_label")),
        input_embedding_scale=_number(own, "input_embedding_scale", 1.0),
        output_multiplier=_number(own, "output_multiplier", 1.0) * _number(own, "logit_scale", 1.0),
        final_logit_softcapping=_number(own, "final_logit_softcapping", 0.0) or None,
    )
    reduced = _whole(own, "draft_vocab_size", vocab)
    vocabulary = own.get("draft_vocabulary")
    if not isinstance(vocabulary, str | None):
        raise CheckpointError(f"draft_vocabulary={vocabulary!r} must name a file")
    return Layout(
        "speculators" if speculators else "z-lab",
        config,
        None if reduced == vocab else reduced,
        vocabulary,
        read_coupling(_table(own, "coupling")),
        correction,
    )


def read_coupling(table: dict[str, Any]) -> tuple[float, float]:
    """Return (beta, kappa) of a config's `coupling`; (0, 1) of an empty one.

    Raises:
        CheckpointError: they are no numbers, or out of range.
    """
    beta, kappa = _number(table, "beta", PLAIN[0]), _number(table, "kappa", PLAIN[1])
    try:
        check_coupling(beta, kappa)
    except ConfigError as error:
        raise CheckpointError(f"coupling {table!r} must have beta from 0 up and kappa above 0") from error
    return beta, kappa


def _check_kind(raw: dict[str, Any], own: dict[str, Any], heads: bool) -> tuple[str | None, str | None]:
    """Refuse what is no DFlash drafter, or one with parts that are not known here.

    Returns:
        The successor that the drafter says it is, and the kind of its head.
    """
    listed, projector = raw.get("architectures"), own.get("projector_type")
    names = [str(name) for name in (listed if isinstance(listed, list) else [listed])]
    kinds = [str(kind) for kind in (projector, raw.get("speculators_model_type"), *names) if kind]
    successors = [
        (successor, repr(kind))
        for kind in kinds
        for mark, successor in _SUCCESSORS.items()
        if mark in kind.lower().replace("-", "")
    ]
    named = successors[-1][0] if successors else None
    if projector not in (None, "", "dflash") and named is None:
        raise CheckpointError(f"projector_type {projector!r} is unknown: {_NOT_DFLASH}")
    successors += [(name, f"{key}={own[key]!r}") for key, name in _SUCCESSOR_KEYS.items() if own.get(key)]
    for successor, mark in successors:
        if not heads or successor not in HEAD_KINDS:
            raise CheckpointError(
                f"this is a {successor} drafter ({mark}), whose head is not supported: run as plain DFlash it would "
                "accept almost nothing; use a DFlash checkpoint"
            )
    correction = HEAD_KINDS[successors[-1][0]] if successors else None
    known = named is not None or any("dflash" in kind.lower() for kind in kinds)
    if not known and not raw.get("dflash_config"):
        raise CheckpointError(f"this is no DFlash drafter (architectures {names}): {_NOT_DFLASH}")
    _check_settings(raw, own, correction)
    return named, correction


def _check_settings(raw: dict[str, Any], own: dict[str, Any], correction: str | None) -> None:
    """Refuse settings that would need another network, or a form of the head, that is not known here."""
    backbone = raw.get("transformer_layer_config") or {}
    for key, allowed in _ALLOWED.items():
        value = own.get(key, backbone.get(key))
        refused = value is not None and bool(value) is not allowed
        if refused and (key, correction) != ("shift_label", "domino"):
            raise CheckpointError(f"{key}={value!r} is not supported: use a drafter trained without it")
    activation = backbone.get("hidden_act", raw.get("hidden_act", "silu"))
    if activation != "silu":
        raise CheckpointError(f"hidden_act={activation!r} is not supported: DFlash layers use silu")
    for kind, key, known, table in (
        ("markov", "markov_head_type", "vanilla", own),
        ("treeflash", "ar_approximation", "swiglu", {**own, **_table(own, "treeflash_config")}),
    ):
        form = table.get(key) or known
        if correction == kind and form != known:
            raise CheckpointError(f"{key}={form!r} is not supported: use a drafter with {key}={known!r}")


def _layer_ids(own: dict[str, Any], speculators: bool, targets: int | None, layers: int) -> tuple[int, ...]:
    key, shift = ("aux_hidden_state_layer_ids", 1) if speculators else ("target_layer_ids", 0)
    ids = own.get(key)
    if ids is None:
        if targets is None:
            raise CheckpointError(
                f"config.json has neither {key} nor num_target_layers: one of them is needed"
            )
        return default_layer_ids(targets, layers)
    if not isinstance(ids, list) or not ids or not all(is_whole(i) and i >= shift for i in ids):
        raise CheckpointError(f"{key}={ids!r} is not a list of layer numbers from {shift} up")
    shifted = tuple(i - shift for i in ids)
    if targets is not None and max(shifted) >= targets:
        raise CheckpointError(f"{key}={ids!r} names layers beyond the target's {targets} (num_target_layers)")
    return shifted


def _attention(
    raw: dict[str, Any], backbone: dict[str, Any], own: dict[str, Any], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return window and causality of each layer, each empty when no layer has one.

    Causality is decided by `is_causal`, `dflash_config.causal`, then by whether the layer slides (vLLM's order).
    """
    window, sliding = own.get("swa_window_size"), backbone.get("use_sliding_window")
    if window is None and sliding:
        window = backbone.get("sliding_window")
    kinds = backbone.get("layer_types")
    if kinds is None:
        full = _whole(backbone, "max_window_layers", layers, least=0) if sliding else layers
        kinds = [_FULL if i < full else _SLIDING for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in (_FULL, _SLIDING) for k in kinds):
        raise CheckpointError(
            f"layer_types={kinds!r} must name full_attention or sliding_attention for each of the {layers} layers"
        )
    causal = [kind == _SLIDING for kind in kinds]
    slides = [True] * layers if own.get("use_swa") and not any(causal) else causal
    if any(slides) and (not isinstance(window, int) or window < 1):
        raise CheckpointError(
            f"the drafter has sliding layers, but its window is {window!r}: give sliding_window"
        )
    explicit = [value for value in (raw.get("is_causal"), own.get("causal")) if value is not None]
    if explicit or raw.get("sliding_window_non_causal"):
        causal = [bool(explicit and explicit[0])] * layers
    windows = tuple(window if slide else None for slide in slides) if any(slides) else ()
    return windows, tuple(causal) if any(causal) else ()


def _rope_theta(backbone: dict[str, Any]) -> float:
    """Return the base of the rotary positions, from either spelling; refuse all but plain rotary positions."""
    parameters, scaling = _table(backbone, "rope_parameters"), _table(backbone, "rope_scaling")
    for table in (parameters, scaling):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"RoPE scaling {kind!r} is not supported: use a drafter with default RoPE")
        if any(isinstance(value, dict) for value in table.values()):
            raise CheckpointError(
                "RoPE that differs between layers is not supported: use a drafter with one RoPE"
            )
        if table.get("mrope_section"):
            raise CheckpointError("multimodal RoPE (mrope_section) is not supported: use a text drafter")
    partial = parameters.get("partial_rotary_factor", backbone.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor={partial!r} is not supported: use a drafter with full RoPE"
        )
    theta = _number({**backbone, **parameters}, "rope_theta", 0.0)
    if theta <= 0:
        raise CheckpointError("config.json has no rope_theta, at the top or in rope_parameters: add it")
    return theta


def _mask_token(own: dict[str, Any]) -> int:
    if own.get("mask_token_id") is None:
        raise CheckpointError("config.json has no mask_token_id, at the top or in dflash_config: add it")
    return _whole(own, "mask_token_id", least=0)


def _table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key}={value!r} must be a table of settings")
    return value


def _whole(
    raw: dict[str, Any], key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json has no {key}: add it")
        return default
    if not is_whole(value) or value < least:
        raise CheckpointError(f"{key}={value!r} must be a whole number from {least} up")
    if value > most:
        raise CheckpointError(f"{key}={value!r} is beyond {most}: config.json is damaged")
    return value


def _number(raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key}={value!r} must be a number")
    return float(value)
