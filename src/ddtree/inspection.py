"""Inspection: describes checkpoints, and checks whether a drafter fits a target, without loading their weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ddtree.drafters import loading
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.checkpoint import DFlashCheckpoint
from ddtree.drafters.dflash.head_checkpoint import is_head
from ddtree.drafters.dflash.heads import Head
from ddtree.drafters.draft_model import check_vocabulary
from ddtree.drafters.ngram_table import NgramTable
from ddtree.errors import CheckpointError, ConfigError, DDTreeError, first_line
from ddtree.model import pretrained
from ddtree.model.architectures import UNLIMITED, context_limit, eos_ids, why_no_tree
from ddtree.model.demo import NAME as DEMO
from ddtree.model.packed_weights import packed_bytes
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN

Facts = list[tuple[str, str]]
"""Lines to show: label and value."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

# What safetensors and torch raise for a file that is cut short or altered.
_DAMAGE = (SafetensorError, OSError, RuntimeError, EOFError, ValueError, AttributeError, UnpicklingError)
_AGAIN = "download the checkpoint again"
_WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass
class TargetFacts:
    """A target as its files without the weights describe it; a drafter is checked against it.

    Attributes:
        name: as given.
        no_tree: why draft trees cannot be verified on it; None when they can.
        facts: lines to show.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_ids: frozenset[int]
    embed: nn.Module = field(repr=False)
    tokenizer: Any = field(repr=False)
    no_tree: str | None
    facts: Facts


@dataclass
class DrafterFacts:
    """A drafter's parts, read and checked by themselves.

    Attributes:
        name: as given.
        facts: lines to show.
        network: of a DFlash checkpoint.
        table: n-grams.
        draft_model: of "draft:NAME".
    """

    name: str
    facts: Facts
    network: DFlashCheckpoint | None = None
    table: NgramTable | None = None
    draft_model: TargetFacts | None = None


@dataclass
class InspectionReport:
    """A target, a drafter, or both, with the verdict on the pair.

    Attributes:
        incompatibilities: why the pair does not fit; empty for a pair that fits, None where there is no pair.
    """

    target: TargetFacts | None = None
    drafter: DrafterFacts | None = None
    incompatibilities: list[str] | None = None

    def __str__(self) -> str:
        lines: list[str] = []
        for title, part in (("target", self.target), ("drafter", self.drafter)):
            if part is not None:
                lines.append(f"{title} {part.name}")
                lines += [f"  {label:<12} {value}" for label, value in part.facts]
        if self.incompatibilities is not None and self.target is not None and self.drafter is not None:
            verdict = "does not fit" if self.incompatibilities else "fits"
            lines.append(f"{self.drafter.name} {verdict} {self.target.name}")
            lines += [f"  - {reason}" for reason in self.incompatibilities]
        return "\n".join(lines)


def inspect(name: str, *, target: str | None = None, drafter: str | None = None) -> InspectionReport:
    """Describe a checkpoint, or a pair when the other half is named.

    Args:
        name: a target ("demo", folder, hub id) or a drafter (folder, hub id, "draft:NAME", "lookup"). "demo" is the
            drafter when `target` is given.
        target: the target, when `name` is a drafter.
        drafter: the drafter, when `name` is a target.

    Raises:
        CheckpointError: a checkpoint is missing or damaged.
        UnsupportedModelError: the target is no causal LM.
        ConfigError: both halves are the same kind.
    """
    if target is not None and drafter is not None:
        raise ConfigError("name one half and the other: a target and its drafter, not three")
    if target is not None or (drafter is None and is_drafter(name)):
        drafter = name
    else:
        target = name
    if target is not None and is_drafter(target):
        raise ConfigError(f"{target} is a drafter: name the target it is for")
    one = None if target is None else read_target(target)
    other = None if drafter is None else read_drafter(drafter)
    return InspectionReport(one, other, _incompatibilities(one, other) if one and other else None)


def is_drafter(name: str) -> bool:
    """Return whether a name is that of a drafter rather than a target."""
    if name == DEMO:
        return False
    if name == "lookup" or name.startswith((loading.DRAFT_MODEL, f"{DEMO}/")):
        return True
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return False
    network, table = loading.contents(folder)
    if network is None:
        return table is not None
    if is_head(network) or network != folder or table is not None:
        return True
    raw = checkpoint.read_json(folder / "config.json")
    kinds = [str(kind) for kind in raw.get("architectures") or []]
    marked = any(key in raw for key in ("dflash_config", "speculators_model_type", "speculators_config"))
    return marked or any("DFlash" in kind or "Draft" in kind for kind in kinds)


def read_target(name: str) -> TargetFacts:
    """Describe a target. Raises the errors of `read_config`, and CheckpointError for a bad model or weights."""
    config = pretrained.read_config(name)
    tokenizer = pretrained.read_tokenizer(name)
    place = pretrained.locate(name)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError, ImportError, AttributeError) as error:
        raise CheckpointError(f"the model of {name} cannot be built ({first_line(error)})") from error
    try:
        model.generation_config = GenerationConfig.from_pretrained(place)
    except (OSError, ValueError):
        model.generation_config = GenerationConfig.from_model_config(config)
    text = config.get_text_config()
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    layers = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    vocabulary = model.get_output_embeddings().weight.shape[0]
    template = "with" if getattr(tokenizer, "chat_template", None) else "no"
    words = "" if tokenizer is None else f"{len(tokenizer)} tokens, {template} chat template"
    reason, context = why_no_tree(model), context_limit(model, None)
    facts = [("folder", place)] if Path(place).is_dir() and place != name else []
    facts += [
        ("model", f"{type(model).__name__}, {size:,.1f} M parameters"),
        ("layers", f"{layers}; hidden size {text.hidden_size}, vocabulary {vocabulary}"),
        ("context", f"{'unlimited' if context == UNLIMITED else context} tokens"),
        ("weights", _weights(name, place, config, model)),
        ("tokenizer", words or "none: prompts are token ids"),
        ("packed", f"{packed_bytes(model) / 1e6:,.1f} MB more in 16 bits on a CPU, unless --no-pack-weights"),
        ("draft trees", f"no: {reason}; decoded autoregressively" if reason else "can be verified"),
    ]
    return TargetFacts(
        name=name,
        vocab_size=vocabulary,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        eos_ids=eos_ids(model, tokenizer),
        embed=model.get_input_embeddings(),
        tokenizer=tokenizer,
        no_tree=reason,
        facts=facts,
    )


def read_drafter(name: str) -> DrafterFacts:
    """Describe a drafter. Raises CheckpointError."""
    if name == "lookup":
        return DrafterFacts(name, [("kind", "prompt lookup: n-grams of the text so far, no model")])
    if name.startswith(loading.DRAFT_MODEL):
        model = read_target(name.removeprefix(loading.DRAFT_MODEL))
        return DrafterFacts(name, [("kind", "draft model"), *model.facts], draft_model=model)
    network, table = loading.contents(loading.find(name))
    found = DrafterFacts(name, [])
    if network is not None:
        loading.refuse_language_model(name, network)
        found.network = checkpoint.read_part(network, partial(checkpoint.read, heads=True))
        found.facts += _network(found.network, found.network.layout.coupling, found.network.correction)
    if table is not None:
        found.table = NgramTable.load(table)
        grams = f"{found.table.contexts} contexts of up to {found.table.max_order} tokens"
        size = table.stat().st_size / 1e6
        found.facts.append(("n-grams", f"{grams}, {size:.1f} MB; {_coupling(found.table.coupling)}"))
    if not found.facts:
        raise CheckpointError(
            f"{name} holds no drafter (no config.json, no {loading.TABLE}): name a drafter's folder"
        )
    return found


def _network(found: DFlashCheckpoint, coupling: tuple[float, float], head: Head | None) -> Facts:
    config = found.config
    words = "all" if found.draft_ids is None else f"{len(found.draft_ids)} of"
    own = [part for part in ("head", "embedding") if getattr(found, part) is not None]
    source = f"{' and '.join(own)} of its own" if own else "head of the target"
    layers = ", ".join(map(str, config.target_layer_ids))
    of = config.num_target_layers or "an unknown number"
    facts = [
        ("kind", f"DFlash, {found.layout.name}'s layout"),
        ("network", f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"),
        ("block", f"{config.block_size} slots, drafts up to {config.depth} tokens ahead"),
        ("features", f"outputs of target layers {layers} of {of}"),
        ("vocabulary", f"{words} {config.vocab_size} tokens; mask token {config.mask_token_id}; {source}"),
        ("noise", _coupling(coupling)),
    ]
    if head is not None:
        weights = sum(parameter.numel() for parameter in head.parameters()) / 1e6
        settings = ", ".join(f"{key} {value}" for key, value in head.config().items() if value is not None)
        facts.insert(-1, ("head", f"{head.kind}, {weights:,.2f} M parameters ({settings})"))
    return facts


def _coupling(fitted: tuple[float, float]) -> str:
    beta, kappa = fitted
    return "coupling not fitted" if fitted == PLAIN else f"coupling beta {beta:g}, kappa {kappa:g}"


def _incompatibilities(target: TargetFacts, drafter: DrafterFacts) -> list[str]:
    found = [f"{target.no_tree}: draft trees cannot be verified on the target"] if target.no_tree else []
    if drafter.network is not None:
        found += checkpoint.incompatibilities(drafter.network, target)
    if drafter.table is not None and drafter.table.vocab_size > target.vocab_size:
        largest = drafter.table.vocab_size - 1
        found.append(
            f"the n-gram table holds token id {largest}, and the target has {target.vocab_size} tokens"
        )
    if drafter.draft_model is not None:
        if drafter.draft_model.no_tree:
            found.append(f"{drafter.draft_model.no_tree}: draft trees cannot be grown with the draft model")
        try:
            check_vocabulary(cast(Target, drafter.draft_model), cast(Target, target))
        except DDTreeError as error:
            found.append(str(error))
    return found


def _weights(name: str, place: str, config: Any, model: Any) -> str:
    dtype = str(getattr(config, "dtype", None) or "unknown dtype").removeprefix("torch.")
    folder = Path(place)
    if not folder.is_dir():
        return f"{dtype}, not looked at on the hub"
    files = _weight_files(name, folder)
    found = {key: shape for file in files for key, shape in _read_shapes(file).items()}
    # Quantized tensors have names and shapes of their quantizer's.
    if getattr(config, "quantization_config", None) is None:
        _check_weights(name, model, found)
    return f"{dtype}, {sum(file.stat().st_size for file in files) / 1e6:,.1f} MB"


def _weight_files(name: str, folder: Path) -> list[Path]:
    """Return the files that transformers would load. Raises CheckpointError when one is missing."""
    first = next((folder / file for file in _WEIGHT_FILES if (folder / file).exists()), None)
    if first is None:
        raise CheckpointError(f"{name} has no weights (model.safetensors): {_AGAIN}")
    if first.suffix != ".json":
        return [first]
    try:
        files = sorted({folder / str(file) for file in json.loads(first.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} is damaged ({type(error).__name__}): {_AGAIN}") from error
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing, and {first.name} names it: {_AGAIN}")
    return files


def _read_shapes(file: Path) -> Shapes:
    """Return names and shapes of a file's tensors, without values. Raises CheckpointError for a damaged file."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in found.items()}
    except _DAMAGE as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)}): {_AGAIN}") from error


