"""DFlash checkpoints on disk: read in the published layouts, checked against a target, written in z-lab's.

Reading knows no target: a folder's own parts are checked against each other first, and `incompatibilities` then names
every reason why the drafter does not fit a target. Nothing is guessed, since a drafter that loads wrongly does not
fail, it only never gets a token accepted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.config_formats import Layout, parse
from ddtree.drafters.dflash.folder import (
    REMEDY,
    check_shape,
    check_tensors,
    locate,
    our_names,
    read_file,
    read_json,
    read_tensors,
    write_folder,
    z_lab_config,
)
from ddtree.drafters.dflash.head_checkpoint import incompatibilities as head_incompatibilities
from ddtree.drafters.dflash.head_checkpoint import is_head, owner_of, read_head, read_published
from ddtree.drafters.dflash.heads import Head
from ddtree.drafters.dflash.network import DFlashConfig, DFlashNet
from ddtree.errors import CheckpointError
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN

_VOCABULARY = "draft_vocabulary.json"


class FittedTarget(Protocol):
    """The properties of a target that a drafter is checked against; `ddtree.model.target.Target` has them."""

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
        layout: the content of its config.json.
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
        """The network's config."""
        return self.layout.config

    @property
    def size(self) -> int:
        """Tokens of the draft vocabulary."""
        return self.config.vocab_size if self.draft_ids is None else len(self.draft_ids)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """The sizes that a head must fit: hidden size, draft vocabulary, the target's vocabulary."""
        return self.config.hidden_size, self.size, self.config.vocab_size

    def network(self) -> DFlashNet:
        """Return the network with the checkpoint's tensors."""
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
        tensors = our_names(read_tensors(folder), layout.config)
        correction = None
        if layout.correction is not None:
            correction = read_published(layout.correction, raw, tensors)
            tensors = {name: tensor for name, tensor in tensors.items() if owner_of(name) is None}
        offsets = tensors.pop("d2t", None)
        checkpoint = DFlashCheckpoint(
            folder,
            layout,
            tensors,
            head=tensors.pop("lm_head.weight", None),
            embedding=tensors.pop("embed_tokens.weight", None),
            correction=correction,
        )
        _check_network(tensors, layout.config)
        checkpoint.draft_ids = _draft_ids(folder, layout, offsets)
        checkpoint.mask_embedding = _mask_embedding(folder, layout.config)
        _check_parts(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error.__cause__
    return checkpoint


def read_part(folder: Path, read_network: Callable[[Path], DFlashCheckpoint]) -> DFlashCheckpoint:
    """Read a checkpoint with `read_network`; where a folder holds a head of ours, its backbone's with that head.

    Raises:
        CheckpointError: as `read` and `read_head`, and when the head was made for another backbone.
    """
    if not is_head(folder):
        return read_network(folder)
    head, backbone, coupling = read_head(folder)
    found = read_network(backbone)
    if reasons := head_incompatibilities(head, *found.head_sizes):
        raise CheckpointError(
            f"{folder} does not fit its backbone {backbone}: {'; '.join(reasons)}. Name a head trained on this "
            "backbone"
        )
    return replace(found, layout=replace(found.layout, coupling=coupling), correction=head)


def incompatibilities(checkpoint: DFlashCheckpoint, target: FittedTarget) -> list[str]:
    """Return every reason why a drafter does not fit a target; empty when it does."""
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
    if found := incompatibilities(checkpoint, target):
        raise CheckpointError(
            f"{checkpoint.folder} does not fit the target: {'; '.join(found)}. Name a drafter made for this target"
        )


def _check_network(tensors: dict[str, Tensor], config: DFlashConfig) -> None:
    """Raise CheckpointError unless the tensors are those of the config's network."""
    for name in sorted(tensors):
        if owner := owner_of(name):
            raise CheckpointError(
                f"tensor {name} belongs to a {owner} head, which is not supported: run as plain DFlash the drafter "
                "would accept almost nothing; use a DFlash checkpoint"
            )
    features, hidden = len(config.target_layer_ids), config.hidden_size
    width = tensors["fc.weight"].shape if "fc.weight" in tensors else None
    if width not in (None, (hidden, features * hidden)):
        raise CheckpointError(
            f"fc.weight is {list(width)}, but {features} feature layers of hidden size {hidden} need "
            f"[{hidden}, {features * hidden}]: config.json and weights do not belong together; {REMEDY}"
        )
    with torch.device("meta"):
        check_tensors(tensors, DFlashNet(config).state_dict(), "DFlash checkpoint")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {name} is {tensor.dtype}: quantized drafters are not supported")


def _mask_embedding(folder: Path, config: DFlashConfig) -> Tensor | None:
    """Return a mask embedding [H] trained apart from the vocabulary, which some checkpoints have in a file.

    Raises:
        CheckpointError: the file is damaged, or for another mask token or size.
    """
    path = folder / "mask_embedding.pt"
    if not path.exists():
        return None
    content, mask = read_file(path), config.mask_token_id
    embedding, token = content.get("embedding"), content.get("mask_token_id", mask)
    if not isinstance(embedding, Tensor):
        raise CheckpointError(f"{path.name} is damaged (no embedding): {REMEDY}")
    if token != mask or embedding.numel() != config.hidden_size:
        raise CheckpointError(
            f"{path.name} has {embedding.numel()} values for token {token}, not {config.hidden_size} for mask token "
            f"{mask}; {REMEDY}"
        )
    return embedding.reshape(-1)


def _draft_ids(folder: Path, layout: Layout, offsets: Tensor | None) -> Tensor | None:
    """Return the draft vocabulary int64 [Vd], None for the whole one.

    Our file lists it. The published tensor d2t holds, for each draft token, how far its target token is off.
    """
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


def _check_parts(found: DFlashCheckpoint) -> None:
    """Raise CheckpointError unless the parts beside the network fit it."""
    hidden, size, vocab = found.head_sizes
    for name, tensor, rows in (("lm_head", found.head, size), ("embed_tokens", found.embedding, vocab)):
        if tensor is not None:
            check_shape(f"{name}.weight", tensor, (rows, hidden))
    head = found.correction
    if head is not None and (reasons := head_incompatibilities(head, *found.head_sizes)):
        raise CheckpointError(f"its {head.kind} head does not fit: {'; '.join(reasons)}; {REMEDY}")


def backbone_of(found: DFlashCheckpoint, target: Target) -> Backbone:
    """Return a checkpoint's network over a target that it fits."""
    return Backbone(
        found.network(),
        target,
        draft_ids=found.draft_ids,
        head=_own(found.head, target.head) if found.draft_ids is None else found.head,
        embedding=_own(found.embedding, target.embed),
        mask_embedding=found.mask_embedding,
    )


def _own(weight: Tensor | None, module: nn.Module) -> Tensor | None:
    """Return a checkpoint's weight, or None where it is a copy of the target's."""
    theirs = cast(Tensor, module.weight)
    if weight is not None and torch.equal(weight.to(theirs.device, theirs.dtype), theirs):
        return None
    return weight


def write(
    folder: str | os.PathLike[str],
    network: DFlashNet,
    *,
    draft_ids: Tensor | None = None,
    coupling: tuple[float, float] = PLAIN,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a drafter in z-lab's layout, the one that other engines read too.

    A reduced draft vocabulary has a file of its own that others do not look at: they then score the whole vocabulary
    with the same network. The coupling is a further key of `dflash_config`.

    Args:
        folder: made if need be; files of these names in it are replaced.
        network: config and weights.
        draft_ids: int64 [Vd], the target's ids of a reduced draft vocabulary.
        coupling: (beta, kappa) of noise-coupled drafting.
        dtype: of the stored weights; the network's own by default.

    Raises:
        ConfigError: the layout cannot express the network's attention.
    """
    path = Path(folder)
    tensors = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in network.state_dict().items()
    }
    raw = z_lab_config(network.config, str(tensors["fc.weight"].dtype).removeprefix("torch."))
    if draft_ids is not None:
        raw["dflash_config"]["draft_vocabulary"] = _VOCABULARY
    if tuple(coupling) != PLAIN:
        raw["dflash_config"]["coupling"] = {"beta": coupling[0], "kappa": coupling[1]}
    write_folder(path, raw, tensors)
    if draft_ids is not None:
        (path / _VOCABULARY).write_text(json.dumps(draft_ids.tolist()))
    return path
