"""Cells as ways of decoding on one pair: each is what a user would have who loaded just that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig

from ddtree.api import Model
from ddtree.drafters import parts_of
from ddtree.drafters.draft_model import DraftModel
from ddtree.drafters.merged import Merged
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError, PromptError
from ddtree.policy import AutoBudget, AutoMethod, Policy, measure, memory, store
from ddtree.policy.acceptance import Acceptance
from ddtree.sampling.noise import PLAIN
from ddtree.sampling.sampler import SamplingParams
from ddtree.tree import MAX_BUDGET, MAX_DEPTH

OFF_CELL = "off"
UNCOUPLED = "+uncoupled"
_FORMS = "off, chain, tree:N, tree:auto or auto, then @DRAFTER[+DRAFTER], then +uncoupled"


@dataclass(frozen=True)
class Cell:
    """One way of decoding.

    Attributes:
        name: as it was written.
        method, budget: what the engine is given; a chain's budget is its depth.
        members: names of the drafters that draft; None for all there are.
        coupled: sampled rows' noise may be looked at while drafting.
    """

    name: str
    method: AutoMethod
    budget: AutoBudget
    members: tuple[str, ...] | None = None
    coupled: bool = True

    @property
    def adaptive(self) -> bool:
        """Something is left for a policy to decide."""
        return "auto" in (self.method, self.budget)


def parse(text: str, members: Sequence[str] = ()) -> Cell:
    """A cell by its name.

    Args:
        members: names of the drafters at hand; none when the pair has no drafter.

    Raises:
        ConfigError: the name is malformed, names a drafter that is not there, or needs one where there is none.
    """
    body = text.removesuffix(UNCOUPLED)
    way, at, listed = body.partition("@")
    method, colon, count = way.partition(":")
    named = tuple(listed.split("+")) if at else None
    budget = _budget(method, count, colon, text)
    if method == OFF_CELL and text != OFF_CELL:
        raise ConfigError(f"cell {text!r}: off drafts nothing, so it takes no drafter and no coupling")
    if method != OFF_CELL and not members:
        raise ConfigError(f"cell {text!r} needs a drafter, and there is none: name one with --drafter")
    for name in named or ():
        if name not in members:
            raise ConfigError(
                f"cell {text!r}: there is no drafter {name!r}; choose from {', '.join(members)}"
            )
    if named is not None and len(set(named)) < len(named):
        raise ConfigError(f"cell {text!r} names a drafter twice")
    return Cell(text, _METHODS[method], budget, named, body == text)


def parse_all(names: Iterable[str], members: Sequence[str] = ()) -> list[Cell]:
    """Cells by their names, `off` first whether named or not: everything is compared with it. Raises ConfigError."""
    return [parse(name, members) for name in dict.fromkeys([OFF_CELL, *names])]


def usual(budgets: Iterable[int | str], drafting: bool = True) -> list[str]:
    """The cells of a run that names none."""
    return [OFF_CELL, "chain", *(f"tree:{budget}" for budget in budgets), "auto"] if drafting else [OFF_CELL]


_METHODS: dict[str, AutoMethod] = {"off": "off", "chain": "chain", "tree": "tree", "auto": "auto"}


def _budget(method: str, count: str, colon: str, text: str) -> AutoBudget:
    if method not in _METHODS or (method == "tree") != bool(colon):
        raise ConfigError(f"unknown cell {text!r}: write {_FORMS}")
    if method == "auto" or count == "auto":
        return "auto"
    if method != "tree":
        return MAX_DEPTH if method == "chain" else 0
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= MAX_BUDGET):
        raise ConfigError(f"cell {text!r}: a tree's budget is auto or a whole number in 1..{MAX_BUDGET}")
    return int(count)


@dataclass
class Answer:
    """One measurement.

    Attributes:
        tokens: the output.
        total: seconds from the prompt to the end.
        ttft: of these, until the first token; the rest is decoding.
        rounds, nodes: forward passes after the prompt's, drafted nodes verified in them.
        accepted: how often so many drafted tokens were accepted in a round.
        seconds: by part of the round.
        arms: how many rounds were decoded in which way, where that was chosen round by round.
        comparable: the text must be that of plain decoding.
    """

    tokens: list[int]
    total: float
    ttft: float
    rounds: int = 0
    nodes: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    arms: dict[str, int] = field(default_factory=dict)
    comparable: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the tokens."""
        rounds = self.rounds
        drafted = sum(depth * count for depth, count in self.accepted.items())
        return {
            "tokens": len(self.tokens),
            "total_s": round(self.total, 6),
            "decode_s": round(self.total - self.ttft, 6),
            "ttft_s": round(self.ttft, 6),
            "rounds": rounds,
            "nodes": self.nodes,
            "tau": round(1 + drafted / rounds, 4) if rounds else None,
            "accepted_depth": {str(depth): self.accepted[depth] for depth in sorted(self.accepted)},
            "seconds": {part: round(seconds, 6) for part, seconds in self.seconds.items()},
            "arms": dict(sorted(self.arms.items())),
        }


