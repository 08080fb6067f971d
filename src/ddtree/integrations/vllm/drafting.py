"""Drafting for vLLM's requests: the model as drafters see it, their rows, how much is drafted, and counts of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafters import Drafter, parts_of
from ddtree.engine.planner import Plan, Planner
from ddtree.engine.prefix_cache import PrefixCache
from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm.request_state import RequestState, StepRow, Verified
from ddtree.model import TargetWeights
from ddtree.model.architectures import eos_ids
from ddtree.model.kv_cache import Columns, drop_row
from ddtree.policy import OFF
from ddtree.stats import PARTS, Clock


class EngineTarget(TargetWeights):
    """Sizes, embedding and head of vLLM's model, for drafters. vLLM itself runs the forward passes.

    Args:
        model: as vLLM loaded it, whole on this device.
        model_config: vLLM's `ModelConfig`.

    Raises:
        UnsupportedModelError: the model's embedding is at no known place.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        self.model = model
        self.config = model_config.hf_text_config
        self.vocab_size: int = model_config.get_vocab_size()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context: int = model_config.max_model_len
        within: Any = getattr(model, "model", None)
        embedding: Any = getattr(model, "embed_tokens", None) or getattr(within, "embed_tokens", None)
        if embedding is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its embedding where it is not found, so nothing can be drafted for it: "
                "serve it with --drafting off"
            )
        # With tied weights some models keep no head of their own.
        head = getattr(model, "lm_head", None)
        tied = getattr(head, "weight", None) is None
        self.embed = VocabularyWeights(embedding, self.vocab_size)
        self.head = VocabularyWeights(embedding if tied else head, self.vocab_size)
        self.device: torch.device = self.embed.weight.device
        self.dtype: torch.dtype = self.embed.weight.dtype
        ids_alone = model_config.skip_tokenizer_init
        self.tokenizer = None if ids_alone else cached_tokenizer_from_config(model_config)
        generation = SimpleNamespace(**model_config.try_get_generation_config())
        self.packs = self.compiles = False
        self.eos_ids = eos_ids(
            SimpleNamespace(config=self.config, generation_config=generation), self.tokenizer
        )


class VocabularyWeights(nn.Module):
    """The rows of an embedding or head that belong to tokens, without vLLM's padding; shares memory with vLLM's.

    Args:
        module: has `weight`, [padded V, H], and perhaps `bias`.
        vocab_size: V, e.g. 49152.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, module: Any, vocab_size: int) -> None:
        super().__init__()
        bias = getattr(module, "bias", None)
        self.register_buffer("weight", module.weight.data[:vocab_size])
        self.register_buffer("bias", None if bias is None else bias.data[:vocab_size])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        return nn.functional.linear(hidden, self.weight, self.bias)


class DrafterRows:
    """The drafter's rows. A request has one from the end of its prompt until it is finished or preempted.

    vLLM's prefix cache spares a prompt's beginning, and with it the features that a drafter reads. So features of texts
    are kept here too, by the tokens they belong to, within a bound of memory.

    Args:
        drafter: holds no rows yet.
        feature_bytes: memory for features of texts that are processed, e.g. 256 MiB.

    Attributes:
        rows: the requests that have a row, in the drafter's order.
    """

    def __init__(self, drafter: Drafter, feature_bytes: int) -> None:
        self.drafter = drafter
        self.rows: list[RequestState] = []
        self._store: PrefixCache | None = None
        if drafter.feature_layers and feature_bytes:
            self._store = PrefixCache(feature_bytes, features=True)

    def resume(self, state: RequestState, base: int) -> None:
        """Begin, or resume, a request whose first `base` tokens vLLM has in its cache."""
        if state.observed >= base:
            return
        found = self._store.find(state.tokens[:base]) if self._store is not None else []
        parts = [part.features.clone() for part in found if part.features is not None]
        whole = sum(map(len, parts)) == base
        state.features = parts if whole else []
        state.missing = 0 if whole else base
        state.observed = base

    def observe(self, state: RequestState, base: int, count: int, features: Tensor | None) -> None:
        """Take in that the target processed `count` tokens from `base` on, with features [count, F * H]."""
        known = state.observed - base
        if known >= count:
            return
        tokens = state.tokens[state.observed : base + count]
        state.observed = base + count
        features = None if features is None else features[known:]
        row = self._row(state)
        if row is not None:
            self.drafter.observe(row, tokens, features)
            if self._store is not None:
                self._store.observe(row, features)
        elif features is not None:
            state.features.append(features)

    def add(self, state: RequestState) -> None:
        """Open a row for a request whose prompt is processed; do nothing where it has one."""
        if self._row(state) is not None:
            return
        row, tokens = len(self.rows), state.tokens[: state.observed]
        features, state.features = state.features, []
        self.drafter.add_row()
        self.rows.append(state)
        if self._store is not None:
            self._store.add_row(tokens, _no_columns, features)
        if not self.drafter.feature_layers:
            self.drafter.observe(row, tokens, None)
            return
        # Drafters that read text alone get all of it. Without its first features a network's positions are shifted,
        # which changes nothing: they count relative to each other.
        for part in parts_of(self.drafter):
            if state.missing and not part.feature_layers:
                part.observe(row, tokens[: state.missing], None)
        if features:
            self.drafter.observe(row, tokens[state.missing :], torch.cat(features))

    def drop(self, state: RequestState) -> None:
        """Forget a request that is finished or preempted; features of its text are kept."""
        row = self._row(state)
        if row is not None:
            if self._store is not None:
                self._store.drop_row(row, state.tokens[: state.observed], _no_columns)
            self.drafter.drop_row(row)
            drop_row(self.rows, row)
        state.observed, state.missing, state.features, state.fresh = 0, 0, [], True

    def _row(self, state: RequestState) -> int | None:
        return next((row for row, own in enumerate(self.rows) if own is state), None)


def _no_columns(start: int, stop: int) -> Columns:
    """Return nothing: keys and values stay with vLLM."""
    return []


@dataclass
class DraftCounters:
    """Counts of drafts and their acceptance, over all requests since the start.

    Attributes:
        seconds: time by part of the step.
        steps: verifications of a request, of the root alone included.
        drafted_steps: those with drafted nodes.
        nodes: drafted nodes verified.
        accepted: drafted nodes accepted.
        accepted_per_depth: accepted nodes by their depth.
        arms: verifications by how they were drafted for.
    """

    seconds: dict[str, float]
    steps: int = 0
    drafted_steps: int = 0
    nodes: int = 0
    accepted: int = 0
    accepted_per_depth: Counter[str] = field(default_factory=Counter)
    arms: Counter[str] = field(default_factory=Counter)

    def count(self, nodes: int, accepted: int, arm: str) -> None:
        """Count a verification of so many drafted nodes, whose path has `accepted` of them."""
        self.steps += 1
        self.drafted_steps += nodes > 0
        self.nodes += nodes
        self.accepted += accepted
        self.accepted_per_depth.update(str(depth) for depth in range(1, accepted + 1))
        self.arms[arm] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as plain JSON values."""
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }


