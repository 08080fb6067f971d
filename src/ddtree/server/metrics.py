"""Figures of rounds and answers: Prometheus metrics, and one book of rounds for the dashboard."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ddtree.server.tokens import TokenTexts
from ddtree.tree import MAX_DEPTH

if TYPE_CHECKING:
    from ddtree.engine.engine import Round
    from ddtree.policy.controller import Policy
    from ddtree.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds of histogram buckets, in seconds: for whole answers, and for single tokens.
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WINDOW = 10.0  # seconds of rounds in the window's figures
_WINDOW_ROUNDS = 4096  # most rounds kept of that time
_ARM_ROUNDS = 256  # rounds kept of each arm
_ANSWERS = 32  # answers kept, with drafts and without
_REPORT_EVERY = 0.05  # seconds between two round reports
_TREE_EVERY = 0.1  # seconds between two drawn trees
_IDLE_TREE_EVERY = 1.0  # the same while nobody watches
_LOOK_EVERY = 0.5  # seconds between two looks at the policy
_SHOWN = 32  # controllers, and switches, that are shown
_CONTROLLER_KEY = ("method", "budget", "members", "depth", "sampled", "rows")
_log = logging.getLogger(__name__)

Watcher = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RoundRecord:
    """Hold the figures of one round of R rows.

    Attributes:
        time: when it ended, in seconds of the book's clock.
        arms: of each row, how it was drafted for, as "tree@lookup".
        nodes: of each row, the drafted nodes.
        accepted: of each row, the accepted nodes.
        seconds: by part of the round.
    """

    time: float
    arms: list[str]
    nodes: list[int]
    accepted: list[int]
    seconds: dict[str, float]

    @property
    def tokens(self) -> int:
        """Return the tokens of all rows: accepted nodes and one token of the target for each row."""
        return sum(self.accepted) + len(self.accepted)

    @property
    def duration(self) -> float:
        """Return the seconds of the whole round."""
        return sum(self.seconds.values())


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series: clients that sum lines by a part of their name would count them too."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Metrics:
    """Holds the counters, gauges and histograms of one server, for any thread to use.

    They have names of their own, and four of vLLM's that load clients read.

    Args:
        name: the model's name, as label `model_name` of vLLM's metrics. White space in it becomes "_", since their
            readers split lines at spaces.
    """

    def __init__(self, name: str) -> None:
        self.registry = registry = _Registry()

        def counter(suffix: str, text: str, *labels: str) -> Counter:
            return Counter(f"ddtree_{suffix}", text, labels, registry=registry)

        def histogram(suffix: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ddtree_{suffix}_seconds", text, buckets=buckets, registry=registry)

        self.ttft = histogram("time_to_first_token", "Submission to the first token.", _LONG)
        self.queue_time = histogram("queue_time", "Submission to the prompt's processing.", _LONG)
        self.refused = counter("refused", "Answers not admitted, by why.", "reason")
        self.engine_errors = counter("engine_errors", "Rounds that broke off.")
        self.arm_switches = counter("arm_switches", "Changes of arm by the controller.", "before", "after")
        self._tpot = histogram("time_per_output_token", "Of an answer, after its first token.", _SHORT)
        self._itl = histogram("inter_token_latency", "A round's gap, shared by the tokens it made.", _SHORT)
        self._chunks = histogram(
            "inter_chunk_latency", "Between rounds that brought an answer tokens.", _SHORT
        )
        self._latency = histogram("request_latency", "Submission to the last token.", _LONG)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts taken from the prefix cache.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._requests = counter("requests", "Answers that ended, by why.", "finish_reason")
        self._rounds = counter("rounds", "Rounds of all rows together.")
        self._arms = counter("arm_rounds", "Rounds of a row, by how it was drafted for.", "arm")
        self._parts = counter("time_seconds", "Seconds spent, by part of a round.", "part")
        nodes = counter("draft_nodes", "Drafted nodes verified.")
        accepted = counter("accepted_tokens", "Drafted nodes accepted.")
        depths = counter("accepted_tokens_per_depth", "Drafted nodes accepted, by depth.", "depth")

        labels = {"engine": "0", "model_name": "_".join(name.split())}

        def vllm(suffix: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:spec_decode_num_{suffix}", text, (*labels, *more), registry=registry)

        self._drafts = vllm("drafts", "Rounds of a row that were drafted for.").labels(**labels)
        self._nodes = (nodes, vllm("draft_tokens", "Drafted nodes.").labels(**labels))
        self._accepted = (accepted, vllm("accepted_tokens", "Accepted drafted nodes.").labels(**labels))
        positions = vllm("accepted_tokens_per_pos", "Accepted drafted nodes, by depth - 1.", "position")
        self._depths = [
            (depths.labels(depth=str(place + 1)), positions.labels(**labels, position=str(place)))
            for place in range(MAX_DEPTH)
        ]

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Report a number that is read when Prometheus asks, as `ddtree_NAME`."""
        Gauge(f"ddtree_{name}", text, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def round(self, record: RoundRecord) -> None:
        """Count a round."""
        self._rounds.inc()
        self._drafts.inc(sum(nodes > 0 for nodes in record.nodes))
        for arm in record.arms:
            self._arms.labels(arm=arm).inc()
        for nodes in self._nodes:
            nodes.inc(sum(record.nodes))
        for accepted in self._accepted:
            accepted.inc(sum(record.accepted))
        for depth in record.accepted:
            for pair in self._depths[:depth]:
                for at_depth in pair:
                    at_depth.inc()

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Count seconds by part of a round."""
        for part, more in seconds.items():
            self._parts.labels(part=part).inc(max(0.0, more))

    def tokens(self, count: int, gap: float) -> None:
        """Count tokens of an answer, `gap` seconds after its previous ones."""
        self._chunks.observe(gap)
        for _ in range(count):
            self._itl.observe(gap / count)

    def ended(self, reason: str, stats: Stats, seconds: float, tpot: float | None) -> None:
        """Count an answer that ended, with its seconds since submission and its seconds per token after the first."""
        self._requests.labels(finish_reason=reason).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._generated.inc(stats.output_tokens)
        self._latency.observe(seconds)
        if tpot is not None:
            self._tpot.observe(tpot)


class RoundBook:
    """Keeps the one record of rounds that metrics, window figures, round reports and the policy's state come from.

    Args:
        name: the model's name in metrics.
        texts: texts of a tree's tokens.
        now: a clock in seconds.

    Attributes:
        metrics: for Prometheus.
        tree: the last tree that was drawn, as in a report; None before the first.
        controllers: for each kind of request and load, what the policy's controller knows, its arm and the reason.
        switches: the last changes of arm, with Unix time, load and reason.
    """

    def __init__(self, name: str, texts: TokenTexts, now: Callable[[], float] = time.monotonic) -> None:
        self.metrics = Metrics(name)
        self.tree: dict[str, Any] | None = None
        self.controllers: list[dict[str, Any]] = []
        self.switches: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        self._texts = texts
        self._now = now
        self._lock = threading.Lock()
        self._recent: deque[RoundRecord] = deque(maxlen=_WINDOW_ROUNDS)
        self._by_arm: defaultdict[str, deque[RoundRecord]] = defaultdict(lambda: deque(maxlen=_ARM_ROUNDS))
        # Counts of a row's rounds with a draft, by accepted nodes.
        self._depths = [0] * (MAX_DEPTH + 1)
        # (seconds to the first token, seconds per token after it) of answers with and without drafts.
        self._answers: dict[bool, deque[tuple[float, float]]] = {
            drafted: deque(maxlen=_ANSWERS) for drafted in (True, False)
        }
        self._watchers: list[Watcher] = []
        self._unreported_rounds = self._unreported_tokens = 0
        self._unreported_tree: dict[str, Any] | None = None
        self._reported = self._drawn = self._looked = float("-inf")
        self._seen: dict[tuple[str, ...], int] = {}
        self._last_switch: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(self, done: Round) -> None:
        """Record a round."""
        record = RoundRecord(
            self._now(),
            [str(choice.arm) for choice in done.choices],
            [size - 1 for size in done.tree.sizes],
            [len(path) - 1 for path in done.paths],
            dict(done.seconds),
        )
        self.metrics.round(record)
        with self._lock:
            self._recent.append(record)
            for arm in set(record.arms):
                self._by_arm[arm].append(record)
            for nodes, accepted in zip(record.nodes, record.accepted, strict=True):
                if nodes:
                    self._depths[accepted] += 1
            watchers = list(self._watchers)
        due = record.time - self._drawn >= (_TREE_EVERY if watchers else _IDLE_TREE_EVERY)
        if due and any(record.nodes):
            self.tree = self._unreported_tree = self._draw(done)
            self._drawn = record.time
        self._report(record, watchers)

    def answer_ended(self, ttft: float, tpot: float, *, drafted: bool) -> None:
        """Record an answer that ended.

        Args:
            ttft: seconds from its submission to its first token.
            tpot: seconds per token after that.
            drafted: any of its rounds had a draft.
        """
        with self._lock:
            self._answers[drafted].append((ttft, tpot))

    def window_stats(self) -> dict[str, Any]:
        """Return figures of the last 10 seconds, of each arm's last 256 rounds, and of the last 32 answers.

        `tau` is tokens per row and round. `tokens_per_second` is of all rows together, in the time that rounds took; of
        an arm, it is of one row. `drafted` and `plain` are medians of answers.
        """
        with self._lock:
            since = self._now() - _WINDOW
            recent = [record for record in self._recent if record.time >= since]
            rows = sum(len(record.arms) for record in recent)
            tokens = sum(record.tokens for record in recent)
            seconds = sum(record.duration for record in recent)
            return {
                "tau": tokens / rows if rows else None,
                "tokens_per_second": tokens / seconds if seconds else None,
                "drafted": _medians(self._answers[True]),
                "plain": _medians(self._answers[False]),
                "by_arm": {arm: _arm_stats(arm, records) for arm, records in self._by_arm.items()},
            }

    def accepted_per_depth(self) -> list[float]:
        """Return for depths 1 to 16 the share of all drafted row-rounds that accepted a node there."""
        with self._lock:
            total = sum(self._depths)
            return [sum(self._depths[depth:]) / total if total else 0.0 for depth in range(1, MAX_DEPTH + 1)]

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with round reports, at most 20 per second, from the engine's thread; it must not block.

        Returns:
            A function that ends it.
        """
        with self._lock:
            self._watchers.append(watcher)
        return lambda: self._forget(watcher)

    def look_at(self, policy: Policy | None, at_once: bool = False) -> None:
        """Copy the state of the policy's controllers, at most twice per second unless `at_once`.

        The engine's thread calls it between two steps.
        """
        now = self._now()
        if policy is None or (not at_once and now - self._looked < _LOOK_EVERY):
            return
        self._looked = now
        controllers = policy.state()["groups"]
        for controller in controllers:
            key = tuple(str(controller[name]) for name in _CONTROLLER_KEY)
            load = controller.pop("rows")
            for switch in controller["switches"]:
                if switch["round"] > self._seen.get(key, 0):
                    self._seen[key] = switch["round"]
                    self._last_switch[key] = {**switch, "load": load, "at": time.time()}
                    self.switches.append(self._last_switch[key])
                    self.metrics.arm_switches.labels(before=switch["before"], after=switch["after"]).inc()
            last = self._last_switch.get(key, {})
            controller.update(load=load, reason=last.get("reason", "first choice"), at=last.get("at"))
        self.controllers = controllers[-_SHOWN:]

    def _report(self, record: RoundRecord, watchers: list[Watcher]) -> None:
        """Tell watchers of this round and of those since the last report."""
        self._unreported_rounds += 1
        self._unreported_tokens += record.tokens
        if not watchers or record.time - self._reported < _REPORT_EVERY:
            return
        report = {
            "t": time.time(),
            "rows": len(record.arms),
            "rounds": self._unreported_rounds,
            "made": self._unreported_tokens,
            "arm": ", ".join(dict.fromkeys(record.arms)),
            "accepted": record.accepted,
            "nodes": record.nodes,
            "seconds": record.seconds,
            "tree": self._unreported_tree,
        }
        self._reported = record.time
        self._unreported_rounds = self._unreported_tokens = 0
        self._unreported_tree = None
        for watcher in watchers:
            try:
                watcher(report)
            except Exception:
                _log.exception("a watcher failed and is told no more")
                self._forget(watcher)

    def _forget(self, watcher: Watcher) -> None:
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _draw(self, done: Round) -> dict[str, Any]:
        """Return the tree of the first row that has one, as plain values."""
        row = next(index for index, size in enumerate(done.tree.sizes) if size > 1)
        tree = done.tree.row(row)
        return {
            "row": row,
            "tokens": [self._texts(token)[0] for token in tree.tokens[0].tolist()],
            "parents": tree.parents[0].tolist(),
            "depths": tree.depths[0].tolist(),
            "logprobs": [round(value, 4) for value in tree.logprobs[0].tolist()],
            "path": list(done.paths[row]),
            "next": self._texts(done.rows[row].tokens[-1])[0],
        }


def _arm_stats(arm: str, records: Iterable[RoundRecord]) -> dict[str, Any]:
    rows = [
        (1 + accepted, record.duration)
        for record in records
        for name, accepted in zip(record.arms, record.accepted, strict=True)
        if name == arm
    ]
    tokens = sum(made for made, _ in rows)
    seconds = sum(spent for _, spent in rows)
    return {
        "rounds": len(rows),
        "tau": tokens / len(rows),
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def _medians(answers: Collection[tuple[float, float]]) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "ttft_p50": median(ttft for ttft, _ in answers) if answers else None,
        "tpot_p50": median(tpot for _, tpot in answers) if answers else None,
    }