class Way(Protocol):
    """A way of decoding."""

    name: str

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone, and measure it."""

    def learnt(self) -> list[dict[str, Any]]:
        """Lines for the raw figures: what it has learnt of the machine and of acceptance."""


_WIDTHS = sorted({round(2 ** (step / 4)) for step in range(41)})
"""Nodes at which a latency curve is written down: 1 to 1024, root included."""


class Lane:
    """One cell. Plain decoding gathers no features and feeds no drafter.

    Args:
        cell: what to measure.
        target: shared by all lanes; one decodes at a time.
        drafter: of the pair, in use by no engine; the lane takes those parts of it that the cell names.
        policy: decides what the cell leaves open, and is this lane's alone, so that it learns from nothing else.
    """

    def __init__(self, cell: Cell, target: Any, drafter: Any, policy: Any = None) -> None:
        self.cell = cell
        self.name = cell.name
        self.target = target
        self.drafter = chosen(cell, drafter)
        self.policy = policy
        self._contexts: list[float] = []

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone. Raises what the engine raises."""
        with _coupling(self.drafter, self.cell.coupled):
            engine = Engine(self.target, self.drafter, max_rows=1)
            engine.policy = self.policy
            try:
                sequence = engine.add(prompt, params, method=self.cell.method, budget=self.cell.budget)
                while not engine.idle:
                    engine.step()
            finally:
                engine.close()
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.stats
        self._contexts.append(len(prompt) + stats.output_tokens / 2)
        return Answer(
            sequence.output, stats.total, stats.ttft, stats.rounds, stats.nodes, dict(stats.accepted),
            dict(stats.seconds), dict(stats.arms) if self.cell.adaptive else {},
        )  # fmt: skip

    def learnt(self) -> list[dict[str, Any]]:
        """The policy's state and its latency curve, at the mean context of what was decoded."""
        if self.policy is None or not self._contexts:
            return []
        context = statistics.mean(self._contexts)
        seconds = [round(self.policy.costs.verify(width - 1, 1, context), 7) for width in _WIDTHS]
        return [
            {"kind": "policy", "cell": self.name, "state": self.policy.state()},
            {"kind": "latency", "cell": self.name, "context": context, "widths": _WIDTHS, "seconds": seconds},
        ]


def chosen(cell: Cell, drafter: Any) -> Any:
    """What drafts for a cell: nothing, the whole drafter, or some of its parts."""
    if cell.method == "off":
        return None
    if cell.members is None:
        return drafter
    named = [part for part in parts_of(drafter) if part.name in cell.members]
    return named[0] if len(named) == 1 else Merged(named)


@contextmanager
def _coupling(drafter: Any, coupled: bool) -> Iterator[None]:
    """Inside the block, a drafter that shall not look at the noise does not."""
    changed = [] if coupled else [part for part in parts_of(drafter) if hasattr(part, "coupling")]
    before = [part.coupling for part in changed]
    for part in changed:
        part.coupling = PLAIN
    try:
        yield
    finally:
        for part, coupling in zip(changed, before, strict=True):
            part.coupling = coupling