class DraftScheduler:
    """Decides how each request is drafted for, step by step.

    Args:
        rows: the requests that have a row of the drafter, in its order; its owner keeps it up to date.
        planner: asks the policy and the drafter.
        clock: the planner's; the runner adds the time of the other parts of a step.
        most_nodes: most drafted nodes of a request, e.g. 32.
        most_tokens: tokens that a step may process, e.g. 2048.

    Attributes:
        counters: what was drafted, and what was accepted of it.
    """

    def __init__(
        self,
        rows: Sequence[RequestState],
        planner: Planner,
        clock: Clock,
        most_nodes: int,
        most_tokens: int,
    ) -> None:
        self.counters = DraftCounters(clock.seconds)
        self._rows = rows
        self._planner = planner
        self._clock = clock
        self._most_nodes = most_nodes
        self._most_tokens = most_tokens
        # Drafts that are to be verified: names of the requests, and their plan.
        self._drafted: tuple[list[str], Plan] | None = None
        self._since = 0.0
        self._seconds = dict(clock.seconds)

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self._clock.seconds.update(dict.fromkeys(PARTS, 0.0))
        self.counters = DraftCounters(self._clock.seconds)

    def draft(self, rows: Sequence[StepRow], verified: Mapping[str, Verified]) -> dict[str, list[int]]:
        """Learn from a step, and draft for the next one.

        Args:
            rows: the step's requests.
            verified: their results by name; requests whose prompt is not through have none.

        Returns:
            The tokens of the nodes besides the root, by name of the request.
        """
        decoded = [row for row in rows if row.state.name in verified]
        for row in decoded:
            arm = OFF if row.state.drafted is None else row.state.arm
            self.counters.count(row.size - 1, len(verified[row.state.name].path) - 1, str(arm))
        self._learn({row.state.name: row.size for row in rows}, verified)
        ready = {
            row.state.name for row in decoded if row.state.drafts and not row.state.ended(row.state.tokens)
        }
        places = [place for place, state in enumerate(self._rows) if state.name in ready]
        if not places:
            return {}
        with self._clock("draft"):
            # What the scheduler would cut off need not be drafted.
            most = min(self._most_nodes, max(0, self._most_tokens // len(places) - 1))
            plan = self._planner.plan(self._rows, most, places)
        tokens = {}
        for index, place in enumerate(places):
            state, tree = self._rows[place], plan.tree.row(index)
            state.fresh, state.drafted, state.arm = False, tree, plan.choices[index].arm
            tokens[state.name] = tree.tokens[0, 1:].tolist()
        self._drafted = list(tokens), plan
        return tokens

    def _learn(self, sizes: Mapping[str, int], verified: Mapping[str, Verified]) -> None:
        """Tell the policy the result of a round that was verified as drafted, with nothing processed beside it.

        A round lasts from one call to the next: its draft, its verification, and whatever else a step takes, such as
        the scheduler's work.
        """
        drafted, self._drafted = self._drafted, None
        now, before = time.perf_counter(), self._seconds
        elapsed, self._since = now - self._since, now
        self._seconds = dict(self._clock.seconds)
        if drafted is None:
            return
        names, plan = drafted
        as_drafted = dict(zip(names, plan.tree.sizes, strict=True))
        if plan.decided and sizes == as_drafted and verified.keys() == sizes.keys():
            seconds = {part: spent - before[part] for part, spent in self._seconds.items()}
            seconds["commit"] = elapsed - sum(seconds[part] for part in ("draft", "build", "verify", "walk"))
            paths = [verified[name].path for name in names]
            self._planner.learn(plan, paths, [verified[name].tokens for name in names], seconds)
