"""Fitting a drafter, or heads on one, to a target's answers.

Recipe of arXiv 2602.06036: frozen target embedding and head, random anchors, packed blocks, AdamW with cosine decay
after a short warm-up, clipped gradients. What is trained is a `Job`; this is the loop around it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddtree.errors import CheckpointError, ConfigError
from ddtree.progress import ProgressLine
from ddtree.train.batches import Batch, Batches, Draws
from ddtree.train.data import Corpus, written_whole
from ddtree.train.distributed import Group, gradients
from ddtree.train.fsdp import is_sharded, parts, whole
from ddtree.train.loss import Objective, Sums


class Average:
    """Exponential moving average; early on it forgets faster, so that the initial weights do not linger.

    Args:
        net: the network.
        decay: share of the average that a step leaves, at most.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self._weights = list(net.parameters())
        self._decay = decay
        self._means = [weight.detach().clone() for weight in self._weights]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 9))
        torch._foreach_lerp_(self._means, [weight.detach() for weight in self._weights], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the average in the network's place inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> list[Tensor]:
        return [*self._means, torch.tensor(self._steps)]

    def load(self, state: list[Tensor]) -> None:
        *means, steps = state
        self._steps = int(steps)
        for mean, saved in zip(self._means, means, strict=True):
            mean.copy_(saved)

    def _swap(self) -> None:
        # The values, since a sharded weight's storage is not its own.
        for weight, mean in zip(self._weights, self._means, strict=True):
            own = weight.detach().clone()
            weight.detach().copy_(mean)
            mean.copy_(own)


_WARMUP = 0.04


def learning_rate(fraction: float, highest: float) -> float:
    """Linear warm-up over the first 4 % of a fit, then a cosine down to zero; `fraction` of it is done."""
    if fraction < _WARMUP:
        return highest * fraction / _WARMUP
    return highest * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (fraction - _WARMUP) / (1 - _WARMUP))))


class Clock:
    """Share of a fit that is done: by steps, or by time when it has so many minutes.

    Args:
        steps: of the whole fit; not read when there are `minutes`.
        minutes: of the whole fit, or None.

    Attributes:
        before: seconds that the fit had used when it was taken up again.
    """

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.before = 0.0
        self._steps = steps
        self._minutes = minutes
        self._started = time.monotonic()

    def start(self, before: float) -> None:
        """Begin to count, with the seconds of an earlier part of the fit."""
        self.before, self._started = before, time.monotonic()

    @property
    def seconds(self) -> float:
        """Used so far."""
        return self.before + time.monotonic() - self._started

    def fraction(self, step: int) -> float:
        """Share that is done when `step` steps are; a step's own rate is that of its middle."""
        if self._minutes is not None:
            return self.seconds / (60 * self._minutes)
        return (step + 0.5) / self._steps

    def over(self, step: int) -> bool:
        return self.seconds >= 60 * self._minutes if self._minutes is not None else step >= self._steps

    def left(self, step: int) -> float:
        """Seconds to go, as far as can be told."""
        if self._minutes is not None:
            return max(0.0, 60 * self._minutes - self.seconds)
        return self.seconds / max(1, step) * (self._steps - step)


class Log:
    """Appends to a file. Lines of steps after `step`, which a killed fit has lost, are taken out first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [line for line in read_log(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, **values: float) -> None:
        """Append a line; `step` is among the values."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none where there is no file, and without one that a kill cut short."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


_BETAS = (0.9, 0.95)
_CLIP = 1.0
_READ_EVERY = 20  # steps between looks at a GPU's numbers, each of which waits for it
_LOG_EVERY = 20
_GPU_MULTIPLE = 32
STATE, LOG = "fit.pt", "log.jsonl"

Features = Callable[[Tensor], Tensor]
"""Features [C, n, F + 1, H] of tokens [C, n], as `Teacher` computes them."""