def _check_weights(name: str, model: Any, found: Shapes) -> None:
    """Compare the shapes in a checkpoint with those that a model without values needs.

    Raises:
        CheckpointError: tensors are missing or have another shape; the message names the first of them.
    """
    needed = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    places_of = _places_in_model(model)
    there: set[str] = set()
    for key, shape in found.items():
        places, whole = places_of(key)
        there |= places
        # What is cut or joined on the way has a shape of its own in the file.
        other = next((needed[place] for place in places if whole and needed.get(place, shape) != shape), None)
        if other is not None:
            raise CheckpointError(
                f"{name} is damaged: {key} has shape {list(shape)}, and by config.json {list(other)}: {_AGAIN}"
            )
    # A tied tensor is there where the one it is tied to is, or another that is tied to that one.
    source_of = model.all_tied_weights_keys
    sources = {source_of.get(key, key) for key in there}
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = sorted(
        key
        for key in needed.keys() - there
        if source_of.get(key, key) not in sources and not any(re.search(pattern, key) for pattern in optional)
    )
    if missing:
        raise CheckpointError(
            f"{name} is incomplete: {len(missing)} tensors are missing ({missing[0]}, ...): {_AGAIN}"
        )


def _places_in_model(model: Any) -> Callable[[str], tuple[set[str], bool]]:
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
