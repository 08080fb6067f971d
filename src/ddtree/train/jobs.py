"""The two jobs of a trainer: the drafter itself, and heads on a frozen drafter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.dflash.heads import KINDS, Head, Markov, create
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.errors import ConfigError
from ddtree.train.batches import Batch, Blocks, autocast, block_states
from ddtree.train.loss import (
    Chunk,
    Objective,
    Sums,
    Vocabulary,
    chunks,
    head_loss,
    score_loss,
    teacher_places,
)

NAME = "dflash"
_SIZES = {"markov": ("size",), "treeflash": ("hidden_size",), "domino": ("hidden_size", "size")}


class DrafterPass(nn.Module):
    """A pass of the drafter; a module of its own since FSDP gathers sharded weights when a module runs."""

    _no_split_modules = ("Layer",)  # read by accelerate: gathered one after the other

    def __init__(self, net: DFlashNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, embedding: Tensor, batch: Batch, features: Tensor) -> tuple[Tensor, Blocks]:
        """Compute what enters the head, [C, A, b - 1, H], and the blocks it belongs to."""
        states, blocks = block_states(self.net, embedding, batch, features[:, :, :-1])
        return self.net.norm(states), blocks


class DrafterJob:
    """Trains a DFlash network to predict blocks; see `ddtree.train.trainer.Job`.

    Args:
        net: the drafter, float32, on the target's device.
        vocabulary: tokens that it can propose.
        embedding: [V, H], the target's.
        objective: the loss to minimize.
    """

    def __init__(
        self, net: DFlashNet, vocabulary: Vocabulary, embedding: Tensor, objective: Objective
    ) -> None:
        self.modules: dict[str, nn.Module] = {NAME: net}
        self.block = net.config.block_size
        self.settings: dict[str, Any] = {"network": asdict(net.config), "draft_tokens": vocabulary.size}
        self._pass = DrafterPass(net)
        self.root: nn.Module | None = self._pass
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._objective = objective

    def train(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """Add the gradients of the summed objective."""
        normed, blocks = self._pass(self._embedding, batch, features)
        hidden = features[:, :, -1]
        sums, derived = head_loss(normed.detach(), batch, blocks, hidden, self._vocabulary, self._objective)
        normed.backward(derived)
        return {NAME: sums}

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """Return sums with the cross-entropy."""
        normed, blocks = self._pass(self._embedding, batch, features)
        objective = Objective("ce", self._objective.gamma)
        return {NAME: head_loss(normed, batch, blocks, None, self._vocabulary, objective, gradient=False)[0]}


class TrainingBackbone:
    """The frozen parts that heads use, in training; see `ddtree.drafters.dflash.heads.BackboneParts`.

    Args:
        net: the drafter.
        vocabulary: its draft vocabulary.
        embedding: [V, H], the target's.
    """

    def __init__(self, net: DFlashNet, vocabulary: Vocabulary, embedding: Tensor) -> None:
        self.size = vocabulary.size
        self._net = net
        self._vocabulary = vocabulary
        self._embedding = embedding

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the drafter's embeddings of tokens."""
        return self._net.embed(self._embedding, tokens)

    def norm(self, states: Tensor) -> Tensor:
        """Apply the final norm."""
        return self._net.norm(states)

    def logits(self, normed: Tensor) -> Tensor:
        """Compute the draft vocabulary's scores [..., D] of normed states [..., H]."""
        flat = normed.reshape(-1, normed.shape[-1])
        return self._vocabulary.logits(flat).view(*normed.shape[:-1], self.size)

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft token of each target token; -1 for tokens outside the draft vocabulary."""
        return self._vocabulary.index(tokens).clamp(min=-1)

    def tokens(self, index: Tensor) -> Tensor:
        """Return the target token of each draft token."""
        return index if self._vocabulary.ids is None else self._vocabulary.ids[index]


class HeadsJob:
    """Trains heads to correct a frozen drafter; see `ddtree.train.trainer.Job`.

    Args:
        heads: float32, on the device, by kind.
        objectives: the loss of each.
        net: the drafter; its parameters are frozen.
        vocabulary: its draft vocabulary.
        embedding: [V, H], the target's.
    """

    def __init__(
        self,
        heads: dict[str, Head],
        objectives: dict[str, Objective],
        net: DFlashNet,
        vocabulary: Vocabulary,
        embedding: Tensor,
    ) -> None:
        self.modules: dict[str, nn.Module] = dict(heads)
        self.root: nn.Module | None = None
        self.block = net.config.block_size
        self.settings: dict[str, Any] = {
            "heads": {kind: [head.config(), vars(objectives[kind])] for kind, head in heads.items()},
            # Heads fit the drafter that they were trained on, and no other.
            "drafter": repr(sum(float(p.detach().double().abs().sum()) for p in net.parameters())),
        }
        self._heads = heads
        self._objectives = objectives
        self._net = net.requires_grad_(False)
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._backbone = TrainingBackbone(net, vocabulary, embedding)

    def train(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """Add the gradients of each head's summed objective."""
        states, previous, blocks = self._states(batch, features)
        soft = any(objective.share for objective in self._objectives.values())
        soft = soft or any(map(_has_confidence, self._heads.values()))
        hidden = features[:, :, -1] if soft else None
        sums = {kind: Sums(torch.zeros(5, device=states.device)) for kind in self._heads}
        for part in chunks(batch, blocks, hidden, self._vocabulary, states.shape[1]):
            own, before = states[part.at], previous[part.at]
            with torch.no_grad():
                base = self._backbone.logits(self._backbone.norm(own))
            for kind, head in self._heads.items():
                sums[kind] += self._backward(head, self._objectives[kind], own, before, base, part)
        return sums

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """Return sums with the cross-entropy, of the heads and of the drafter without one."""
        states, previous, blocks = self._states(batch, features)
        sums = {kind: Sums(torch.zeros(5, device=states.device)) for kind in (*self._heads, NAME)}
        gamma = next(iter(self._objectives.values())).gamma
        for part in chunks(batch, blocks, None, self._vocabulary, states.shape[1]):
            own, before = states[part.at], previous[part.at]
            base = self._backbone.logits(self._backbone.norm(own))
            for kind in sums:
                scores = self._scores(self._heads[kind], own, before, base) if kind != NAME else base
                sums[kind] += score_loss(scores.flatten(0, 1), part, Objective("ce", gamma), False)[0]
        return sums

    def _backward(
        self, head: Head, objective: Objective, states: Tensor, previous: Tensor, base: Tensor, part: Chunk
    ) -> Sums:
        scores = self._scores(head, states, previous, base)
        sums, derived = score_loss(scores.detach().flatten(0, 1), part, objective)
        assert derived is not None
        targets, derivatives = [scores], [derived.view_as(scores)]
        if _has_confidence(head):
            targets.append(self._confidence_loss(cast(Markov, head), scores.detach(), states, previous, part))
            derivatives.append(torch.ones_like(targets[-1]))
        torch.autograd.backward(targets, derivatives)
        return sums

    def _scores(self, head: Head, states: Tensor, previous: Tensor, base: Tensor) -> Tensor:
        with autocast(self._embedding):
            return head(self._backbone, states, previous, base)

    def _confidence_loss(
        self, head: Markov, scores: Tensor, states: Tensor, previous: Tensor, part: Chunk
    ) -> Tensor:
        """Sum the cross-entropy with 1 - TV, the overlap of drafter and target over the draft vocabulary (DSpark)."""
        assert part.teacher is not None
        teacher = part.teacher.of_slots(scores.shape[1]).view_as(scores)
        overlap = torch.minimum(scores.softmax(dim=-1), teacher).sum(dim=-1)
        with autocast(self._embedding):
            logits = head.confidence(self._backbone, states, previous)
        loss = functional.binary_cross_entropy_with_logits(logits, overlap.clamp(max=1.0), reduction="none")
        return (loss * part.labels.in_text).sum()

    @torch.no_grad()
    def _states(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor, Blocks]:
        """Compute states [C * A, L, H] before the final norm, the token before each slot [C * A, L], and the blocks."""
        states, blocks = block_states(self._net, self._embedding, batch, features[:, :, :-1])
        places = teacher_places(batch, states.shape[2])
        previous = batch.tokens.gather(1, places.flatten(1)).view_as(places)
        return states.flatten(0, 1), previous.flatten(0, 1), blocks


def build_heads(specs: list[str], hidden_size: int, size: int, seed: int) -> dict[str, Head]:
    """Make the heads that the options name, with random weights, by kind.

    Args:
        specs: as in ["markov:rank=256", "domino"].
        hidden_size: of the drafter, as in 576.
        size: tokens of the draft vocabulary, as in 8192.
        seed: of the weights.

    Raises:
        ConfigError: an option names no head, or one twice.
        CheckpointError: a head does not take the settings.
    """
    sizes = {"hidden_size": hidden_size, "size": size}
    built: dict[str, Head] = {}
    for spec in specs:
        kind, _, text = spec.partition(":")
        if kind not in KINDS or kind in built:
            raise ConfigError(f"--heads {spec}: name each of {', '.join(KINDS)} at most once")
        settings: dict[str, Any] = {name: sizes[name] for name in _SIZES[kind]}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                settings[name] = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"--heads {spec}: {part} is not NAME=NUMBER") from error
        torch.manual_seed(seed)
        built[kind] = create(kind, **settings)
    return built


def _has_confidence(head: Head) -> bool:
    return isinstance(head, Markov) and head.confidence_proj is not None
