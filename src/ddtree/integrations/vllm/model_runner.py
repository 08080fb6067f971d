"""vLLM's worker and model runner with draft trees: one step is verify, walk, compact, observe, draft."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import cpu_worker

from ddtree.drafters.loading import folder_of, load_drafter
from ddtree.engine.planner import Planner
from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.integrations.vllm import tree_attention, validate
from ddtree.integrations.vllm.drafting import DrafterRows, DraftScheduler, EngineTarget
from ddtree.integrations.vllm.request_state import (
    RequestState,
    StepRow,
    Verified,
    as_scheduled,
    sampler_output,
    verify,
)
from ddtree.integrations.vllm.settings import DRAFTING_FAILED, KEY, WORKER, PluginSettings
from ddtree.integrations.vllm.timers import EngineTimer, runtime
from ddtree.policy import cache, calibration
from ddtree.policy.latency import LatencyTable
from ddtree.stats import Clock

# A child of vLLM's loggers, which alone are shown.
logger = init_logger("vllm.ddtree")
_LONGEST = 512
"""Tokens of context of the longest step that is timed at the start."""


class TreeWorker(cpu_worker.CPUWorker):
    """vLLM's worker for CPUs, with a runner that drafts and verifies trees: the engine's `worker_cls`."""

    model_runner: TreeRunner

    def init_device(self) -> None:
        """Refuse what trees cannot be exact with, then initialize with `TreeRunner` in place of vLLM's runner."""
        validate.check_release()
        validate.check_vllm_config(self.vllm_config)
        tree_attention.register()
        # The class is looked up in the module, and no other place asks for it meanwhile.
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, then measure what steps cost."""
        times = super().compile_or_warm_up_model()
        self.model_runner.calibrate()
        return times

    def shutdown(self) -> None:
        """Save what was learnt of the drafter."""
        runner = getattr(self, "model_runner", None)
        if isinstance(runner, TreeRunner):
            runner.save_acceptance()
        super().shutdown()

    def ddtree_counters(self) -> dict[str, Any]:
        """Return the counters as plain JSON values, for the engine's `collective_rpc`."""
        return self.model_runner.counters()


