"""What a server tells Prometheus: its own names, and the four of vLLM's that load clients read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ddtree.tree import MAX_DEPTH

if TYPE_CHECKING:
    from ddtree.engine.engine import Round
    from ddtree.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class _Registry(CollectorRegistry):
    """Without the `_created` series: clients that sum lines by a part of their name would count them too."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Metrics:
    """Counters, gauges and histograms of one server. Any thread may use them.

    Args:
        name: of the model, the label `model_name` of vLLM's names; white space in it becomes "_", since their readers
            split lines at spaces.

    Attributes:
        registry: this server's own.
    """

    def __init__(self, name: str) -> None:
        self.registry = registry = _Registry()

        def counter(suffix: str, text: str, *labels: str) -> Counter:
            return Counter(f"ddtree_{suffix}", text, labels, registry=registry)

        def histogram(suffix: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ddtree_{suffix}_seconds", text, buckets=buckets, registry=registry)

        self._ttft = histogram("time_to_first_token", "Submission to the first token.", _LONG)
        self._tpot = histogram("time_per_output_token", "Of an answer, after its first token.", _SHORT)
        self._itl = histogram("inter_token_latency", "A round's gap, shared by the tokens it made.", _SHORT)
        self._chunks = histogram(
            "inter_chunk_latency", "Between rounds that brought an answer tokens.", _SHORT
        )
        self._queued = histogram("queue_time", "Submission to the prompt's processing.", _LONG)
        self._latency = histogram("request_latency", "Submission to the last token.", _LONG)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts taken from the prefix store.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._requests = counter("requests", "Answers that ended, by why.", "finish_reason")
        self._refused = counter("refused", "Answers not admitted, by why.", "reason")
        self._failures = counter("engine_errors", "Rounds that broke off.")
        self._rounds = counter("rounds", "Rounds of all rows together.")
        self._nodes = counter("draft_nodes", "Drafted nodes verified.")
        self._accepted = counter("accepted_tokens", "Drafted nodes accepted.")
        self._depths = counter("accepted_tokens_per_depth", "Drafted nodes accepted, by depth.", "depth")
        self._arms = counter("arm_rounds", "Rounds of a row, by how it was drafted for.", "arm")
        self._switches = counter("arm_switches", "Changes of arm by the controller.", "before", "after")
        self._parts = counter("time_seconds", "Seconds spent, by part of a round.", "part")
        self._gauges: dict[str, Gauge] = {}

        labels = {"engine": "0", "model_name": "_".join(name.split())}

        def vllm(suffix: str, text: str, *more: str) -> Counter:
            full = f"vllm:spec_decode_num_{suffix}"
            return Counter(full, text, (*labels, *more), registry=registry)

        self._vllm_drafts = vllm("drafts", "Rounds of a row that were drafted for.").labels(**labels)
        self._vllm_nodes = vllm("draft_tokens", "Drafted nodes.").labels(**labels)
        self._vllm_accepted = vllm("accepted_tokens", "Accepted drafted nodes.").labels(**labels)
        per_depth = vllm("accepted_tokens_per_pos", "Accepted drafted nodes, by depth - 1.", "position")
        self._vllm_depths = [per_depth.labels(**labels, position=str(place)) for place in range(MAX_DEPTH)]
        self._own_depths = [self._depths.labels(depth=str(place + 1)) for place in range(MAX_DEPTH)]

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Report a number that is read when Prometheus asks, as `ddtree_NAME`."""
        gauge = self._gauges[name] = Gauge(f"ddtree_{name}", text, registry=self.registry)
        gauge.set_function(read)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def round(self, done: Round) -> None:
        """Count a round."""
        self._rounds.inc()
        drafted = nodes = accepted = 0
        for choice, size, path in zip(done.choices, done.tree.sizes, done.paths, strict=True):
            self._arms.labels(arm=str(choice.arm)).inc()
            drafted += size > 1
            nodes += size - 1
            accepted += len(path) - 1
            for place in range(len(path) - 1):
                self._own_depths[place].inc()
                self._vllm_depths[place].inc()
        for counters, count in (
            ((self._vllm_drafts,), drafted),
            ((self._nodes, self._vllm_nodes), nodes),
            ((self._accepted, self._vllm_accepted), accepted),
        ):
            for counter in counters:
                counter.inc(count)

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Count seconds by part of a round."""
        for part, more in seconds.items():
            self._parts.labels(part=part).inc(max(0.0, more))

    def switched(self, before: str, after: str) -> None:
        """Count a change of arm."""
        self._switches.labels(before=before, after=after).inc()

    def refused(self, reason: str) -> None:
        """Count an answer that was not admitted."""
        self._refused.labels(reason=reason).inc()

    def failed(self) -> None:
        """Count a round that broke off."""
        self._failures.inc()

    def queued(self, seconds: float) -> None:
        """An answer has left the queue after so long."""
        self._queued.observe(seconds)

    def first(self, seconds: float) -> None:
        """An answer's first token came so long after its submission."""
        self._ttft.observe(seconds)

    def tokens(self, count: int, gap: float) -> None:
        """An answer got tokens, so long after its last ones."""
        self._chunks.observe(gap)
        for _ in range(count):
            self._itl.observe(gap / count)

    def ended(self, reason: str, stats: Stats, seconds: float, tpot: float | None) -> None:
        """An answer ended: why, its figures, how long after submission, and its seconds a token after the first."""
        self._requests.labels(finish_reason=reason).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._generated.inc(stats.output_tokens)
        self._latency.observe(seconds)
        if tpot is not None:
            self._tpot.observe(tpot)
