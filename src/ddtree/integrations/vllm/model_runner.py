"""The engine's model runner with draft trees: one step is verify, walk, compact, observe, draft."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ddtree.drafters.loading import folder_of, load_drafter
from ddtree.engine.planner import Planner
from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.integrations.vllm import tree_attention as attention
from ddtree.integrations.vllm import validate as refusals
from ddtree.integrations.vllm.drafting import Drafting
from ddtree.integrations.vllm.engine_target import EngineTarget
from ddtree.integrations.vllm.planning import Figures, Planning
from ddtree.integrations.vllm.request_state import Reader
from ddtree.integrations.vllm.settings import KEY, Settings
from ddtree.integrations.vllm.timers import EngineStand, runtime
from ddtree.integrations.vllm.trees import Nodes, Row
from ddtree.integrations.vllm.verify import Verified, outcome, verify
from ddtree.policy import Policy, measure, memory, store
from ddtree.policy.latency import LatencyModel
from ddtree.stats import Clock

# A child of vLLM's loggers, which alone are shown.
logger = init_logger("vllm.ddtree")
_LONGEST = 512
"""Tokens of context of the longest step that is timed at the start."""


class TreeRunner(CPUModelRunner):
    """vLLM's runner for CPUs, where some requests of a step bring a tree of drafted tokens.

    The scheduler sees a tree as a list of draft tokens; which is whose parent stays here.

    Attributes:
        drafting_failed: by an error; nothing is drafted from then on.

    Raises:
        ConfigError: the engine's settings for drafting are malformed.
        UnsupportedModelError: trees cannot be verified on the model.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.settings = Settings.from_dict((vllm_config.additional_config or {}).get(KEY))
        refusals.check_plugin(vllm_config, self.settings.nodes)
        config = vllm_config.model_config
        # They check requests in the front end, and would be refused beside drafting here.
        kept, config.logits_processors = config.logits_processors, None
        try:
            super().__init__(vllm_config, device)
        finally:
            config.logits_processors = kept
        self.readers: dict[str, Reader] = {}
        self._rows: list[Row] = []
        self._verified: dict[str, Verified] = {}
        self._started = 0.0
        self.drafting_failed = False
        self._remembered: Path | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        target = EngineTarget(self.model, self.model_config)
        drafter = load_drafter(self.settings.named, target)  # type: ignore[arg-type]
        if drafter is None:
            raise ConfigError("drafter='none' drafts nothing: run vLLM without ddtree's worker instead")
        self.target = target
        if drafter.feature_layers:
            self._ask_for_features(drafter.feature_layers)
        clock = Clock()
        self.planner = Planner(target, drafter, clock)
        self.drafting = Drafting(drafter, self.settings.feature_bytes)
        self.planning = Planning(
            self.drafting.rows, self.planner, clock, self.settings.nodes, self.max_num_tokens
        )

    def _ask_for_features(self, layers: Sequence[int]) -> None:
        if not supports_eagle3(self.model):
            raise UnsupportedModelError(
                f"vLLM's {type(self.model).__name__} does not give the outputs of its layers, which "
                f"{self.settings.drafter} drafts from: draft with lookup or draft:MODEL"
            )
        # vLLM counts from the embedding: what follows layer i has number i + 1.
        wanted = sorted({layer + 1 for layer in layers})
        self.model.set_aux_hidden_state_layers(tuple(wanted))
        self.use_aux_hidden_state_outputs = True
        self._columns = [wanted.index(layer + 1) for layer in layers]

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModelError(
                "this model has several kinds of attention state, and trees are verified on full attention alone: "
                "serve it with --drafting off"
            )
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        isa = self.attn_groups[0][0].get_metadata_builder().isa
        attention.check_layout(self.kv_caches[0], isa)

    def prepare(self) -> None:
        """Measure what steps cost, where requests leave something to decide by it; everything must be loaded."""
        drafting = self.settings.drafting
        if drafting.method == "off" or "auto" not in (drafting.method, drafting.budget):
            return
        drafter = self.drafting.drafter
        wanted = {**store.key(self.target, drafter), "runtime": runtime(self.vllm_config)}
        # Short contexts, or little memory: budgets are fixed ones then.
        with suppress(ConfigError):
            latency = store.obtain(wanted, self._measure)
            self.planner.policy = Policy(latency, memory.recall(wanted, folder_of(self.settings.named)))
            self._remembered = memory.cached(wanted)
        self.planning.figures = Figures()

    def remember(self) -> None:
        """Keep what was learnt of the drafter's acceptance for the next time, where it can be written."""
        if self._remembered is not None and self.planner.policy is not None:
            with suppress(ConfigError):
                memory.save(self._remembered, self.planner.policy.acceptance)

    def _measure(self) -> LatencyModel:
        drafter, rows = self.drafting.drafter, min(self.max_num_reqs, 4)
        width = len(drafter.feature_layers) * self.target.hidden_size
        with closing(EngineStand(self, _LONGEST, rows, width)) as stand:
            widest = min(self.settings.nodes + 1, self.max_num_tokens // rows)
            return measure.quick_on(stand, drafter, self.target, rows=rows, widest=widest)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._started = time.perf_counter()
        return super().execute_model(*args, **kwargs)

    def _update_states(self, scheduler_output: Any) -> Any:
        with self._guarded():
            for name in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
                if name in self.readers and not self.drafting_failed:
                    self.drafting.leave(self.readers[name])
        for name in scheduler_output.finished_req_ids:
            self.readers.pop(name, None)
        later = super()._update_states(scheduler_output)
        for name in self.input_batch.req_ids:
            state = self.requests[name]
            reader = self.readers.get(name)
            if reader is None:
                reader = self.readers[name] = Reader(
                    name, state, self.settings, self.target.vocab_size, self.planner
                )
            reader.follow(state)
            if reader.drafts and not self.drafting_failed:
                with self._guarded():
                    self.drafting.known(reader, state.num_computed_tokens)
        return later

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error in drafting would end the engine; without drafts it goes on, and its texts are the same."""
        try:
            yield
        except Exception:
            logger.exception("Drafting has failed, and is off from now on.")
            self.drafting_failed = True

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._rows = self._lay_out(scheduler_output, num_scheduled_tokens)
        for row in self._rows:
            if row.branched:
                self.positions[row.start : row.start + len(row.nodes)] = _positions(row)
        # The scheduler may fill a step up with tokens that are none.
        self.input_ids.cpu[: int(num_scheduled_tokens.sum())].clamp_(min=0)
        return result

    def _lay_out(self, scheduler_output: Any, scheduled: Any) -> list[Row]:
        ends = np.cumsum(scheduled).tolist()
        rows, logits = [], 0
        for index, name in enumerate(self.input_batch.req_ids):
            drafted = scheduler_output.scheduled_spec_decode_tokens.get(name, ())
            reader, count = self.readers[name], len(drafted) + 1
            base = int(self.input_batch.num_computed_tokens_cpu[index]) + int(scheduled[index]) - count
            nodes = Nodes.chain([reader.tokens[-1], *drafted])
            if reader.drafted is not None and base == len(reader.tokens) - 1 and scheduled[index] == count:
                nodes = reader.drafted.as_scheduled(reader.tokens[-1], drafted)
            rows.append(Row(index, ends[index] - count, logits, base, nodes))
            logits += count
        return rows

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        branched = [row for row in self._rows if row.branched]
        if branched:
            size = self.kv_caches[0].shape[2]
            shared = attention.with_trees(next(iter(metadata.values())), branched, len(self._rows), size)
            metadata = dict.fromkeys(metadata, shared)
        return metadata, common

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        now = time.perf_counter()
        self.planning.clock("verify", now - self._started)
        verified, moves = [], []
        self._verified = {}
        for row in self._rows:
            name = self.input_batch.req_ids[row.index]
            if self.discard_request_mask.np[row.index]:
                # A prompt that is not through; the engine drops what is sampled for it.
                verified.append(Verified([0], [0]))
                continue
            own = logits[row.logits : row.logits + len(row.nodes)]
            reader = self.readers[name]
            room = self.max_model_len - len(reader.tokens)
            found = self._verified[name] = verify(reader, row.nodes, own, room)
            verified.append(found)
            moves += [
                (row.start + node, row.start + place)
                for place, node in enumerate(found.path)
                if node != place
            ]
        self._compact(moves)
        count = self.input_batch.sampling_metadata.max_num_logprobs
        tokens, logprobs = outcome(verified, [row.logits for row in self._rows], logits, count, self.sampler)
        self.planning.clock("walk", time.perf_counter() - now)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _compact(self, moves: list[tuple[int, int]]) -> None:
        """Put keys and values of accepted nodes into the slots after the root's, where the scheduler expects them."""
        if not moves:
            return
        slots = self.input_batch.block_table[0].slot_mapping.gpu
        sources, targets = (slots[list(places)].to(torch.int64) for places in zip(*moves, strict=True))
        for kv_cache in self.kv_caches:
            attention.move(kv_cache, sources, targets)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Trees are cut to the room there is, request by request.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
    ) -> list[list[int]]:
        readers = [self.readers[name] for name in self.input_batch.req_ids]
        drafted: dict[str, list[int]] = {}
        if not self.drafting_failed:
            with self._guarded():
                started = time.perf_counter()
                self._observe(aux_hidden_states)
                self.planning.clock("commit", time.perf_counter() - started)
                drafted = self.planning.draft(readers, self._rows, self._verified)
        for reader in readers:
            if reader.name not in drafted:
                reader.drafted = None
        return [drafted.get(reader.name, []) for reader in readers]

    def _observe(self, states: list[Tensor] | None) -> None:
        """Tell the drafter what was committed, with the features of the accepted paths in their order."""
        for row in self._rows:
            name = self.input_batch.req_ids[row.index]
            reader = self.readers[name]
            if not reader.drafts:
                continue
            found = self._verified.get(name)
            first = int(self.input_batch.num_computed_tokens_cpu[row.index])
            before = row.base - first
            places = list(range(row.start - before, row.start))
            places += [row.start] if found is None else _accepted(row, found)
            self.drafting.observe(reader, first, len(places), self._features(states, places))
            if found is not None:
                self.drafting.join(reader)

    def _features(self, states: list[Tensor] | None, places: list[int]) -> Tensor | None:
        """[len(places), F * H]: the outputs of the layers that the drafter asks for, side by side."""
        if not states or not self.drafting.drafter.feature_layers:
            return None
        at: Any = torch.tensor(places)
        if places == list(range(places[0], places[0] + len(places))):
            at = slice(places[0], places[0] + len(places))
        return torch.cat([states[column][at] for column in self._columns], dim=-1)


def _positions(row: Row) -> Tensor:
    """Absolute positions [N] of a tree's nodes."""
    return torch.tensor(row.nodes.depths) + row.base


def _accepted(row: Row, found: Verified) -> list[int]:
    """Places of a row's accepted nodes among the step's tokens, in the order of its text."""
    return [row.start + node for node in found.path]