class Job(Protocol):
    """What a fit trains: some modules over the same batches, each by its own objective.

    Attributes:
        modules: float32, on the device, by name.
        block: block size of the drafter, anchor included.
        settings: what makes the job another one, as JSON values.
    """

    modules: dict[str, nn.Module]
    block: int
    settings: dict[str, Any]

    def train(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """Add the gradients of each module's summed objective to its parameters' own.

        `features` [C, n, F + 1, H] are outputs of the target's feature layers, then what enters its head.
        """

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        """The cross-entropy, of the modules and perhaps of more; no gradients are wanted."""


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
        loss: mean training objective since the last report, by module.
        held_out: the look at held-out answers that was just taken, if one was.
    """

    step: int
    seconds: float
    left: float
    loss: dict[str, float]
    held_out: dict[str, HeldOut] | None


@dataclass(frozen=True)
class HeldOut:
    """Held-out answers: mean weighted cross-entropy, and tokens per round of a chain started at every anchor."""

    loss: float
    chain: float


class Fit:
    """A fit that can be killed and taken up again: its state is in `folder`, and resuming changes no result.

    (A fit by the clock has other steps every time; it is taken up with the time that it has left.)

    Args:
        job: what is trained.
        corpus: answers.
        folder: of the state.
        config: settings.
        device: where the job's modules are.
        features: computes the target's features of a batch; None when they are on the disk (`Corpus.prepare`).
        group: the processes that train together.

    Attributes:
        job: after `run`, its modules are the best seen on held-out answers.
        step: steps done.
        best: the best look at held-out answers so far, by module.
    """

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        folder: Path,
        config: FitConfig,
        device: torch.device,
        features: Features | None = None,
        group: Group | None = None,
    ) -> None:
        if not corpus.held_out or not corpus.train:
            raise ConfigError("too few answers to hold some out; synthesize more")
        self.job = job
        self.step = 0
        self.best: dict[str, HeldOut] = {}
        self._folder = folder
        self._config = config
        self._device = device
        self._features = features
        self._group = group or Group()
        self._clock = Clock(config.steps, config.minutes)
        self._stale = 0
        self._averages = {name: Average(m, config.ema) for name, m in job.modules.items() if config.ema}
        self._totals = torch.zeros((len(job.modules), 5), device=device)
        on_gpu = device.type == "cuda"
        self._read_every = _READ_EVERY if on_gpu else 1
        draws = Draws(
            config.conversations,
            config.anchors,
            job.block,
            config.seed,
            config.prefix_share,
            config.prefix_decay,
            _GPU_MULTIPLE if on_gpu else 1,
        )
        self._batches = Batches(corpus, draws, cached=features is None)
        weights = [p for module in job.modules.values() for p in module.parameters()]
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=_BETAS, fused=True if on_gpu else None
        )

    @property
    def seconds(self) -> float:
        """Time that the fit has used, with that before it was taken up again."""
        return self._clock.seconds

    def run(self, report: Callable[[Progress], None] | None = None) -> dict[str, HeldOut]:
        """Train to the end, or until held-out answers stop improving; leaves the best weights in the modules.

        Raises:
            ConfigError: the loss is no longer a number.
            CheckpointError: the folder's state belongs to a fit with other settings.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        log = Log(self._folder / LOG, self.step) if self._group.main else None
        passes = self._batches.ahead(self._numbers())
        over = self._over()
        while not over:
            rate = self._train_step(passes)
            self.step += 1
            over = self._over()
            looking = self.step % self._config.evaluate_every == 0 or over
            if not looking and self.step % self._read_every:
                continue
            loss = self._read()
            look = self.look() if looking else None
            if look:
                self._keep(look)
                over = over or self._over()
            progress = Progress(self.step, self._clock.seconds, self._clock.left(self.step), loss, look)
            if log and (look or self.step % _LOG_EVERY == 0):
                log.add(**_line(progress, rate))
            if report:
                report(progress)
        passes.close()
        for name, module in self.job.modules.items():
            best = torch.load(self._folder / f"{name}.pt", map_location="cpu", weights_only=True)
            module.load_state_dict(parts(best, module.state_dict()))
        return self.best

    @torch.no_grad()
    def look(self, every: int = 4) -> dict[str, HeldOut]:
        """Measure on held-out answers, with an anchor at every so many tokens."""
        modules = self.job.modules.values()
        names: list[str] = []
        totals = torch.zeros(0, device=self._device)
        with ExitStack() as stack:
            for average in self._averages.values():
                stack.enter_context(average.in_place())
            for module in modules:
                module.eval()
            for batch, counts in self._shares(self._batches.held_out(every, self._config.look_at)):
                moved = batch.to(self._device)
                sums = self.job.measure(moved, self._features_of(moved))
                own = torch.stack([part.values for part in sums.values()])
                if not names:
                    names, totals = list(sums), torch.zeros_like(own)
                if counts:
                    totals += own
        for module in modules:
            module.train()
        self._group.add([totals])
        found = zip(names, totals.tolist(), strict=True)
        return {name: HeldOut(v[1] / max(v[2], 1e-9), 1 + v[3] / max(v[4], 1)) for name, v in found}

    def _train_step(self, passes: Iterator[Batch]) -> float:
        config, group, modules = self._config, self._group, self.job.modules
        fraction = self._clock.fraction(self.step)
        if config.minutes is not None:
            fraction = group.agree(fraction, self._device)
        rate = learning_rate(fraction, config.learning_rate)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        totals = torch.zeros_like(self._totals)
        for _ in range(config.accumulate):
            batch = next(passes).to(self._device)
            sums = self.job.train(batch, self._features_of(batch))
            totals += torch.stack([sums[name].values for name in modules])
        found = [gradient for module in modules.values() for gradient in gradients(module)]
        group.add([totals, *(gradient for gradient in found if not is_sharded(gradient))])
        for own, module in zip(totals, modules.values(), strict=True):
            weight = own[2].clamp(min=1e-9)
            for gradient in gradients(module):
                gradient.div_(weight)
            nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for average in self._averages.values():
            average.update()
        self._totals += totals
        return rate

    def _features_of(self, batch: Batch) -> Tensor:
        features = batch.features if self._features is None else self._features(batch.tokens)
        assert features is not None
        return features

    def _numbers(self) -> Iterator[int]:
        """Numbers of this process's batches, from the next step on."""
        group = self._group
        number = self.step * self._config.accumulate
        while True:
            yield number * group.size + group.rank
            number += 1

    def _shares(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """This process's share, as many for each; where that is one too many, a batch comes that does not count."""
        group, number, own = self._group, -1, None
        for number, batch in enumerate(batches):
            own = batch if own is None else own
            if number % group.size == group.rank:
                yield batch, True
        if own is not None and group.rank > number % group.size:
            yield own, False

    def _over(self) -> bool:
        config, over = self._config, self._clock.over(self.step)
        if config.minutes is not None:
            over = bool(self._group.agree(float(over), self._device))
        return over or bool(config.patience and self._stale >= config.patience)

    def _read(self) -> dict[str, float]:
        """Mean objective of the steps since it was last read."""
        found = zip(self.job.modules, self._totals.tolist(), strict=True)
        loss = {name: values[0] / max(values[2], 1e-9) for name, values in found}
        self._totals.zero_()
        if any(value != value for value in loss.values()):
            raise ConfigError(f"the loss is not a number at step {self.step}; lower learning_rate")
        return loss

    def _keep(self, look: dict[str, HeldOut]) -> None:
        self._stale += 1
        for name, module in self.job.modules.items():
            if name in self.best and look[name].loss >= self.best[name].loss:
                continue
            self.best[name], self._stale = look[name], 0
            with ExitStack() as stack:
                if self._averages:
                    stack.enter_context(self._averages[name].in_place())
                self._save(module.state_dict(), f"{name}.pt")
        state = {
            "settings": self._settings(),
            "step": self.step,
            "seconds": self._clock.seconds,
            "stale": self._stale,
            "best": {name: [best.loss, best.chain] for name, best in self.best.items()},
            "modules": {name: module.state_dict() for name, module in self.job.modules.items()},
            "optimizer": self._optimizer.state_dict(),
            "averages": {name: average.state() for name, average in self._averages.items()},
        }
        self._save(state, STATE)
        self._group.wait()

    def _save(self, state: dict[str, Any], name: str) -> None:
        state = whole(state, self._group.main)
        if self._group.main:
            with written_whole(self._folder / name) as partial:
                torch.save(state, partial)

    def _resume(self) -> None:
        self._clock.start(0.0)
        path = self._folder / STATE
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.get("settings") != self._settings():
            raise CheckpointError(f"{path} belongs to a fit with other settings; delete it to start anew")
        self.step, self._stale = state["step"], state["stale"]
        self.best = {name: HeldOut(*values) for name, values in state["best"].items()}
        for name, module in self.job.modules.items():
            module.load_state_dict(parts(state["modules"][name], module.state_dict()))
        self._optimizer.load_state_dict(_moments(state["optimizer"], self._optimizer))
        for name, average in self._averages.items():
            average.load(parts(state["averages"][name], average.state()))
        self._clock.start(state["seconds"])

    def _settings(self) -> str:
        return json.dumps([asdict(self._config), self.job.settings], sort_keys=True)


def _line(progress: Progress, rate: float) -> dict[str, float]:
    """A line of the log: with one module "loss", "held_out" and "tau", with several "loss.NAME" and so on."""
    line = {"step": progress.step, "seconds": round(progress.seconds, 2), "rate": rate}
    single = len(progress.loss) == 1
    for name, loss in progress.loss.items():
        line["loss" if single else f"loss.{name}"] = loss
    for name, look in (progress.held_out or {}).items():
        suffix = "" if single and name in progress.loss else f".{name}"
        line |= {f"held_out{suffix}": look.loss, f"tau{suffix}": look.chain}
    return line


def _moments(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's saved state, each moment sharded as its weight is."""
    weights = [weight for settings in optimizer.param_groups for weight in settings["params"]]
    state = {
        index: {name: parts(v, weights[index]) if v.ndim else v for name, v in moments.items()}
        for index, moments in saved["state"].items()
    }
    return {**saved, "state": state}


class Reporter:
    """One line: how far, time left, loss, and the last look at held-out answers (loss, tokens a round of a chain).

    Args:
        label: what is going on.
        config: the fit's settings.
    """

    def __init__(self, label: str, config: FitConfig) -> None:
        self._seconds = None if config.minutes is None else round(60 * config.minutes)
        total, unit = (config.steps, "steps") if self._seconds is None else (self._seconds, "s")
        self._line = ProgressLine(label, total, unit)
        self._look: dict[str, HeldOut] = {}

    def say(self, progress: Progress) -> None:
        self._look = progress.held_out or self._look
        parts = ["loss " + _of(progress.loss)]
        done = progress.step
        if self._seconds is not None:
            parts.insert(0, f"step {progress.step:,}")
            done = min(round(progress.seconds), self._seconds)
        if self._look:
            parts.append("held out " + _of({name: look.loss for name, look in self._look.items()}))
            parts.append("chain " + _of({name: look.chain for name, look in self._look.items()}, 2))
        self._line.update(done, ", ".join(parts))

    def close(self) -> None:
        self._line.close()


def run_fit(fit: Fit, label: str, config: FitConfig, group: Group) -> dict[str, HeldOut]:
    """Run a fit, saying how it goes in the process that speaks; returns the best looks."""
    if not group.main:
        return fit.run()
    reporter = Reporter(label, config)
    best = fit.run(reporter.say)
    reporter.close()
    return best


def _of(values: dict[str, float], digits: int = 3) -> str:
    if len(values) == 1:
        return f"{next(iter(values.values())):.{digits}f}"
    return " ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
