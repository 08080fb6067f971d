"""Methods of decoding that are compared on one pair of target and drafter.

A method of the engine is named like `tree:16@dflash+lookup`; what the drafters are called depends on the pair. Beside
them stand baselines: transformers' own `generate`. Each method is what a user would have who loaded just that.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ddtree.api import Model
from ddtree.bench.near_ties import verdict
from ddtree.drafters import DraftRow, parts_of
from ddtree.drafters.draft_model import DraftModel
from ddtree.drafters.merged import Merged
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError, PromptError
from ddtree.policy import AutoBudget, AutoMethod, cache, calibration
from ddtree.policy.acceptance import Acceptance
from ddtree.policy.controller import Policy
from ddtree.sampling.params import SamplingParams
from ddtree.stats import Clock, Stats
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree

OFF = "off"
UNCOUPLED = "+uncoupled"
BASELINES = ("hf", "prompt-lookup", "assisted")
_METHODS: dict[str, AutoMethod] = {"off": "off", "chain": "chain", "tree": "tree", "auto": "auto"}
_SYNTAX = "off, chain, tree:N, tree:auto or auto, then @DRAFTER[+DRAFTER], then +uncoupled"
_WIDTHS = sorted({round(2 ** (step / 4)) for step in range(41)})  # 1 to 1024 nodes, root included
_LOOKUP_TOKENS = 10  # the value that transformers' documentation uses


@dataclass(frozen=True)
class MethodSpec:
    """A method of the engine, parsed from its name.

    Attributes:
        name: as it was written, such as "tree:16@dflash".
        method, budget: given to the engine; a chain's budget is its depth.
        members: names of the drafters that draft; None for all there are.
        coupled: drafters may look at the noise of sampled rows.
    """

    name: str
    method: AutoMethod
    budget: AutoBudget
    members: tuple[str, ...] | None = None
    coupled: bool = True

    @property
    def adaptive(self) -> bool:
        """Return whether a policy decides something."""
        return "auto" in (self.method, self.budget)


def parse_method(text: str, members: Sequence[str] | None = None) -> MethodSpec:
    """Parse the name of a method, such as "tree:16@dflash+uncoupled".

    Args:
        members: names of the pair's drafters, none when it has no drafter; None to accept any.

    Raises:
        ConfigError: the name is malformed, names a drafter that is not there, or needs one where there is none.
    """
    body = text.removesuffix(UNCOUPLED)
    base, at, listed = body.partition("@")
    method, colon, count = base.partition(":")
    named = tuple(listed.split("+")) if at else None
    if method not in _METHODS or (method == "tree") != bool(colon):
        raise ConfigError(f"unknown cell {text!r}: write {_SYNTAX}")
    budget: AutoBudget = {"off": 0, "chain": MAX_DEPTH}.get(method, "auto")
    if method == "tree" and count != "auto":
        if not (count.isascii() and count.isdigit() and 1 <= int(count) <= MAX_BUDGET):
            raise ConfigError(f"cell {text!r}: a tree's budget is auto or a whole number in 1..{MAX_BUDGET}")
        budget = int(count)
    if method == OFF and text != OFF:
        raise ConfigError(f"cell {text!r}: off drafts nothing, so it takes no drafter and no coupling")
    if method != OFF and members is not None:
        if not members:
            raise ConfigError(f"cell {text!r} needs a drafter, and there is none: name one with --drafter")
        if unknown := [name for name in named or () if name not in members]:
            known = ", ".join(members)
            raise ConfigError(f"cell {text!r}: there is no drafter {unknown[0]!r}; choose from {known}")
    if named is not None and len(set(named)) < len(named):
        raise ConfigError(f"cell {text!r} names a drafter twice")
    return MethodSpec(text, _METHODS[method], budget, named, body == text)


def parse_methods(names: Iterable[str], members: Sequence[str] = ()) -> list[MethodSpec]:
    """Parse names, `off` first whether named or not: the others are compared with it. Raises ConfigError."""
    return [parse_method(name, members) for name in dict.fromkeys([OFF, *names])]


def default_methods(budgets: Iterable[int | str], drafting: bool = True) -> list[str]:
    """Return the methods of a run that names none, with a tree of each budget."""
    return [OFF, "chain", *(f"tree:{budget}" for budget in budgets), "auto"] if drafting else [OFF]


@dataclass
class Measurement:
    """One answer, timed.

    Attributes:
        tokens: the output.
        stats: times and counts of the answer; its arms only where a policy chose.
        comparable: the text must equal plain decoding's.
    """

    tokens: list[int]
    stats: Stats
    comparable: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the tokens; times in seconds."""
        stats = self.stats
        return {
            "tokens": len(self.tokens),
            "total_s": round(stats.total, 6),
            "decode_s": round(stats.total - stats.ttft, 6),
            "ttft_s": round(stats.ttft, 6),
            "rounds": stats.rounds,
            "nodes": stats.nodes,
            "tau": round(stats.tau, 4) if stats.rounds else None,
            "accepted_depth": {str(depth): stats.accepted[depth] for depth in sorted(stats.accepted)},
            "seconds": {part: round(seconds, 6) for part, seconds in stats.seconds.items()},
            "arms": dict(sorted(stats.arms.items())),
        }


