"""One engine of `vllm_speed.py`: answers prompts that come as JSON lines on standard input, timed step by step."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from watch import Watch

from ddtree.integrations.vllm.settings import PluginSettings

WAYS: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "vLLM, n-grams": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
        }
    },
    "lookup": PluginSettings(drafter="lookup").engine_arguments(),
    "demo": PluginSettings(drafter="demo").engine_arguments(),
}  # fmt: skip
"""Arguments of the engine by the way it drafts; the last two are ours."""


class Engine:
    """An engine in this process.

    Args:
        way: one of `WAYS`.
        model: folder.
        arguments: of vLLM's `LLM`, besides those of the way.
    """

    def __init__(self, way: str, model: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, **arguments, **WAYS[way])
        self.ours = "worker_cls" in WAYS[way]
        core: Any = self.llm.llm_engine.engine_core
        worker = core.engine_core.model_executor.driver_worker
        self.watch = Watch()
        self.watch.watch(getattr(worker, "worker", worker).model_runner.model, "forward", "compute_logits")
        self._asked = 0

    def answer(self, prompts: list[str], tokens: int, streams: int) -> dict[str, Any]:
        """Answer greedily, `streams` prompts at a time, and time the steps that decode so many and read no prompt.

        Returns:
            `tokens` of each answer, and of those steps: `generated` tokens, `steps`, and seconds in all (`seconds`), in
            the model (`model`) and in drafting (`draft`).
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids = [str(self._asked + place) for place in range(len(prompts))]
        self._asked += len(prompts)
        waiting = list(zip(ids, prompts, strict=True))
        counts: dict[str, list[int]] = {name: [] for name in ids}
        running: set[str] = set()
        found: dict[str, Any] = {"steps": 0, "seconds": 0.0, "model": 0.0, "draft": 0.0, "generated": 0}
        while waiting or running:
            while waiting and len(running) < streams:
                name, prompt = waiting.pop(0)
                engine.add_request(name, prompt, params)
                running.add(name)
            steady = len(running) == streams and all(counts[name] for name in running)
            before = sum(map(len, counts.values()))
            drafted, model, since = self._drafting(), self.watch.seconds, time.perf_counter()
            for output in engine.step():
                counts[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    running.remove(output.request_id)
            if steady:
                found["seconds"] += time.perf_counter() - since
                found["model"] += self.watch.seconds - model
                found["draft"] += self._drafting() - drafted
                found["generated"] += sum(map(len, counts.values())) - before
                found["steps"] += 1
        return {**found, "tokens": [counts[name] for name in ids]}

    def _drafting(self) -> float:
        if not self.ours:
            return 0.0
        return float(self.llm.collective_rpc("ddtree_counters")[0]["seconds"].get("draft", 0.0))


def serve(given: TextIO, out: TextIO) -> None:
    """Load an engine as the first line says, and answer each other line."""
    engine = Engine(**json.loads(given.readline()))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in given:
        print(json.dumps(engine.answer(**json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    # What vLLM prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
