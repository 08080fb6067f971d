"""Fitting a DFlash drafter to a target's answers.

Recipe of arXiv 2602.06036 at small scale: frozen target embedding and head, random anchors, packed blocks, AdamW with
cosine decay after a short warm-up, clipped gradients. The drafter starts from the target's own last layers, and the
context projection from the identity on the last feature layer, so that it begins as a shortened target.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafters.dflash_net import DFlashNet
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.blocks import Blocks, pack, random_anchors
from ddtree.train.data import Corpus, Example
from ddtree.train.objective import Loss, Vocabulary, block_loss

_WARMUP = 0.04
_BETAS = (0.9, 0.95)
_CLIP = 1.0


@dataclass(frozen=True)
class FitConfig:
    """Settings of a fit.

    Attributes:
        steps: optimizer steps.
        conversations: per step.
        anchors: blocks of each conversation in a step, at most.
        learning_rate: at its highest, after the warm-up (4 % of the steps).
        weight_decay: of the matrices.
        gamma: decay of the slots' weights.
        soft: share of the target's distribution in the labels.
        evaluate_every: steps between looks at the held-out answers; each is a checkpoint too.
        patience: looks without improvement after which to stop; 0 never stops early.
        seed: of the order of conversations and the anchors.
    """

    steps: int = 2000
    conversations: int = 2
    anchors: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    gamma: float = 3.0
    soft: float = 0.5
    evaluate_every: int = 200
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "conversations", "anchors", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not (self.learning_rate > 0 and self.gamma > 0 and 0 <= self.soft <= 1):
            raise ConfigError("learning_rate and gamma must be positive, and soft within 0..1")


@dataclass(frozen=True)
class Progress:
    """Where a fit stands: steps done and wanted, running training loss, and the last look at held-out answers."""

    step: int
    steps: int
    loss: float
    held_out: HeldOut | None


@dataclass(frozen=True)
class HeldOut:
    """Held-out answers: mean weighted cross-entropy, and tokens per round of a chain started at every anchor."""

    loss: float
    chain: float


class Fit:
    """A fit that can be killed and taken up again: its state is in `folder`, and resuming changes no result.

    Attributes:
        net: the drafter; after `run`, the best seen on held-out answers.
        step: steps done.
        best: the best look at held-out answers so far.
    """

    def __init__(
        self,
        net: DFlashNet,
        vocabulary: Vocabulary,
        embedding: Tensor,
        corpus: Corpus,
        folder: Path,
        config: FitConfig,
    ) -> None:
        if not corpus.held_out or not corpus.train:
            raise ConfigError("too few answers to hold some out; synthesize more")
        self.net = net
        self.step = 0
        self.best: HeldOut | None = None
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._corpus = corpus
        self._folder = folder
        self._config = config
        self._stale = 0
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=_BETAS)

    def run(self, report: Callable[[Progress], None] | None = None) -> HeldOut:
        """Train to the end, or until held-out answers stop improving; leaves the best drafter in `net`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        config, running = self._config, 0.0
        while self.step < config.steps and not (config.patience and self._stale >= config.patience):
            loss = self._train_step()
            running = loss if not running else 0.95 * running + 0.05 * loss
            self.step += 1
            look = None
            if self.step % config.evaluate_every == 0 or self.step == config.steps:
                look = self.look()
                self._keep(look)
            if report:
                report(Progress(self.step, config.steps, running, look))
        assert self.best is not None
        self.net.load_state_dict(torch.load(self._folder / "best.pt", map_location="cpu", weights_only=True))
        return self.best

    @torch.no_grad()
    def look(self, every: int = 4) -> HeldOut:
        """Measure on held-out answers, with an anchor at every so many tokens."""
        self.net.eval()
        hard = weight = 0.0
        accepted = blocks = 0
        for index in self._corpus.held_out:
            example = self._corpus.example(index)
            anchors = torch.arange(example.answer_start, len(example.tokens) - 1, every)
            if len(anchors):
                loss = self._loss(example, anchors, soft=0.0)
                hard, weight = hard + loss.hard, weight + loss.weight
                accepted, blocks = accepted + loss.accepted, blocks + loss.blocks
        self.net.train()
        return HeldOut(hard / max(weight, 1e-9), 1 + accepted / max(blocks, 1))

    def _train_step(self) -> float:
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, config)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        total = weight = 0.0
        for index in self._batch():
            example = self._corpus.example(index)
            anchors = random_anchors(example.answer_start, len(example.tokens), config.anchors, generator)
            if len(anchors):
                loss = self._loss(example, anchors, config.soft)
                loss.total.backward()
                total, weight = total + float(loss.total.detach()), weight + loss.weight
        if weight:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.grad /= weight
            nn.utils.clip_grad_norm_(self.net.parameters(), _CLIP)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return total / max(weight, 1e-9)

    def _batch(self) -> list[int]:
        """The step's conversations: each epoch is a permutation of all of them."""
        train, count = self._corpus.train, self._config.conversations
        places = range(self.step * count, (self.step + 1) * count)
        orders = {place // len(train): None for place in places}
        shuffled = {epoch: _permutation(len(train), self._config.seed, epoch) for epoch in orders}
        return [train[shuffled[place // len(train)][place % len(train)]] for place in places]

    def _loss(self, example: Example, anchors: Tensor, soft: float) -> Loss:
        scores, blocks = draft_scores(self.net, self._vocabulary, self._embedding, example, anchors)
        return block_loss(scores, blocks, example.hidden, self._vocabulary, self._config.gamma, soft)

    def _keep(self, look: HeldOut) -> None:
        self._stale += 1
        if self.best is None or look.loss < self.best.loss:
            self.best, self._stale = look, 0
            _save(self.net.state_dict(), self._folder / "best.pt")
        assert self.best is not None
        state = {
            "config": json.dumps(asdict(self._config)),
            "step": self.step,
            "stale": self._stale,
            "best": [self.best.loss, self.best.chain],
            "net": self.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        _save(state, self._folder / "fit.pt")

    def _resume(self) -> None:
        path = self._folder / "fit.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if json.loads(state["config"]) != asdict(self._config):
            raise CheckpointError(f"{path} belongs to a fit with other settings; delete it to start anew")
        self.step, self._stale = state["step"], state["stale"]
        self.best = HeldOut(*state["best"])
        self.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])


def draft_scores(
    net: DFlashNet, vocabulary: Vocabulary, embedding: Tensor, example: Example, anchors: Tensor
) -> tuple[Tensor, Blocks]:
    """The drafter's logits [A, b - 1, D] for blocks at some anchors of a conversation, and the blocks.

    The drafter's weights are float32, on the device of the target's embedding, and it computes in its precision.
    """
    blocks = pack(example.tokens, anchors, net.config.block_size, net.config.mask_token_id)
    blocks = blocks.to(embedding.device)
    x = net.embed(embedding, blocks.tokens)[None]
    low = x.dtype != torch.float32
    with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
        context = net.context(example.features[None, : blocks.context].flatten(2).to(x))
        places = torch.arange(blocks.context, device=x.device)[None]
        hidden = net(x, blocks.positions[None], context, places, blocks.mask[None])
        slots = hidden.view(len(anchors), -1, hidden.shape[-1])[:, 1:]
        # Flat and contiguous: PyTorch's CPU kernels turn a strided slice into a batched product, several times slower.
        scores = vocabulary.logits(slots.reshape(-1, hidden.shape[-1]).to(x.dtype))
    return scores.view(len(anchors), -1, vocabulary.size), blocks


def learning_rate(step: int, config: FitConfig) -> float:
    """Linear warm-up over 4 % of the steps, then a cosine down to zero."""
    warmup = max(1, round(_WARMUP * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (
        0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, config.steps - warmup))
    )


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + 500_009 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _save(value: Any, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    torch.save(value, partial)
    os.replace(partial, path)