class EngineMethod:
    """A method of ddtree's engine. Plain decoding gathers no features and feeds no drafter.

    Args:
        spec: what to measure.
        target: shared by all methods; one decodes at a time.
        drafter: of the pair, in use by no engine; the method takes the parts of it that the spec names.
        policy: decides what the spec leaves open. It is this method's alone, so that it learns from nothing else.
    """

    def __init__(self, spec: MethodSpec, target: Any, drafter: Any, policy: Policy | None = None) -> None:
        self.spec = spec
        self.name = spec.name
        self.target = target
        self.drafter = drafter_of(spec, drafter)
        self.policy = policy
        self._contexts: list[float] = []

    def answer(self, prompt: list[int], params: SamplingParams) -> Measurement:
        """Decode one prompt alone. Raises what the engine raises."""
        drafter = self.drafter if self.spec.coupled else HiddenNoise(self.drafter)
        engine = Engine(self.target, drafter, max_rows=1)
        engine.policy = self.policy
        try:
            sequence = engine.add(prompt, params, method=self.spec.method, budget=self.spec.budget)
            while not engine.idle:
                engine.step()
        finally:
            engine.close()
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.stats
        self._contexts.append(len(prompt) + stats.output_tokens / 2)
        return Measurement(sequence.output, stats if self.spec.adaptive else replace(stats, arms=Counter()))

    def learnt(self) -> list[dict[str, Any]]:
        """Return the policy's state and its latency curve at the mean context of what was decoded."""
        if self.policy is None or not self._contexts:
            return []
        context = statistics.mean(self._contexts)
        seconds = [round(self.policy.latency.verify(width - 1, 1, context), 7) for width in _WIDTHS]
        return [
            {"kind": "policy", "cell": self.name, "state": self.policy.state()},
            {"kind": "latency", "cell": self.name, "context": context, "widths": _WIDTHS, "seconds": seconds},
        ]


def drafter_of(spec: MethodSpec, drafter: Any) -> Any:
    """Return what drafts for a method: nothing, the pair's whole drafter, or some of its parts."""
    if spec.method == OFF:
        return None
    if spec.members is None:
        return drafter
    named = [part for part in parts_of(drafter) if part.name in spec.members]
    return named[0] if len(named) == 1 else Merged(named)


