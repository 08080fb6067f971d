"""A loaded pair as ways of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree.api import Model
from ddtree.bench.answers import Way
from ddtree.bench.baselines import Baseline
from ddtree.bench.cells import parse_all
from ddtree.bench.lanes import Lane, chosen
from ddtree.drafters import parts_of
from ddtree.errors import PromptError
from ddtree.policy import Policy, measure, memory, store
from ddtree.policy.acceptance import Acceptance


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