NAMES = ("hf", "prompt-lookup", "assisted")
_LOOKUP_TOKENS = 10  # the value that transformers' documentation uses


class Baseline:
    """One kind of `generate`. The model runs with its own attention and without our hooks meanwhile.

    Args:
        name: one of `NAMES`.
        target: whose model it is.
        drafter: of the pair; `assisted` uses the draft model in it.

    Raises:
        ConfigError: the name is unknown, or there is no draft model to assist.
    """

    def __init__(self, name: str, target: Any, drafter: Any) -> None:
        if name not in NAMES:
            raise ConfigError(f"unknown baseline {name!r}: choose from {', '.join(NAMES)}")
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

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone, greedily or by sampling at a temperature without filters."""
        self._target.use_features(())
        torch.manual_seed(params.seed or 0)
        ids = torch.tensor([prompt], device=self._target.device)
        model, watch = self._target.model, _Watch(len(prompt))
        own, model.generation_config = model.generation_config, self._config(params)
        started = time.perf_counter()
        try:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **self._options)
            tokens = output[0, len(prompt) :].tolist()
            ended = time.perf_counter()
        finally:
            model.generation_config = own
        first = watch.first if watch.first is not None else ended
        return Answer(tokens, ended - started, first - started, comparable=params.greedy)

    def learnt(self) -> list[dict[str, Any]]:
        return []

    def _config(self, params: SamplingParams) -> GenerationConfig:
        ends = sorted(self._target.eos_ids)
        sampling = {} if params.greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            do_sample=not params.greedy,
            max_new_tokens=params.max_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **sampling,
        )


class _Watch:
    """A streamer that notes when the first token came; transformers gives it the prompt first."""

    def __init__(self, prompt_tokens: int) -> None:
        self.first: float | None = None
        self._prompt_given = False

    def put(self, value: Tensor) -> None:
        if self._prompt_given and self.first is None:
            self.first = time.perf_counter()
        self._prompt_given = True

    def end(self) -> None:
        """Nothing is kept back."""


class Pair:
    """Target and drafter of a model, taken out of its engine: each way of decoding has one of its own.

    Args:
        model: freshly loaded; it can no longer be used itself.
    """

    def __init__(self, model: Model) -> None:
        self.target: Any = model.target
        self.drafter: Any = model.engine.drafter
        self.tokenizer = model.tokenizer
        self._model = model
        self._drafter_folder = model.drafter_folder
        model.engine.close()

    @property
    def members(self) -> list[str]:
        """Names of the drafters."""
        return [part.name for part in parts_of(self.drafter)]

    def ways(self, cells: Sequence[str], baselines: Sequence[str]) -> list[Way]:
        """Cells and baselines, plain decoding first. Raises ConfigError for unknown ones."""
        known = parse_all(cells, self.members)
        others = [Baseline(name, self.target, self.drafter) for name in dict.fromkeys(baselines)]
        lanes = []
        for cell in known:
            policy = self._policy(chosen(cell, self.drafter)) if cell.adaptive else None
            lanes.append(Lane(cell, self.target, self.drafter, policy))
        return [*lanes, *others]

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation; without a chat template, of its texts one below the other."""
        if self.tokenizer is None:
            raise PromptError("the target has no tokenizer: a benchmark needs one")
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self._model.encode("\n\n".join(message["content"] for message in messages))
        return self._model.encode(messages)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def acceptance(self) -> dict[str, Acceptance]:
        """What earlier runs, or the drafter's makers, have learnt of the pair: where each policy begins."""
        if self.drafter is None:
            return {}
        return memory.recall(store.key(self.target, self.drafter), self._drafter_folder)

    def _policy(self, drafter: Any) -> Policy:
        """One of its own, as a user's first request has it."""
        wanted = store.key(self.target, drafter)
        latency = store.obtain(wanted, lambda: measure.quick(self.target, drafter))
        return Policy(latency, self.acceptance())