class HiddenNoise:
    """Drafts as another drafter does, but without sight of the noise of sampled rows."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.drafters = parts_of(drafter)

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row, as for a greedy one."""
        return self._drafter.draft([replace(row, noise=None) for row in rows], clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


class Baseline:
    """One kind of transformers' `generate`. The model runs with its own attention and without our hooks meanwhile.

    Args:
        name: one of `BASELINES`.
        target: the target whose model it is.
        drafter: of the pair; `assisted` uses the draft model in it.

    Raises:
        ConfigError: the name is unknown, or there is no draft model to assist.
    """

    def __init__(self, name: str, target: Any, drafter: Any) -> None:
        if name not in BASELINES:
            raise ConfigError(f"unknown baseline {name!r}: choose from {', '.join(BASELINES)}")
        self.name = name
        self._target = target
        self._options: dict[str, Any] = {}
        if name == "prompt-lookup":
            self._options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if name == "assisted":
            model = next((part.model for part in parts_of(drafter) if isinstance(part, DraftModel)), None)
            if model is None:
                raise ConfigError("baseline 'assisted' needs a draft model: give --drafter draft:MODEL")
            self._options["assistant_model"] = model.model

    def answer(self, prompt: list[int], params: SamplingParams) -> Measurement:
        """Decode one prompt alone, greedily or by sampling at a temperature without filters."""
        self._target.use_features(())
        torch.manual_seed(params.seed or 0)
        ids = torch.tensor([prompt], device=self._target.device)
        ends = sorted(self._target.eos_ids)
        config = GenerationConfig(
            do_sample=not params.greedy,
            max_new_tokens=params.max_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **({} if params.greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}),
        )
        model, times = self._target.model, _TokenTimes()
        own, model.generation_config = model.generation_config, config
        started = time.perf_counter()
        try:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=times, **self._options)
            tokens = output[0, len(prompt) :].tolist()
            total = time.perf_counter() - started
        finally:
            model.generation_config = own
        ttft = times[1] - started if len(times) > 1 else total
        return Measurement(tokens, Stats(total=total, ttft=ttft, seconds={}), params.greedy)

    def learnt(self) -> list[dict[str, Any]]:
        """Return nothing: a baseline learns nothing."""
        return []


class _TokenTimes(list[float]):
    """A streamer that notes when the prompt was given, then when each token came."""

    def put(self, value: Tensor) -> None:
        """Note the time."""
        self.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: no token is held back."""


DecodingMethod = EngineMethod | Baseline


class ModelPair:
    """Target and drafter of a model, taken out of its engine: each method has an engine of its own.

    Args:
        model: freshly loaded; it can no longer be used itself.
    """

    def __init__(self, model: Model) -> None:
        self.target: Any = model.target
        self.drafter: Any = model.engine.drafter
        self.tokenizer = model.tokenizer
        self._model = model
        model.engine.close()

    @property
    def members(self) -> list[str]:
        """Return the names of the drafters."""
        return [part.name for part in parts_of(self.drafter)]

    def methods(self, names: Sequence[str], baselines: Sequence[str]) -> list[DecodingMethod]:
        """Return the named methods and baselines, plain decoding first. Raises ConfigError for unknown ones."""
        specs = parse_methods(names, self.members)
        others = [Baseline(name, self.target, self.drafter) for name in dict.fromkeys(baselines)]
        return [*(EngineMethod(s, self.target, self.drafter, self._policy(s)) for s in specs), *others]

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation; without a chat template, of its texts one below the other."""
        if self.tokenizer is None:
            raise PromptError("the target has no tokenizer: a benchmark needs one")
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self._model.encode("\n\n".join(message["content"] for message in messages))
        return self._model.encode(messages)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of some tokens, without special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def compare(
        self, prompt: list[int], plain: list[int], other: list[int], params: SamplingParams
    ) -> dict[str, Any]:
        """Return the verdict on an answer's tokens beside plain decoding's, by `near_ties.verdict`."""
        return verdict(self.target, prompt, plain, other, params)

    def acceptance(self) -> dict[str, Acceptance]:
        """Return the acceptance that earlier runs or the drafter's makers have learnt: each policy begins with it."""
        if self.drafter is None:
            return {}
        return cache.recall_acceptance(cache.key(self.target, self.drafter), self._model.drafter_folder)

    def _policy(self, spec: MethodSpec) -> Policy | None:
        """Return a policy for an adaptive method, as a user's first request has it."""
        if not spec.adaptive:
            return None
        drafter = drafter_of(spec, self.drafter)
        latency = cache.obtain(
            cache.key(self.target, drafter), lambda: calibration.quick(self.target, drafter)
        )
        return Policy(latency, self.acceptance())
