"""Training a drafter, or heads on one, on a target's answers: the loop around a `Job`.

Recipe of arXiv 2602.06036: frozen target embedding and head, random anchors, packed blocks, AdamW with cosine decay
after a short warm-up, clipped gradients. All state lies in a folder, so that a run can be killed and taken up again.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ddtree.errors import CheckpointError, ConfigError
from ddtree.storage import atomic_write
from ddtree.train.arguments import Schedule, TrainConfig
from ddtree.train.batches import Batch, Batches
from ddtree.train.data import Corpus
from ddtree.train.distributed import Group, gradients
from ddtree.train.loss import ACCEPTED, BLOCKS, CROSS_ENTROPY, OBJECTIVE, SUMS, WEIGHT
from ddtree.train.training_log import LOG, HeldOutScore, TrainLog, TrainProgress

STATE = "fit.pt"
_BETAS = (0.9, 0.95)
_CLIP = 1.0
_GPU_STEPS_BETWEEN_READS = 20  # each read of the loss waits for the GPU
_GPU_MULTIPLE = 32
# The same file whether weights are sharded or not.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

Features = Callable[[Tensor], Tensor]
"""Features [C, n, F + 1, H] of tokens [C, n], as `Teacher` computes them."""


class Job(Protocol):
    """What is trained: some modules over the same batches, each by its own objective.

    Attributes:
        modules: float32, on the device, by name.
        root: the module to shard with FSDP, which holds all of `modules`; None if they stay whole.
        block: block size of the drafter, anchor included, as in 8.
        settings: JSON values that a resumed job must share.
    """

    modules: dict[str, nn.Module]
    root: nn.Module | None
    block: int
    settings: dict[str, Any]

    def train(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Add the gradients of each module's summed objective to its parameters' own; return sums as in `loss`.

        `features` [C, n, F + 1, H] are outputs of the target's feature layers, then what enters its head.
        """

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Return sums with the cross-entropy, of the modules and perhaps of more; it needs no gradients."""


class Trainer:
    """Trains a job's modules; killed at any moment, the same call goes on where the last checkpoint was.

    Resuming changes no result, except of a run by the clock, which has other steps every time and uses the minutes
    that it has left.

    Args:
        job: the modules and their objectives.
        corpus: the answers.
        folder: holds the state and the log.
        config: settings.
        device: holds the job's modules.
        features: computes the target's features of a batch; None to read them from disk (`Corpus.prepare`).
        group: the processes that train together.

    Attributes:
        job: its modules are the best on held-out answers once `run` has returned.
        step: steps done.
        best: the best evaluation so far, by module.

    Raises:
        ConfigError: there are too few answers to hold some out.
    """

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        folder: Path,
        config: TrainConfig,
        device: torch.device,
        features: Features | None = None,
        group: Group | None = None,
    ) -> None:
        if not corpus.held_out or not corpus.train:
            raise ConfigError("too few answers to hold some out; synthesize more")
        self.job = job
        self.step = 0
        self.best: dict[str, HeldOutScore] = {}
        self._folder = folder
        self._config = config
        self._device = device
        self._features = features
        self._group = group or Group()
        self._schedule = Schedule(config)
        self._evaluations_without_gain = 0
        self._totals = torch.zeros((len(job.modules), SUMS), device=device)
        on_gpu = device.type == "cuda"
        self._read_every = _GPU_STEPS_BETWEEN_READS if on_gpu else 1
        multiple = _GPU_MULTIPLE if on_gpu else 1
        self._batches = Batches(corpus, config, job.block, features is None, multiple)
        self._modules = nn.ModuleDict(job.modules)
        weights = list(self._modules.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=_BETAS,
            fused=True if on_gpu else None,
        )
        if self._group.sharded and job.root is not None:
            self._group.shard(job.root, self._optimizer)
        self._average = MovingAverage(self._modules, config.ema) if config.ema else None

    @property
    def seconds(self) -> float:
        """Time that the run has used, that of earlier parts included."""
        return self._schedule.seconds

    def run(self, report: Callable[[TrainProgress], None] | None = None) -> dict[str, HeldOutScore]:
        """Train to the end, or until held-out answers stop improving; load the best weights; return their scores.

        Raises:
            ConfigError: the loss is no longer a number.
            CheckpointError: the folder's state belongs to a run with other settings.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        log = None
        if self._group.main:
            log = TrainLog(self._folder / LOG, self._config, self.step, self.seconds)
        own = self.step * self._config.accumulate * self._group.size + self._group.rank
        batches = self._batches.ahead(count(own, self._group.size))
        over = self._over()
        while not over:
            rate = self._train_step(batches)
            self.step += 1
            over = self._over()
            evaluating = self.step % self._config.evaluate_every == 0 or over
            if not evaluating and self.step % self._read_every:
                continue
            loss = self._mean_loss()
            scores = self.evaluate() if evaluating else None
            if scores:
                self._keep(scores)
                over = over or self._over()
            progress = TrainProgress(self.step, self.seconds, loss, scores)
            if log:
                log.add(progress, rate)
            if report:
                report(progress)
        if log:
            log.close()
        batches.close()
        for name, module in self.job.modules.items():
            best = torch.load(self._folder / f"{name}.pt", map_location="cpu", weights_only=True)
            set_model_state_dict(module, best, options=_WHOLE)
        return self.best

    @torch.no_grad()
    def evaluate(self, every: int = 4) -> dict[str, HeldOutScore]:
        """Measure on held-out answers, with an anchor at every `every`-th token."""
        names: list[str] = []
        totals = torch.zeros(0, device=self._device)
        self._modules.eval()
        with self._averaged():
            for batch, counts in self._shares(self._batches.held_out(every, self._config.look_at)):
                moved = batch.to(self._device)
                sums = self.job.measure(moved, self._features_of(moved))
                own = torch.stack(list(sums.values()))
                if not names:
                    names, totals = list(sums), torch.zeros_like(own)
                if counts:
                    totals += own
        self._modules.train()
        self._group.sum([totals])
        loss = totals[:, CROSS_ENTROPY] / totals[:, WEIGHT].clamp(min=1e-9)
        tau = 1 + totals[:, ACCEPTED] / totals[:, BLOCKS].clamp(min=1)
        found = zip(names, loss.tolist(), tau.tolist(), strict=True)
        return {name: HeldOutScore(*values) for name, *values in found}

    def _train_step(self, batches: Iterator[Batch]) -> float:
        """Do one optimizer step; return its learning rate."""
        config, group = self._config, self._group
        rate = group.from_main(self._schedule.learning_rate(self.step))
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        totals = torch.zeros_like(self._totals)
        for _ in range(config.accumulate):
            batch = next(batches).to(self._device)
            sums = self.job.train(batch, self._features_of(batch))
            totals += torch.stack([sums[name] for name in self.job.modules])
        # Backward through sharded weights has averaged the gradients over the processes; others are summed here.
        sharded = group.sharded and self.job.root is not None
        group.sum([totals, *([] if sharded else gradients(self._modules))])
        for own, module in zip(totals, self.job.modules.values(), strict=True):
            scale = (group.size if sharded else 1) / own[WEIGHT].clamp(min=1e-9)
            for gradient in gradients(module):
                gradient.mul_(scale)
            nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._average:
            self._average.update()
        self._totals += totals
        return rate

    def _features_of(self, batch: Batch) -> Tensor:
        features = batch.features if self._features is None else self._features(batch.tokens)
        assert features is not None
        return features

    def _shares(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Give this process's share, equally many in each process; False marks a batch that must not count."""
        group, number, first = self._group, -1, None
        for number, batch in enumerate(batches):
            first = batch if first is None else first
            if number % group.size == group.rank:
                yield batch, True
        if first is not None and group.rank > number % group.size:
            yield first, False

    def _over(self) -> bool:
        over = self._group.from_main(self._schedule.over(self.step))
        return over or 0 < self._config.patience <= self._evaluations_without_gain

    def _mean_loss(self) -> dict[str, float]:
        """Return the mean objective of the steps since the last call, by module."""
        means = self._totals[:, OBJECTIVE] / self._totals[:, WEIGHT].clamp(min=1e-9)
        loss = dict(zip(self.job.modules, means.tolist(), strict=True))
        self._totals.zero_()
        if any(map(math.isnan, loss.values())):
            raise ConfigError(f"the loss is not a number at step {self.step}; lower learning_rate")
        return loss

    def _keep(self, scores: dict[str, HeldOutScore]) -> None:
        """Save the state, and the weights of each module that has its best score."""
        self._evaluations_without_gain += 1
        with self._averaged():
            for name, module in self.job.modules.items():
                if name not in self.best or scores[name].loss < self.best[name].loss:
                    self.best[name], self._evaluations_without_gain = scores[name], 0
                    self._save(_state_of(module), f"{name}.pt")
            # Copies, since on a CPU the state is the weights themselves, which get their own values back.
            averages = {
                name: copy.deepcopy(_state_of(module))
                for name, module in self.job.modules.items()
                if self._average
            }
        state = {
            "settings": self._settings(),
            "step": self.step,
            "seconds": self.seconds,
            "stale": self._evaluations_without_gain,
            "best": {name: [best.loss, best.tau] for name, best in self.best.items()},
            "modules": _state_of(self._modules),
            "optimizer": get_optimizer_state_dict(self._modules, self._optimizer, options=_WHOLE),
            "averages": averages,
        }
        self._save(state, STATE)
        self._group.wait()

    def _averaged(self) -> AbstractContextManager[None]:
        """Put the average, if there is one, in the modules' place inside the block."""
        return self._average.in_place() if self._average else nullcontext()

    def _save(self, state: dict[str, Any], name: str) -> None:
        if self._group.main:
            with atomic_write(self._folder / name) as partial:
                torch.save(state, partial)

    def _resume(self) -> None:
        path = self._folder / STATE
        if not path.exists():
            self._schedule.start(0.0)
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.get("settings") != self._settings():
            raise CheckpointError(f"{path} belongs to a fit with other settings; delete it to start anew")
        self.step, self._evaluations_without_gain = state["step"], state["stale"]
        self.best = {name: HeldOutScore(*values) for name, values in state["best"].items()}
        if self._average:
            # In the modules' place first: that is where a state is loaded into.
            for name, module in self.job.modules.items():
                set_model_state_dict(module, state["averages"][name], options=_WHOLE)
            self._average.restart(self.step)
        set_model_state_dict(self._modules, state["modules"], options=_WHOLE)
        set_optimizer_state_dict(self._modules, self._optimizer, state["optimizer"], options=_WHOLE)
        self._schedule.start(state["seconds"])

    def _settings(self) -> str:
        return json.dumps([asdict(self._config), self.job.settings], sort_keys=True)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's whole state on the CPU; empty in all processes but the main one."""
    return get_model_state_dict(module, options=_WHOLE)


class MovingAverage:
    """Exponential moving average of a module's weights; early on it forgets faster, so that the first ones fade.

    Args:
        module: the module, with its first weights.
        decay: most of the average that stays in a step, as in 0.999.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._weights = list(module.parameters())
        self._decay = decay
        self.restart(0)

    def restart(self, steps: int) -> None:
        """Take the module's present weights for the average after so many steps."""
        self._means = [weight.detach().clone() for weight in self._weights]
        self._steps = steps

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 9))
        torch._foreach_lerp_(self._means, [weight.detach() for weight in self._weights], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in the module's place inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        # The values, since a sharded weight's storage is not its own.
        for weight, mean in zip(self._weights, self._means, strict=True):
            own = weight.detach().clone()
            weight.detach().copy_(mean)
            mean.copy_(own)
