"""The two jobs of a trainer: the drafter itself, and heads on a frozen drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.drafters.dflash.heads import KINDS, Head, Markov, create
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.train.arguments import Objective
from ddtree.train.batches import Batch, Blocks, autocast, block_states
from ddtree.train.loss import SUMS, Chunk, Vocabulary, chunks, head_loss, score_loss, teacher_places

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


@dataclass(frozen=True, eq=False)
class TrainingBackbone:
    """A drafter in training, with the parts of the target that it uses; see `heads.BackboneParts` of `drafters.dflash`.

    Attributes:
        net: the drafter, float32, on the target's device.
        vocabulary: tokens that it can propose.
        embedding: [V, H], the target's.
    """

    net: DFlashNet
    vocabulary: Vocabulary
    embedding: Tensor

    @classmethod
    def of(cls, net: DFlashNet, target: Target, draft_ids: Tensor | None) -> TrainingBackbone:
        """Join a drafter that proposes the tokens `draft_ids` [D], or any, with its target.

        Raises:
            ConfigError: the head has a bias, which the drafter's layout has no place for.
        """
        if getattr(target.head, "bias", None) is not None:
            raise ConfigError(
                "the target's head has a bias, which a drafter with a reduced vocabulary cannot carry"
            )
        head = target.head.weight.detach()  # type: ignore[operator]
        embedding = target.embed.weight.detach()  # type: ignore[operator]
        return cls(net, Vocabulary(draft_ids, head), embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the drafter's embeddings of tokens."""
        return self.net.embed(self.embedding, tokens)

    def norm(self, states: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.net.norm(states)

    def logits(self, normed: Tensor) -> Tensor:
        """Compute the draft vocabulary's scores [..., D] of normed states [..., H]."""
        return self.vocabulary.logits(normed)

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft token of each target token; -1 for tokens outside the draft vocabulary."""
        return self.vocabulary.index(tokens)


class DrafterJob:
    """Trains a DFlash network to predict blocks; see `ddtree.train.trainer.Job`.

    Args:
        backbone: the drafter and the target's parts.
        objective: the loss to minimize.
    """

    def __init__(self, backbone: TrainingBackbone, objective: Objective) -> None:
        net = backbone.net
        self.modules: dict[str, nn.Module] = {NAME: net}
        self.block = net.config.block_size
        self.settings: dict[str, Any] = {
            "network": asdict(net.config),
            "draft_tokens": backbone.vocabulary.size,
        }
        self._pass = DrafterPass(net)
        self.root: nn.Module | None = self._pass
        self._backbone = backbone
        self._objective = objective

    def train(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Add the gradients of the summed objective."""
        normed, blocks = self._pass(self._backbone.embedding, batch, features)
        hidden, vocabulary = features[:, :, -1], self._backbone.vocabulary
        sums, derived = head_loss(normed.detach(), batch, blocks, hidden, vocabulary, self._objective)
        normed.backward(derived)
        return {NAME: sums}

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Return sums with the cross-entropy."""
        normed, blocks = self._pass(self._backbone.embedding, batch, features)
        objective, vocabulary = Objective("ce", self._objective.gamma), self._backbone.vocabulary
        return {NAME: head_loss(normed, batch, blocks, None, vocabulary, objective, gradient=False)[0]}


class HeadsJob:
    """Trains heads to correct a frozen drafter; see `ddtree.train.trainer.Job`.

    Args:
        heads: float32, on the device, by kind.
        objectives: the loss of each.
        backbone: the drafter, whose parameters are frozen, and the target's parts.
    """

    def __init__(
        self, heads: dict[str, Head], objectives: dict[str, Objective], backbone: TrainingBackbone
    ) -> None:
        net = backbone.net.requires_grad_(False)
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
        self._backbone = backbone

    def train(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Add the gradients of each head's summed objective."""
        soft = any(objective.share for objective in self._objectives.values())
        soft = soft or any(map(_has_confidence, self._heads.values()))
        hidden = features[:, :, -1] if soft else None
        sums = dict.fromkeys(self._heads, torch.zeros(SUMS, device=features.device))
        for part, *inputs in self._parts(batch, features, hidden):
            for kind, head in self._heads.items():
                own = self._backward(head, self._objectives[kind], part, *inputs)
                sums[kind] = sums[kind] + own
        return sums

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Return sums with the cross-entropy, of the heads and of the drafter without one."""
        objective = Objective("ce", next(iter(self._objectives.values())).gamma)
        sums = dict.fromkeys((*self._heads, NAME), torch.zeros(SUMS, device=features.device))
        for part, states, previous, base in self._parts(batch, features, None):
            for kind in sums:
                scores = self._scores(self._heads[kind], states, previous, base) if kind != NAME else base
                sums[kind] = sums[kind] + score_loss(scores, part, objective, gradient=False)[0]
        return sums

    @torch.no_grad()
    def _parts(
        self, batch: Batch, features: Tensor, hidden: Tensor | None
    ) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
        """Give chunks of N blocks with what heads read of them.

        That is the states [N, L, H] before the final norm, the token before each slot [N, L], and the drafter's own
        scores [N, L, D].
        """
        backbone = self._backbone
        states, blocks = block_states(backbone.net, backbone.embedding, batch, features[:, :, :-1])
        places = teacher_places(batch, states.shape[2])
        previous = batch.tokens.gather(1, places.flatten(1)).view_as(places).flatten(0, 1)
        states = states.flatten(0, 1)
        for part in chunks(batch, blocks, hidden, backbone.vocabulary):
            own = states[part.at]
            yield part, own, previous[part.at], backbone.logits(backbone.norm(own))

    def _backward(
        self, head: Head, objective: Objective, part: Chunk, states: Tensor, previous: Tensor, base: Tensor
    ) -> Tensor:
        scores = self._scores(head, states, previous, base)
        sums, derived = score_loss(scores.detach(), part, objective)
        targets, derivatives = [scores], [derived]
        if _has_confidence(head):
            targets.append(self._confidence_loss(cast(Markov, head), scores.detach(), states, previous, part))
            derivatives.append(torch.ones_like(targets[-1]))
        torch.autograd.backward(targets, derivatives)
        return sums

    def _scores(self, head: Head, states: Tensor, previous: Tensor, base: Tensor) -> Tensor:
        with autocast(self._backbone.embedding):
            return head(self._backbone, states, previous, base)

    def _confidence_loss(
        self, head: Markov, scores: Tensor, states: Tensor, previous: Tensor, part: Chunk
    ) -> Tensor:
        """Sum the cross-entropy with 1 - TV, the overlap of drafter and target over the draft vocabulary (DSpark)."""
        assert part.teacher is not None
        overlap = torch.minimum(scores.softmax(dim=-1), part.teacher).sum(dim=-1)
        with autocast(self._backbone.embedding):
            logits = head.confidence(self._backbone, states, previous)
        loss = functional.binary_cross_entropy_with_logits(logits, overlap.clamp(max=1.0), reduction="none")
        return (loss * part.labels.in_text).sum()


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
