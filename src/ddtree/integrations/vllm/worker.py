"""The engine's worker: vLLM's own for CPUs, with a runner that drafts and verifies trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm import (
    compat as versions,
)
from ddtree.integrations.vllm import (
    counters,
)
from ddtree.integrations.vllm import (
    tree_attention as attention,
)
from ddtree.integrations.vllm import (
    validate as refusals,
)
from ddtree.integrations.vllm.model_runner import TreeRunner

versions.check()
attention.register()


class TreeWorker(cpu_worker.CPUWorker):
    """Name it as the engine's `worker_cls`; importing this module registers the attention that trees need."""

    model_runner: TreeRunner

    def init_device(self) -> None:
        refusals.check_vllm_config(self.vllm_config)
        if self.use_v2_model_runner:
            raise UnsupportedModelError(
                "draft trees run on vLLM's V1 model runner: unset VLLM_USE_V2_MODEL_RUNNER"
            )
        # The class is looked up in the module, and no other place asks for it meanwhile.
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.prepare()
        return times

    def shutdown(self) -> None:
        runner = getattr(self, "model_runner", None)
        if isinstance(runner, TreeRunner):
            runner.remember()
        super().shutdown()

    def ddtree_counters(self) -> dict[str, Any]:
        """What was drafted and came of it so far, as plain JSON values; for the engine's `collective_rpc`."""
        runner = self.model_runner
        return {**runner.planning.figures.as_dict(), counters.FAILED: int(runner.drafting_failed)}
