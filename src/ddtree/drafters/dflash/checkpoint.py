"""DFlash checkpoints on disk: read in the published layouts, checked against a target, written in z-lab's.

Reading knows no target: what a folder says is checked for its own sense first, and `misfits` then names every reason
why it does not fit a target. Nothing is guessed, since a drafter that loads wrongly does not fail, it only never
gets a token accepted.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ddtree.drafters.dflash import files as public
from ddtree.drafters.dflash.config_formats import Layout, parse
from ddtree.drafters.dflash.files import REMEDY, locate, read_json, read_tensors, write
from ddtree.drafters.dflash.files import misfits as head_misfits
from ddtree.drafters.dflash.heads import Head
from ddtree.drafters.dflash.network import DFlashConfig, DFlashNet, named_shapes
from ddtree.errors import CheckpointError

__all__ = ["DFlashCheckpoint", "FittedTarget", "check", "locate", "misfits", "read", "write"]

_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
_PREFIXES = ("model.", "draft_model.")
# Copies of the target's tensors and maps that follow from others.
_IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
_HEADS = {
    "prefix_gru": "Domino",
    "embed_proj": "Domino",
    "logit_head": "Domino",
    "markov": "DSpark",
    "confidence": "DSpark",
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
}


class FittedTarget(Protocol):
    """What a pair is checked by; `ddtree.target.Target` has it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_ids: frozenset[int]
    embed: nn.Module
    tokenizer: Any


@dataclass
class DFlashCheckpoint:
    """A DFlash drafter as read from a folder.

    Attributes:
        folder: where it came from.
        layout: what its config.json says.
        tensors: the network's, by the names of `DFlashNet`.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary; None for the whole.
        head: own head weights [Vd or V, H]; None for the target's.
        embedding: own input embedding [V, H]; None for the target's.
        mask_embedding: own embedding [H] of the masked slots; None for the mask token's.
        correction: the head that it is trained with, where it has one; without it, it would accept almost nothing.
    """

    folder: Path
    layout: Layout
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None = None
    head: Tensor | None = None
    embedding: Tensor | None = None
    mask_embedding: Tensor | None = None
    correction: Head | None = None

    @property
    def config(self) -> DFlashConfig:
        return self.layout.config

    def network(self) -> DFlashNet:
        """The network with the checkpoint's tensors."""
        with torch.device("meta"):
            network = DFlashNet(self.config)
        network.load_state_dict(self.tensors, assign=True)
        return network


def read(name: str | os.PathLike[str], heads: bool = False) -> DFlashCheckpoint:
    """Read a DFlash drafter from a folder or a hub id.

    Args:
        name: the folder or hub id.
        heads: take a successor too that is DFlash with a head known here: Domino, DSpark's plain form, TreeFlash.

    Raises:
        CheckpointError: files are missing or damaged, the drafter is of another kind, or its parts do not fit
            together; the message names the folder and the part.
    """
    folder = locate(name)
    try:
        raw = read_json(folder / "config.json")
        layout = parse(raw, heads)
        tensors = _canonical(read_tensors(folder), layout.config)
        correction = None
        if layout.correction is not None:
            correction = public.read(layout.correction, raw, tensors)
            tensors = {name: tensor for name, tensor in tensors.items() if not public.belongs(name)}
        extra = {key: tensors.pop(key, None) for key in ("d2t", "lm_head.weight", "embed_tokens.weight")}
        _check_tensors(tensors, layout.config)
        draft_ids = _draft_ids(folder, layout, extra["d2t"])
        checkpoint = DFlashCheckpoint(
            folder,
            layout,
            tensors,
            draft_ids,
            extra["lm_head.weight"],
            extra["embed_tokens.weight"],
            _mask_embedding(folder, layout.config),
            correction,
        )
        _check_own(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error.__cause__
    return checkpoint


def misfits(checkpoint: DFlashCheckpoint, target: FittedTarget) -> list[str]:
    """Every reason why a drafter does not fit a target; empty when it does."""
    config, found = checkpoint.config, []
    if config.hidden_size != target.hidden_size:
        found.append(
            f"hidden size {config.hidden_size} is not the target's {target.hidden_size}, its features' and head's"
        )
    if config.num_target_layers not in (None, target.num_layers):
        found.append(
            f"it was made for a target of {config.num_target_layers} layers, this one has {target.num_layers}"
        )
    beyond = [i for i in config.target_layer_ids if i >= target.num_layers]
    if beyond:
        found.append(f"feature layers {beyond} are beyond the target's layers 0..{target.num_layers - 1}")
    if config.vocab_size != target.vocab_size:
        found.append(f"vocabulary of {config.vocab_size} tokens is not the target's {target.vocab_size}")
    mask, rows = config.mask_token_id, cast(Tensor, target.embed.weight).shape[0]
    if mask >= rows:
        found.append(f"mask token {mask} is outside the target's embedding of {rows} rows")
    if mask in target.eos_ids:
        found.append(f"mask token {mask} is an end-of-sequence token of the target")
    if mask == getattr(target.tokenizer, "pad_token_id", None):
        found.append(f"mask token {mask} is the target's padding token")
    return found


def check(checkpoint: DFlashCheckpoint, target: FittedTarget) -> None:
    """Raise CheckpointError, with all reasons, unless a drafter fits a target."""
    found = misfits(checkpoint, target)
    if found:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit the target: {'; '.join(found)}. Name a drafter made for this target"
        )