class TreeProposer:
    """Fills the place of vLLM's proposer; `TreeRunner` drafts by itself, since a tree needs more than is passed here.

    Args:
        vllm_config: unused.
    """

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, model: nn.Module) -> None:
        """Do nothing: the runner loads the drafter once it has the model."""

    def propose(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: the engine runs with another worker than the plugin's."""
        raise NotImplementedError(f"draft trees need worker_cls={WORKER!r}")


class TreeRunner(cpu_worker.CPUModelRunner):
    """vLLM's runner for CPUs, where some requests of a step bring a tree of drafted tokens.

    vLLM's scheduler sees a tree as a list of draft tokens; its shape stays here.

    Attributes:
        settings: of the plugin.
        target: vLLM's model as drafters see it.
        states: requests by name.
        drafting_failed: an error has ended drafting.

    Raises:
        ConfigError: the engine's settings for drafting are malformed.
        UnsupportedModelError: trees cannot be verified on the model.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.settings = PluginSettings.from_dict((vllm_config.additional_config or {}).get(KEY))
        validate.check_plugin(vllm_config, self.settings.nodes)
        config = vllm_config.model_config
        # They check requests in the front end, and would be refused beside drafting here.
        kept, config.logits_processors = config.logits_processors, None
        try:
            super().__init__(vllm_config, device)
        finally:
            config.logits_processors = kept
        self.states: dict[str, RequestState] = {}
        self.drafting_failed = False
        self._rows: list[StepRow] = []
        self._verified: dict[str, Verified] = {}
        self._started = 0.0

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model, and then the drafter."""
        super().load_model(load_dummy_weights)
        self.target = EngineTarget(self.model, self.model_config)
        drafter = load_drafter(self.settings.drafter, self.target)  # type: ignore[arg-type]
        if drafter is None:
            raise ConfigError("drafter='none' drafts nothing: run vLLM without ddtree's worker instead")
        if drafter.feature_layers:
            self._capture_features(drafter.feature_layers)
        self._clock = Clock()
        self._planner = Planner(self.target, drafter, self._clock)
        self._drafter_rows = DrafterRows(drafter, self.settings.feature_bytes)
        self._scheduler = DraftScheduler(
            self._drafter_rows.rows, self._planner, self._clock, self.settings.nodes, self.max_num_tokens
        )

    def _capture_features(self, layers: Sequence[int]) -> None:
        if not supports_eagle3(self.model):
            raise UnsupportedModelError(
                f"vLLM's {type(self.model).__name__} does not give the outputs of its layers, which "
                f"{self.settings.drafter} drafts from: draft with lookup or draft:MODEL"
            )
        # vLLM counts from the embedding: the output of layer i has number i + 1.
        wanted = sorted({layer + 1 for layer in layers})
        self.model.set_aux_hidden_state_layers(tuple(wanted))
        self.use_aux_hidden_state_outputs = True
        self._feature_columns = [wanted.index(layer + 1) for layer in layers]

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Make the cache; raise UnsupportedModelError unless trees can be verified on it."""
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModelError(
                "this model has several kinds of attention state, and trees are verified on full attention alone: "
                "serve it with --drafting off"
            )
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        isa = self.attn_groups[0][0].get_metadata_builder().isa
        tree_attention.check_layout(self.kv_caches[0], isa)

    def calibrate(self) -> None:
        """Measure the cost of steps where requests leave a decision to the policy; everything must be loaded."""
        drafting = self.settings.drafting
        if drafting.method == "off" or "auto" not in (drafting.method, drafting.budget):
            return
        self._planner.policy = calibration.policy_of(
            self.target,
            self._drafter_rows.drafter,
            folder_of(self.settings.drafter),
            measure=self._measure,
            runtime=runtime(self.vllm_config),
        )
        self._scheduler.reset_counters()

    def _measure(self) -> LatencyTable:
        with closing(EngineTimer(self, _LONGEST)) as timer:
            widest = min(self.settings.nodes + 1, self.max_num_tokens)
            return calibration.quick(self.target, self._drafter_rows.drafter, timer=timer, widest=widest)

    def save_acceptance(self) -> None:
        """Save what was learnt of the drafter's acceptance for the next start, where it can be written."""
        if self._planner.policy is not None:
            cache.remember(self._planner.policy, self.target, self._drafter_rows.drafter)

    def counters(self) -> dict[str, Any]:
        """Return the counters as plain JSON values."""
        return {**self._scheduler.counters.as_dict(), DRAFTING_FAILED: int(self.drafting_failed)}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn drafting off where it fails: an error would end the engine, and texts are the same without drafts."""
        try:
            yield
        except Exception:
            logger.exception("Drafting has failed, and is off from now on.")
            self.drafting_failed = True

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a step's tokens."""
        self._started = time.perf_counter()
        return super().execute_model(*args, **kwargs)

    def _update_states(self, scheduler_output: Any) -> Any:
        finished = scheduler_output.finished_req_ids
        with self._guarded():
            for name in (*finished, *(scheduler_output.preempted_req_ids or ())):
                if name in self.states and not self.drafting_failed:
                    self._drafter_rows.drop(self.states[name])
        for name in finished:
            self.states.pop(name, None)
        later = super()._update_states(scheduler_output)
        for name in self.input_batch.req_ids:
            record = self.requests[name]
            if name not in self.states:
                self.states[name] = RequestState(
                    name, record, self.settings, self.target.vocab_size, self._planner
                )
            state = self.states[name]
            state.synchronize(record)
            if state.drafts and not self.drafting_failed:
                with self._guarded():
                    self._drafter_rows.resume(state, record.num_computed_tokens)
        return later

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._rows = self._step_rows(scheduler_output.scheduled_spec_decode_tokens, num_scheduled_tokens)
        for row in self._rows:
            if row.branched:
                self.positions[row.start : row.start + row.size] = _positions(row)
        # The scheduler may fill a step up with tokens that are none.
        self.input_ids.cpu[: int(num_scheduled_tokens.sum())].clamp_(min=0)
        return result

    def _step_rows(self, drafted_tokens: dict[str, list[int]], scheduled: Any) -> list[StepRow]:
        ends = np.cumsum(scheduled).tolist()
        rows, logits = [], 0
        for index, name in enumerate(self.input_batch.req_ids):
            drafted = drafted_tokens.get(name, [])
            state, size = self.states[name], len(drafted) + 1
            base = int(self.input_batch.num_computed_tokens_cpu[index]) + int(scheduled[index]) - size
            # A step with other tokens before the drafted ones is a prompt's.
            decodes = base == len(state.tokens) - 1 and scheduled[index] == size
            tree = as_scheduled(state.drafted if decodes else None, state.tokens[-1], drafted)
            rows.append(StepRow(state, index, ends[index] - size, logits, base, tree))
            logits += size
        return rows

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        branched = [row for row in self._rows if row.branched]
        if branched:
            # All layers are of one kind, and share it.
            shared = next(iter(metadata.values()))
            shared.trees = tree_attention.batches(branched, shared.block_table, self.kv_caches[0].shape[2])
            shared.others = len(branched) < len(self._rows)
        return metadata, common

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        self._clock.seconds["verify"] += time.perf_counter() - self._started
        with self._clock("walk"):
            # A prompt that is not through chooses nothing: vLLM drops what it is given there.
            rows = [row for row in self._rows if not self.discard_request_mask.np[row.index]]
            self._verified = verify(rows, logits, self.max_model_len) if rows else {}
            dropped = Verified([0], [0])
            verified = [self._verified.get(row.state.name, dropped) for row in self._rows]
            self._compact(verified)
            count = self.input_batch.sampling_metadata.max_num_logprobs
            starts = [row.logits for row in self._rows]
            tokens, logprobs = sampler_output(verified, starts, logits, count, self.sampler)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _compact(self, verified: Sequence[Verified]) -> None:
        """Put keys and values of accepted nodes into the slots after the root's, where vLLM expects them."""
        moves = [
            (row.start + node, row.start + place)
            for row, found in zip(self._rows, verified, strict=True)
            for place, node in enumerate(found.path)
            if node != place
        ]
        if moves:
            slots = self.input_batch.block_table[0].slot_mapping.gpu
            sources, targets = slots[torch.tensor(moves)].to(torch.int64).unbind(dim=1)
            for kv_cache in self.kv_caches:
                tree_attention.move(kv_cache, sources, targets)

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
        """Return the drafted tokens of each request, after the drafter has taken in what was accepted."""
        drafted: dict[str, list[int]] = {}
        if not self.drafting_failed:
            with self._guarded():
                with self._clock("commit"):
                    self._observe(aux_hidden_states)
                drafted = self._scheduler.draft(self._rows, self._verified)
        for row in self._rows:
            if row.state.name not in drafted:
                row.state.drafted = None
        return [drafted.get(row.state.name, []) for row in self._rows]

    def _observe(self, layer_outputs: list[Tensor] | None) -> None:
        """Pass on to the drafter what was committed, with the features of the accepted paths in their order."""
        for row in self._rows:
            if not row.state.drafts:
                continue
            verified = self._verified.get(row.state.name)
            first = int(self.input_batch.num_computed_tokens_cpu[row.index])
            places = list(range(row.start - (row.base - first), row.start))
            places += [row.start] if verified is None else _accepted(row, verified)
            self._drafter_rows.observe(row.state, first, len(places), self._features(layer_outputs, places))
            if verified is not None:
                self._drafter_rows.add(row.state)

    def _features(self, layer_outputs: list[Tensor] | None, places: list[int]) -> Tensor | None:
        """Return features [len(places), F * H]: the outputs of the layers that the drafter reads, side by side."""
        if not layer_outputs or not self._drafter_rows.drafter.feature_layers:
            return None
        return torch.cat([layer_outputs[column][places] for column in self._feature_columns], dim=-1)


def _positions(row: StepRow) -> Tensor:
    """Return the absolute positions [N] of a tree's nodes."""
    return row.tree.depths[0] + row.base


def _accepted(row: StepRow, verified: Verified) -> list[int]:
    """Return the places of a row's accepted nodes among the step's tokens, in the order of its text."""
    return [row.start + node for node in verified.path]
