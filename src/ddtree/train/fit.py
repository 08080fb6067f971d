"""Fitting a DFlash drafter to a target's answers.

Recipe of arXiv 2602.06036: frozen target embedding and head, random anchors, packed blocks, AdamW with cosine decay
after a short warm-up, clipped gradients. The drafter starts from the target's own last layers, and the context
projection from the identity on the last feature layer, so that it begins as a shortened target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ddtree.drafters.dflash_net import DFlashNet
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.averaging import Average
from ddtree.train.batches import Batch, Batches, Draws
from ddtree.train.data import Corpus
from ddtree.train.forward import block_states
from ddtree.train.group import Group, gradients
from ddtree.train.log import Log
from ddtree.train.objective import Objective, Sums, Vocabulary, head_loss
from ddtree.train.schedule import Clock, learning_rate
from ddtree.train.states import save_state

_BETAS = (0.9, 0.95)
_CLIP = 1.0
_READ_EVERY = 20  # steps between looks at a GPU's numbers, each of which waits for it
_LOG_EVERY = 20
_GPU_MULTIPLE = 32

Features = Callable[[Tensor], Tensor]
"""Features [C, n, F + 1, H] of tokens [C, n], as `Teacher` computes them."""


@dataclass(frozen=True)
class FitConfig:
    """Settings of a fit.

    Attributes:
        steps: optimizer steps; not read when there are `minutes`.
        minutes: length of the fit by the clock, whatever steps that gives.
        conversations: of a pass of the drafter.
        accumulate: passes of an optimizer step.
        anchors: blocks of each conversation in a step, at most.
        learning_rate: at its highest, after the warm-up (4 % of the fit).
        weight_decay: of the matrices.
        loss: "ce", "kl" or "dpace"; see `Objective`.
        gamma: decay of the slots' weights.
        soft: share of the target's distribution in the labels.
        prefix_share: share of the blocks that begin with given tokens beside the anchor.
        prefix_decay: ratio of the chances of successive prefix lengths.
        ema: decay of the weights' running average, which is what is kept then; 0 for none.
        evaluate_every: steps between looks at the held-out answers; each is a checkpoint too.
        look_at: held-out conversations of a look, at most.
        patience: looks without improvement after which to stop; 0 never stops early.
        seed: of the order of conversations and the anchors.
    """

    steps: int = 2000
    minutes: float | None = None
    conversations: int = 2
    accumulate: int = 1
    anchors: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    loss: str = "ce"
    gamma: float = 3.0
    soft: float = 0.5
    prefix_share: float = 0.0
    prefix_decay: float = 0.8
    ema: float = 0.0
    evaluate_every: int = 200
    look_at: int = 256
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "conversations", "accumulate", "anchors", "evaluate_every", "look_at"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate} must be positive")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes} must be positive")
        if not (0 <= self.prefix_share <= 1 and self.prefix_decay > 0 and 0 <= self.ema < 1):
            raise ConfigError(
                "prefix_share must be within 0..1, prefix_decay positive, and ema at least 0 and below 1"
            )
        _ = self.objective

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.gamma, self.soft)


@dataclass(frozen=True)
class Progress:
    """Where a fit stands.

    Attributes:
        step: steps done.
        seconds: used so far.
        left: seconds to go, as far as can be told.
        loss: mean training objective since the last report.
        held_out: the look at held-out answers that was just taken, if one was.
    """

    step: int
    seconds: float
    left: float
    loss: float
    held_out: HeldOut | None


@dataclass(frozen=True)
class HeldOut:
    """Held-out answers: mean weighted cross-entropy, and tokens per round of a chain started at every anchor."""

    loss: float
    chain: float


class Fit:
    """A fit that can be killed and taken up again: its state is in `folder`, and resuming changes no result.

    (A fit by the clock has other steps every time; it is taken up with the time that it has left.)

    Args:
        net: the drafter to train, float32, on the target's device.
        vocabulary: tokens that it can propose.
        embedding: [V, H], the target's.
        corpus: answers.
        folder: of the state.
        config: settings.
        features: computes the target's features of a batch; None when they are on the disk (`Corpus.prepare`).
        group: the processes that train together.

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
        features: Features | None = None,
        group: Group | None = None,
    ) -> None:
        if not corpus.held_out or not corpus.train:
            raise ConfigError("too few answers to hold some out; synthesize more")
        self.net = net
        self.step = 0
        self.best: HeldOut | None = None
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._folder = folder
        self._config = config
        self._features = features
        self._group = group or Group()
        self._clock = Clock(config.steps, config.minutes)
        self._stale = 0
        self._device = embedding.device
        self._average = Average(net, config.ema) if config.ema else None
        self._sums = Sums(torch.zeros(5, device=self._device))
        on_gpu = self._device.type == "cuda"
        self._read_every = _READ_EVERY if on_gpu else 1
        draws = Draws(
            config.conversations,
            config.anchors,
            net.config.block_size,
            config.seed,
            config.prefix_share,
            config.prefix_decay,
            _GPU_MULTIPLE if on_gpu else 1,
        )
        self._batches = Batches(corpus, draws, cached=features is None)
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=_BETAS, fused=True if on_gpu else None
        )

    def run(self, report: Callable[[Progress], None] | None = None) -> HeldOut:
        """Train to the end, or until held-out answers stop improving; leaves the best drafter in `net`.

        Raises:
            ConfigError: the loss is no longer a number.
            CheckpointError: the folder's state belongs to a fit with other settings.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        log = Log(self._folder / "log.jsonl", self.step) if self._group.main else None
        clock, config = self._clock, self._config
        passes = self._batches.ahead(self._numbers())
        over = self._over()
        while not over:
            rate = self._train_step(passes)
            self.step += 1
            over = self._over()
            looking = self.step % config.evaluate_every == 0 or over
            if looking or self.step % self._read_every == 0:
                loss = self._read()
                look = self.look() if looking else None
                if look:
                    self._keep(look)
                    over = over or bool(config.patience and self._stale >= config.patience)
                if log and (look or self.step % _LOG_EVERY == 0):
                    log.add(
                        step=self.step,
                        seconds=round(clock.seconds, 2),
                        loss=loss,
                        rate=rate,
                        **({"held_out": look.loss, "tau": look.chain} if look else {}),
                    )
                if report:
                    report(Progress(self.step, clock.seconds, clock.left(self.step), loss, look))
        passes.close()
        assert self.best is not None
        self.net.load_state_dict(torch.load(self._folder / "best.pt", map_location="cpu", weights_only=True))
        return self.best

    @torch.no_grad()
    def look(self, every: int = 4) -> HeldOut:
        """Measure on held-out answers, with an anchor at every so many tokens."""
        self.net.eval()
        with self._average.in_place() if self._average else nullcontext():
            sums = torch.zeros(5, device=self._device)
            objective = Objective("ce", self._config.gamma)
            for number, batch in enumerate(self._batches.held_out(every, self._config.look_at)):
                if number % self._group.size == self._group.rank:
                    sums += self._measure(batch.to(self._device), objective)[0].values
        self._group.add([sums])
        self.net.train()
        _, hard, weight, accepted, blocks = sums.tolist()
        return HeldOut(hard / max(weight, 1e-9), 1 + accepted / max(blocks, 1))

    def _train_step(self, passes: Iterator[Batch]) -> float:
        config, group = self._config, self._group
        fraction = self._clock.fraction(self.step)
        if config.minutes is not None:
            fraction = group.agree(fraction, self._device)
        rate = learning_rate(fraction, config.learning_rate)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        sums = Sums(torch.zeros(5, device=self._device))
        for _ in range(config.accumulate):
            own, normed, derived = self._measure(next(passes).to(self._device), config.objective)
            normed.backward(derived)
            sums += own
        group.add([*gradients(self.net), sums.values])
        weight = sums.weight.clamp(min=1e-9)
        for gradient in gradients(self.net):
            gradient.div_(weight)
        nn.utils.clip_grad_norm_(self.net.parameters(), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._average:
            self._average.update()
        self._sums += sums
        return rate

    def _measure(self, batch: Batch, objective: Objective) -> tuple[Sums, Tensor, Tensor | None]:
        """The objective of a batch, what the drafter gives to the head, and the derivative by it (when training)."""
        features = batch.features if self._features is None else self._features(batch.tokens)
        assert features is not None
        states, blocks = block_states(self.net, self._embedding, batch, features[:, :, :-1])
        normed = self.net.norm(states)
        sums, derived = head_loss(
            normed.detach(),
            batch,
            blocks,
            features[:, :, -1],
            self._vocabulary,
            objective,
            gradient=torch.is_grad_enabled(),
        )
        return sums, normed, derived

    def _numbers(self) -> Iterator[int]:
        """Numbers of this process's batches, from the next step on."""
        group, accumulate = self._group, self._config.accumulate
        number = self.step * accumulate
        while True:
            yield number * group.size + group.rank
            number += 1

    def _over(self) -> bool:
        config, over = self._config, self._clock.over(self.step)
        if config.minutes is not None:
            over = bool(self._group.agree(float(over), self._device))
        return over or bool(config.patience and self._stale >= config.patience)

    def _read(self) -> float:
        """Mean objective of the steps since it was last read."""
        total, _, weight, _, _ = self._sums.values.tolist()
        self._sums = Sums(torch.zeros(5, device=self._device))
        if total != total:
            raise ConfigError(f"the loss is not a number at step {self.step}; lower learning_rate")
        return total / max(weight, 1e-9)

    def _keep(self, look: HeldOut) -> None:
        self._stale += 1
        better = self.best is None or look.loss < self.best.loss
        if better:
            self.best, self._stale = look, 0
        if self._group.main:
            if better:
                with self._average.in_place() if self._average else nullcontext():
                    save_state(self.net.state_dict(), self._folder / "best.pt")
            assert self.best is not None
            state = {
                "config": json.dumps(asdict(self._config)),
                "step": self.step,
                "seconds": self._clock.seconds,
                "stale": self._stale,
                "best": [self.best.loss, self.best.chain],
                "net": self.net.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "average": self._average.state() if self._average else [],
            }
            save_state(state, self._folder / "fit.pt")
        self._group.wait()

    def _resume(self) -> None:
        self._clock.start(0.0)
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
        if self._average:
            self._average.load(state["average"])
        self._clock.start(state["seconds"])