def _canonical(tensors: dict[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Tensors by `DFlashNet`'s names; fused projections are taken apart."""
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if not name.startswith(_IGNORED):
            named.update(_unfused(name, tensor, config))
    return named


def _unfused(name: str, tensor: Tensor, config: DFlashConfig) -> Iterable[tuple[str, Tensor]]:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        ".qkv_proj.": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        ".gate_up_proj.": (("gate_proj", inner), ("up_proj", inner)),
    }
    for mark, parts in fused.items():
        if mark in name and tensor.shape[0] == sum(size for _, size in parts):
            pieces = tensor.split([size for _, size in parts])
            return [
                (name.replace(mark, f".{part}."), piece)
                for (part, _), piece in zip(parts, pieces, strict=True)
            ]
    return [(name, tensor)]


def _check_tensors(tensors: dict[str, Tensor], config: DFlashConfig) -> None:
    wanted = dict(named_shapes(config))
    unknown = sorted(set(tensors) - set(wanted))
    for name in unknown:
        for mark, head in _HEADS.items():
            if mark in name:
                raise CheckpointError(
                    f"tensor {name} belongs to a {head} head, which is not supported: run as plain DFlash the drafter "
                    "would accept almost nothing; use a DFlash checkpoint"
                )
    missing = sorted(set(wanted) - set(tensors))
    if unknown or missing:
        faults = [f"unknown tensors {_few(unknown)}"] * bool(unknown)
        faults += [f"missing tensors {_few(missing)}"] * bool(missing)
        raise CheckpointError(f"{' and '.join(faults)}: this is no complete DFlash checkpoint; {REMEDY}")
    width = tensors["fc.weight"].shape
    if tuple(width) != wanted["fc.weight"]:
        features, hidden = len(config.target_layer_ids), config.hidden_size
        raise CheckpointError(
            f"fc.weight is {list(width)}, but {features} feature layers of hidden size {hidden} need "
            f"[{hidden}, {features * hidden}]: config.json and weights do not belong together; {REMEDY}"
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} is {list(tensors[name].shape)}, not {list(shape)} as config.json says; {REMEDY}"
            )
        if not tensors[name].is_floating_point():
            raise CheckpointError(
                f"tensor {name} is {tensors[name].dtype}: quantized drafters are not supported"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _draft_ids(folder: Path, layout: Layout, offsets: Tensor | None) -> Tensor | None:
    """The draft vocabulary: our file lists it; `d2t` holds, for each draft token, how far its target token is off."""
    vocab = layout.config.vocab_size
    if layout.vocabulary_file is not None:
        listed = read_json(folder / Path(layout.vocabulary_file).name, table=False)
        if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
            raise CheckpointError(f"{layout.vocabulary_file} is damaged (no list of token ids): {REMEDY}")
        ids = torch.tensor(listed, dtype=torch.int64)
    elif offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.long()
    elif layout.draft_vocab_size is None:
        return None
    else:
        raise CheckpointError(
            f"draft_vocab_size={layout.draft_vocab_size} differs from vocab_size={vocab}, but there is no d2t tensor "
            f"that says which tokens these are; {REMEDY}"
        )
    if layout.draft_vocab_size not in (None, len(ids)):
        raise CheckpointError(
            f"d2t has {len(ids)} entries, not draft_vocab_size={layout.draft_vocab_size}; {REMEDY}"
        )
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise CheckpointError(f"the draft vocabulary names tokens twice or outside 0..{vocab - 1}; {REMEDY}")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _check_own(checkpoint: DFlashCheckpoint) -> None:
    config, ids = checkpoint.config, checkpoint.draft_ids
    size = config.vocab_size if ids is None else len(ids)
    for name, tensor, rows in (
        ("lm_head.weight", checkpoint.head, size),
        ("embed_tokens.weight", checkpoint.embedding, config.vocab_size),
    ):
        if tensor is not None and tuple(tensor.shape) != (rows, config.hidden_size):
            raise CheckpointError(
                f"tensor {name} is {list(tensor.shape)}, not {[rows, config.hidden_size]} as config.json says; "
                f"{REMEDY}"
            )
    if checkpoint.correction is not None:
        found = head_misfits(checkpoint.correction, config.hidden_size, size, config.vocab_size)
        if found:
            raise CheckpointError(
                f"its {checkpoint.correction.kind} head does not fit: {'; '.join(found)}; {REMEDY}"
            )


def _mask_embedding(folder: Path, config: DFlashConfig) -> Tensor | None:
    """A mask embedding trained apart from the vocabulary, in a file of its own (some published checkpoints)."""
    path = folder / "mask_embedding.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        token = config.mask_token_id
        if isinstance(state, dict):
            token, state = state.get("mask_token_id", token), state["embedding"]
        embedding = state.reshape(-1)
    except (KeyError, AttributeError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path.name} is damaged ({type(error).__name__}): {REMEDY}") from error
    if token != config.mask_token_id or len(embedding) != config.hidden_size:
        raise CheckpointError(
            f"{path.name} has {len(embedding)} values for token {token}, not {config.hidden_size} for mask token "
            f"{config.mask_token_id}; {REMEDY}"
        )
    return embedding
