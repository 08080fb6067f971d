"""The worker: vLLM's own for CPUs, with a runner that drafts and verifies trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from ddtree.errors import UnsupportedModelError
from ddtree.integrations.vllm import release, tree_attention, validate
from ddtree.integrations.vllm.model_runner import TreeRunner

release.check()
tree_attention.register()


class TreeWorker(cpu_worker.CPUWorker):
    """The engine's `worker_cls`. Importing this module also registers the attention that trees need."""

    model_runner: TreeRunner

    def init_device(self) -> None:
        """Refuse what trees cannot be exact with, then initialize with `TreeRunner` in place of vLLM's runner."""
        validate.check_vllm_config(self.vllm_config)
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
