"""Fitting the two parameters of noise-coupled drafting on traces of a drafter at work.

The target's token at a position is argmax(log p / T + g) with known noise g. A coupled drafter scores the candidates
softmax((log q + beta * T * g) / kappa); beta says how far q can be trusted, kappa how sharp the scores are. Both are
fitted by maximum likelihood of the tokens that the target did choose, so the scores are calibrated too. beta = 0 and
kappa = 1 are in the family: on the traces a fit never loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash, View
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN
from ddtree.sampling.params import GREEDY_BELOW, SamplingParams


@dataclass(frozen=True)
class CouplingFit:
    """The result of a fit.

    Attributes:
        beta, kappa: the parameters.
        positions: token choices that were fitted on.
        before, after: mean negative log-likelihood of them, natural logarithm, uncoupled and coupled.
    """

    beta: float
    kappa: float
    positions: int
    before: float
    after: float


class _TraceRecorder:
    """Gathers, at each position that the walk reached, the drafter's log-probabilities, the noise and the choice."""

    def __init__(self, drafter: DFlash | FirstOrder | Domino, temperature: float) -> None:
        self._ids = drafter.backbone.draft_ids
        self._device = drafter.backbone.device
        self._temperature = temperature
        self._rounds: list[tuple[DraftRow, int, Tensor | View]] = []
        self.logq: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.chosen: list[int] = []

    def __call__(self, row: DraftRow, drafted: Tensor | View) -> None:
        self._rounds.append(
            (row, len(row.tokens), drafted.clone() if isinstance(drafted, Tensor) else drafted)
        )

    def close(self, tokens: list[int]) -> None:
        """Add the rounds of a sequence that has ended with `tokens`."""
        ends = [start for _, start, _ in self._rounds[1:]] + [len(tokens)]
        for (row, start, drafted), end in zip(self._rounds, ends, strict=True):
            assert row.noise is not None
            if isinstance(drafted, Tensor):
                logprobs = drafted
            elif before := tokens[start - 1 : min(end - 1, start - 1 + row.depth)]:
                logprobs = drafted(torch.tensor(before, device=self._device))
            else:
                continue
            for depth in range(min(end - start, len(logprobs))):
                index = self._index(tokens[start + depth])
                if index is not None:
                    noise = row.noise.gumbel(start + depth)
                    self.logq.append(logprobs[depth])
                    self.noise.append(self._temperature * (noise if self._ids is None else noise[self._ids]))
                    self.chosen.append(index)
        self._rounds.clear()

    def _index(self, token: int) -> int | None:
        """Return a token's place in the draft vocabulary; None if it is outside."""
        if self._ids is None:
            return token
        found = (self._ids == token).nonzero()
        return int(found[0, 0]) if len(found) else None


def fit_coupling(
    target: Target,
    drafter: DFlash | FirstOrder | Domino,
    prompts: list[list[int]],
    *,
    temperature: float = 1.0,
    max_tokens: int = 64,
    budget: int = 16,
) -> CouplingFit:
    """Decode `prompts` at a temperature above 0 and fit (beta, kappa) to the choices made; set `drafter.coupling`.

    Raises:
        ConfigError: the temperature is 0, or no chosen token was in the draft vocabulary.
    """
    if temperature < GREEDY_BELOW:
        raise ConfigError(f"temperature={temperature} has no noise to couple to: give one above 0")
    traces = _TraceRecorder(drafter, temperature)
    drafter.coupling = PLAIN
    drafter.trace = traces
    engine = Engine(target, drafter, max_rows=1)
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        sequence = engine.add(prompt, params, budget=budget)
        while not engine.idle:
            engine.step()
        traces.close(sequence.tokens)
    drafter.trace = None
    if not traces.chosen:
        raise ConfigError("no token of the traced answers is in the draft vocabulary: give more prompts")
    fit = fit_traces(torch.stack(traces.logq), torch.stack(traces.noise), torch.tensor(traces.chosen))
    drafter.coupling = (fit.beta, fit.kappa)
    return fit


def fit_traces(logq: Tensor, noise: Tensor, chosen: Tensor) -> CouplingFit:
    """Find the maximum-likelihood (beta, kappa) of log-probabilities [N, V], noise (times T) [N, V] and choices [N]."""
    # Inference tensors cannot be differentiated through.
    logq, noise, chosen = logq.clone(), noise.clone(), chosen.to(logq.device)
    raw = torch.tensor([-2.0, 0.0], requires_grad=True, device=logq.device)

    def loss() -> Tensor:
        beta, kappa = torch.nn.functional.softplus(raw[0]), raw[1].exp()
        return torch.nn.functional.cross_entropy((logq + beta * noise) / kappa, chosen)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer = torch.optim.LBFGS([raw], max_iter=60, line_search_fn="strong_wolfe")
    optimizer.step(closure)
    before = float(torch.nn.functional.cross_entropy(logq, chosen))
    with torch.no_grad():
        after = float(loss())
        beta, kappa = float(torch.nn.functional.softplus(raw[0])), float(raw[1].exp())
    if not after < before:
        (beta, kappa), after = PLAIN, before
    return CouplingFit(beta, kappa, len(chosen), before, after)
