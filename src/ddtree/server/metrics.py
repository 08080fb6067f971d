"""Figures of rounds and answers: Prometheus metrics, and one book of rounds for the dashboard."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from ddtree.engine.engine import Round
from ddtree.policy.controller import Policy
from ddtree.server.tokens import TokenTexts
from ddtree.stats import Stats
from ddtree.tree import MAX_DEPTH

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
_VLLM = "vllm:spec_decode_num_"
# Text and labels of each counter. Names get the prefix "ddtree_", except vLLM's.
_COUNTERS = {
    "refused": ("Answers not admitted, by why.", "reason"),
    "engine_errors": ("Rounds that broke off.", ""),
    "arm_switches": ("Changes of arm by the controller.", "before after"),
    "prompt_tokens": ("Tokens of prompts.", ""),
    "cached_prompt_tokens": ("Tokens of prompts taken from the prefix cache.", ""),
    "generation_tokens": ("Tokens of answers.", ""),
    "requests": ("Answers that ended, by why.", "finish_reason"),
    "rounds": ("Rounds of all rows together.", ""),
    "arm_rounds": ("Rounds of a row, by how it was drafted for.", "arm"),
    "time_seconds": ("Seconds spent, by part of a round.", "part"),
    "draft_nodes": ("Drafted nodes verified.", ""),
    "accepted_tokens": ("Drafted nodes accepted.", ""),
    "accepted_tokens_per_depth": ("Drafted nodes accepted, by depth.", "depth"),
    _VLLM + "drafts": ("Rounds of a row that were drafted for.", "engine model_name"),
    _VLLM + "draft_tokens": ("Drafted nodes.", "engine model_name"),
    _VLLM + "accepted_tokens": ("Accepted drafted nodes.", "engine model_name"),
    _VLLM + "accepted_tokens_per_pos": ("Accepted nodes, by depth - 1.", "engine model_name position"),
}
# Text and buckets of each histogram `ddtree_NAME_seconds`.
_HISTOGRAMS = {
    "time_to_first_token": ("Submission to the first token.", _LONG),
    "queue_time": ("Submission to the prompt's processing.", _LONG),
    "time_per_output_token": ("Of an answer, after its first token.", _SHORT),
    "inter_token_latency": ("A round's gap, shared by the tokens it made.", _SHORT),
    "inter_chunk_latency": ("Between rounds that brought an answer tokens.", _SHORT),
    "request_latency": ("Submission to the last token.", _LONG),
}
_NOTHING: dict[str, Any] = {"rounds": 0, "made": 0, "tree": None}  # new since a report
_log = logging.getLogger(__name__)
# Clients that sum lines by a part of their name would count the `_created` series too.
prometheus_client.disable_created_metrics()

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


class Metrics:
    """Holds the counters, gauges and histograms of one server, for any thread to use.

    They have names of their own, and four of vLLM's that load clients read.

    Args:
        name: the model's name, as label `model_name` of vLLM's metrics. White space in it becomes "_", since their
            readers split lines at spaces.
    """

    def __init__(self, name: str) -> None:
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._vllm_labels = {"engine": "0", "model_name": "_".join(name.split())}
        self._counters = {
            key: Counter(key if ":" in key else f"ddtree_{key}", text, labels.split(), registry=registry)
            for key, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            key: Histogram(f"ddtree_{key}_seconds", text, buckets=buckets, registry=registry)
            for key, (text, buckets) in _HISTOGRAMS.items()
        }
        # Their readers look for these before the first round, too.
        for suffix in ("drafts", "draft_tokens", "accepted_tokens"):
            self.count(_VLLM + suffix, 0)
        for depth in range(1, MAX_DEPTH + 1):
            self._count_accepted(depth, 0)

    def count(self, name: str, more: float = 1, **labels: object) -> None:
        """Add to a counter of `_COUNTERS`, as in `count("refused", reason="busy")`."""
        if name.startswith(_VLLM):
            labels |= self._vllm_labels
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(more)

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to a histogram of `_HISTOGRAMS`."""
        self._histograms[name].observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Report a number that is read when Prometheus asks, as `ddtree_NAME`."""
        Gauge(f"ddtree_{name}", text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format (`CONTENT_TYPE`)."""
        return prometheus_client.generate_latest(self._registry)

    def round(self, record: RoundRecord) -> None:
        """Count a round."""
        self.count("rounds")
        self.count(_VLLM + "drafts", sum(nodes > 0 for nodes in record.nodes))
        for arm in record.arms:
            self.count("arm_rounds", arm=arm)
        for name in ("draft_nodes", _VLLM + "draft_tokens"):
            self.count(name, sum(record.nodes))
        for name in ("accepted_tokens", _VLLM + "accepted_tokens"):
            self.count(name, sum(record.accepted))
        for depth in range(1, max(record.accepted) + 1):
            self._count_accepted(depth, sum(accepted >= depth for accepted in record.accepted))

    def tokens(self, count: int, gap: float) -> None:
        """Count tokens of an answer, `gap` seconds after its previous ones."""
        self.observe("inter_chunk_latency", gap)
        for _ in range(count):
            self.observe("inter_token_latency", gap / count)

    def _count_accepted(self, depth: int, nodes: int) -> None:
        self.count("accepted_tokens_per_depth", nodes, depth=depth)
        self.count(_VLLM + "accepted_tokens_per_pos", nodes, position=depth - 1)


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
        self._unreported = dict(_NOTHING)
        self._reported = self._drawn = self._looked = float("-inf")
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
            self.tree = self._unreported["tree"] = self._draw(done)
            self._drawn = record.time
        self._report(record, watchers)

    def answer_ended(
        self, reason: str, stats: Stats, seconds: float, ttft: float | None = None, tpot: float | None = None
    ) -> None:
        """Record an answer that ended.

        Args:
            reason: as `Sequence.finish_reason`.
            stats: its figures.
            seconds: from its submission to its end.
            ttft: seconds from its submission to its first token, if it has one.
            tpot: seconds per token after that, if it has more.
        """
        self.metrics.count("requests", finish_reason=reason)
        self.metrics.count("prompt_tokens", stats.prompt_tokens)
        self.metrics.count("cached_prompt_tokens", stats.cached_tokens)
        self.metrics.count("generation_tokens", stats.output_tokens)
        self.metrics.observe("request_latency", seconds)
        if ttft is not None and tpot is not None:
            self.metrics.observe("time_per_output_token", tpot)
            with self._lock:
                self._answers[any(arm != "off" for arm in stats.arms)].append((ttft, tpot))

    def window_stats(self) -> dict[str, Any]:
        """Return figures of the last 10 seconds, of each arm's last 256 rounds, and of the last 32 answers.

        `tau` is tokens per row and round. `tokens_per_second` is of all rows together, in the time that rounds took; of
        an arm, it is of one row. `drafted` and `plain` are medians of answers.
        """
        with self._lock:
            since = self._now() - _WINDOW
            recent = [record for record in self._recent if record.time >= since]
            return {
                **_rates([(len(record.arms), record.tokens, record.duration) for record in recent]),
                "drafted": _medians(self._answers[True]),
                "plain": _medians(self._answers[False]),
                "by_arm": {arm: self._arm_stats(arm) for arm in self._by_arm},
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
            last = self._last_switch.get(key)
            for switch in controller["switches"]:
                if last is None or switch["round"] > last["round"]:
                    last = self._last_switch[key] = {**switch, "load": load, "at": time.time()}
                    self.switches.append(last)
                    self.metrics.count("arm_switches", before=switch["before"], after=switch["after"])
            since = last or {"reason": "first choice", "at": None}
            controller.update(load=load, reason=since["reason"], at=since["at"])
        self.controllers = controllers[-_SHOWN:]

    def _arm_stats(self, arm: str) -> dict[str, Any]:
        rows = [
            (1, 1 + accepted, record.duration)
            for record in self._by_arm[arm]
            for name, accepted in zip(record.arms, record.accepted, strict=True)
            if name == arm
        ]
        return {"rounds": len(rows), **_rates(rows)}

    def _report(self, record: RoundRecord, watchers: list[Watcher]) -> None:
        """Tell watchers of this round and of those since the last report."""
        self._unreported["rounds"] += 1
        self._unreported["made"] += record.tokens
        if not watchers or record.time - self._reported < _REPORT_EVERY:
            return
        report = {
            "t": time.time(),
            "rows": len(record.arms),
            "arm": ", ".join(dict.fromkeys(record.arms)),
            "accepted": record.accepted,
            "nodes": record.nodes,
            "seconds": record.seconds,
            **self._unreported,
        }
        self._reported, self._unreported = record.time, dict(_NOTHING)
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


def _rates(rounds: Collection[tuple[int, int, float]]) -> dict[str, Any]:
    """Return `tau` and `tokens_per_second` of rounds, given as (rows, tokens, seconds); None where there are none."""
    rows, tokens, seconds = (sum(column) for column in zip((0, 0, 0.0), *rounds, strict=True))
    return {
        "tau": tokens / rows if rows else None,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def _medians(answers: Collection[tuple[float, float]]) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "ttft_p50": median(ttft for ttft, _ in answers) if answers else None,
        "tpot_p50": median(tpot for _, tpot in answers) if answers else None,
    }
