"""The engine's thread: it takes requests in, runs the engine, and sends new tokens to their readers.

Nothing else may use the model's engine while the thread runs.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, Literal

from ddtree.api import Model
from ddtree.engine.engine import Engine, Round
from ddtree.engine.sequence import Sequence
from ddtree.errors import DDTreeError
from ddtree.policy import Request as DraftRequest
from ddtree.server.config import DraftSettings, ServerLimits
from ddtree.server.handle import (
    BusyError,
    ClosingError,
    DeltaQueue,
    EngineError,
    GenerationRequest,
    RequestHandle,
    TimeoutReached,
    TokenDelta,
)
from ddtree.server.metrics import RoundBook
from ddtree.server.tokens import TokenTexts

_FAILING = 3  # failed rounds in a row after which the server reports that it is not ready
_LONGEST_RETRY = 60  # seconds
_log = logging.getLogger(__name__)


class EngineThread:
    """Runs the engine in a thread while there is work, and sleeps otherwise.

    All methods may be called from any thread. None waits for a round, except `shutdown`.

    Args:
        model: decodes; its owner closes it.
        name: the model's name for clients and metrics.
        drafting: how to draft where a request does not say.
        limits: how much work to accept.

    Attributes:
        book: figures of all rounds.
        texts: texts of single tokens.

    Raises:
        ConfigError: `drafting` names a drafter that is not loaded.
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        drafting: DraftSettings | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.limits = limits or ServerLimits()
        self.texts = TokenTexts(model.tokenizer)
        self.book = RoundBook(name, self.texts)
        self._drafting = self._applied = drafting or DraftSettings()
        self._drafting.check_drafter(self._engine.members)
        # New answers; None only wakes the thread, to look at what else has changed.
        self._submitted: SimpleQueue[RequestHandle | None] = SimpleQueue()
        self._handles: list[RequestHandle] = []
        self._lock = threading.Lock()
        self._open = 0  # answers submitted and not ended
        self._status: Literal["starting", "ready", "closing", "stopped", "failed"] = "starting"
        self._aborting = False  # answers are no longer waited for
        self._failures = 0  # failed rounds in a row
        self._error: str | None = None
        self._kv = self._engine.kv_bytes()
        self._mean_seconds = 1.0  # of an answer
        self._thread = threading.Thread(target=self._run, name="ddtree engine", daemon=True)
        self._engine.listener = self._record_round
        self._watch_gauges()

    @property
    def drafting(self) -> DraftSettings:
        """Return how answers are drafted where their requests do not say."""
        return self._drafting

    def set_drafting(self, drafting: DraftSettings) -> None:
        """Change `drafting` from the next round on, for running answers too. Raises ConfigError."""
        drafting.check_drafter(self._engine.members)
        self._drafting = drafting
        self._wake()

    @property
    def health(self) -> dict[str, Any]:
        """Return `live`, `ready`, `status` and `error`.

        The status is "starting", "ready", "failing", "closing", "stopped" or "failed". The error is the engine's last
        one, None after a round that succeeded.
        """
        failing = self._status == "ready" and self._failures >= _FAILING
        status = "failing" if failing else self._status
        return {
            "live": self._thread.is_alive() and status != "failed",
            "ready": status == "ready",
            "status": status,
            "error": self._error,
        }

    def start(self) -> None:
        """Start the thread. Answers may be submitted at once; they wait until the cost of rounds is measured."""
        self._thread.start()

    def shutdown(self, grace: float = 30.0) -> None:
        """Refuse new answers, finish those submitted, and end those that still run after `grace` seconds."""
        with self._lock:
            if self._status in ("starting", "ready"):
                self._status = "closing"
        if self._thread.ident is None:
            self._status = "stopped"
            return
        self._wake()
        self._thread.join(max(0.0, grace))
        if self._thread.is_alive():
            self._aborting = True
            self._wake()
            self._thread.join()

    def submit(
        self, requests: list[GenerationRequest], queue: DeltaQueue[tuple[int, TokenDelta]]
    ) -> list[RequestHandle]:
        """Submit several answers, all or none. Each puts its deltas into `queue`, with its index in `requests`.

        Raises:
            PromptError: a prompt is empty, holds unknown ids, or does not fit.
            ConfigError: a setting is unknown or out of range.
            BusyError: too many answers wait already.
            ClosingError: the server is shutting down, or cannot decode any more.
        """
        with self._lock:
            self._check_open()
            handles = [
                RequestHandle(request, self._sequence(request), queue, index)
                for index, request in enumerate(requests)
            ]
            if len(handles) > self._engine.max_rows + self.limits.max_waiting - self._open:
                self.book.metrics.count("refused", reason="busy")
                waves = self._open / self._engine.max_rows
                retry_after = max(1, min(_LONGEST_RETRY, round(self._mean_seconds * waves / 2)))
                message = f"the queue is full, with {self._open} made or waiting: try again later"
                raise BusyError(message, retry_after)
            self._open += len(handles)
            for handle in handles:
                self._submitted.put(handle)
        return handles

    def cancel(self, handle: RequestHandle) -> None:
        """End an answer; its row is free within a round. An answer that has ended stays as it is."""
        handle.cancelled = True
        self._wake()

    def state(self) -> dict[str, Any]:
        """Return what the server is doing, as plain JSON values."""
        engine, book = self._engine, self.book
        rows = len(engine.running)
        return {
            "model": self.name,
            "drafters": list(engine.members),
            "drafting": asdict(self._drafting),
            "health": self.health,
            "rows": rows,
            "max_rows": engine.max_rows,
            "waiting": max(0, self._open - rows),
            "kv": {"used": self._kv[0], "limit": self._kv[1]},
            "rolling": book.window_stats(),
            "controller": book.controllers,
            "switches": list(book.switches),
            "accepted_per_depth": book.accepted_per_depth(),
            "tree": book.tree,
        }

    @property
    def _engine(self) -> Engine:
        return self.model.engine

    def _watch_gauges(self) -> None:
        gauge = self.book.metrics.gauge
        gauge("rows_running", "Answers being made.", lambda: len(self._engine.running))
        gauge("rows_max", "Most answers made at once.", lambda: self._engine.max_rows)
        gauge("requests_waiting", "Answers that wait.", lambda: self.state()["waiting"])
        gauge("kv_used_bytes", "Keys and values in use.", lambda: self._kv[0])
        gauge("kv_limit_bytes", "Keys and values that there may be.", lambda: self._kv[1])

    def _wake(self) -> None:
        self._submitted.put(None)

    def _check_open(self) -> None:
        if self._status not in ("starting", "ready"):
            self.book.metrics.count("refused", reason="closing")
            failed = f"the server can decode no more ({self._error})"
            raise ClosingError(failed if self._status == "failed" else "the server is shutting down")
        if self._engine.closed:
            self.book.metrics.count("refused", reason="busy")
            raise BusyError("the engine is being made anew: try again", 1)

    def _sequence(self, request: GenerationRequest) -> Sequence:
        """Check a request and make its sequence; the engine's own state is not touched."""
        DraftSettings().merged(request.drafting).check_drafter(self._engine.members)
        text = self.model.detokenizer(request.params)
        return self._engine.sequence(request.prompt, request.params, self._draft_request(request), text)

    def _draft_request(self, request: GenerationRequest) -> DraftRequest:
        """Return how to draft for a request, by its own fields and the server's present settings."""
        settings = self._drafting.merged(request.drafting)
        # A renewed engine may have lost its drafter.
        named = tuple(name for name in self._engine.members if name == settings.drafter)
        members = named if settings.drafter is not None else None
        return self._engine.request(
            settings.method, settings.budget, settings.depth, members, sampled=not request.params.greedy
        )

    # All methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            self.model.prepare()
            with self._lock:
                if self._status == "starting":
                    self._status = "ready"
            while self._receive():
                if not self._engine.idle:
                    self._step()
                elif self._handles:
                    self._end_all(EngineError("it lost the answer"))
        except BaseException as error:
            self._die(error)
        else:
            self._status = "stopped"

    def _receive(self) -> bool:
        """Do what other threads asked for, waiting while there is nothing to do; return False when all is over."""
        try:
            idle = not self._handles and self._status != "closing"
            while idle or not self._submitted.empty():
                handle = self._submitted.get()
                idle = False
                if handle is not None:
                    self._handles.append(handle)
                    # The cost of rounds may have been measured since it was submitted.
                    handle.sequence.redraft(self._draft_request(handle.request))
                    self._engine.queue(handle.sequence)
            if self._drafting is not self._applied:
                self._applied = self._drafting
                for handle in self._handles:
                    handle.sequence.redraft(self._draft_request(handle.request))
            self._end_some()
        except Exception as error:
            self._recover(error)
        return bool(self._handles) or self._status != "closing" or not self._submitted.empty()

    def _end_some(self) -> None:
        """End answers that were cancelled, that took too long, or that shutdown no longer waits for."""
        if self._aborting:
            self._end_all(ClosingError("the server shut down before the answer ended"))
        longest, now = self.limits.request_timeout, time.perf_counter()
        for handle in self._handles:
            if handle.cancelled:
                self.model.cancel(handle.sequence)
            elif longest and now - handle.submitted > longest:
                self._fail(handle, TimeoutReached(f"the answer was not complete after {longest:g} seconds"))
        self._send_deltas()

    def _step(self) -> None:
        began, clock = time.perf_counter(), self._engine.clock
        before = dict(clock.seconds)
        try:
            self.model.step()
        except Exception as error:
            self._recover(error)
        waiting = set(map(id, self._engine.waiting))
        for handle in self._handles:
            if not handle.left_queue and id(handle.sequence) not in waiting:
                handle.left_queue = True
                self.book.metrics.observe("queue_time", began - handle.submitted)
        for part, seconds in clock.seconds.items():
            self.book.metrics.count("time_seconds", max(0.0, seconds - before[part]), part=part)
        self.book.look_at(self._engine.policy, at_once=self._engine.idle)
        self._send_deltas()

    def _recover(self, error: Exception) -> None:
        """End all answers after a round that failed, and go on with an engine that holds nothing."""
        _log.error("a round broke off", exc_info=error)
        self.book.metrics.count("engine_errors")
        self._failures += 1
        self._error = _one_line(error)
        failure = error if isinstance(error, DDTreeError) else EngineError(self._error)
        if self._engine.closed:
            self.model.renew()
            self._engine.listener = self._record_round
        self._end_all(failure)

    def _die(self, error: BaseException) -> None:
        """Report that this thread itself failed, and end all answers."""
        _log.critical("the server can decode no more", exc_info=error)
        with self._lock:
            self._status = "failed"
            self._error = _one_line(error)
            while not self._submitted.empty():
                handle = self._submitted.get()
                if handle is not None:
                    self._handles.append(handle)
        self._end_all(ClosingError(f"the server can decode no more ({self._error})"))

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        handle.sequence.error = error
        # A row that cannot be freed closes the engine, which the next step reports.
        with suppress(Exception):
            self.model.cancel(handle.sequence)

    def _end_all(self, error: Exception) -> None:
        for handle in self._handles:
            self._fail(handle, error)
        self._send_deltas()

    def _send_deltas(self) -> None:
        """Send what is new of each answer, and forget those that have ended."""
        self._kv = self._engine.kv_bytes()
        ended = []
        for handle in self._handles:
            delta = handle.take_new()
            if delta is None:
                continue
            self._measure(handle, delta)
            if delta.last:
                ended.append(handle)
            try:
                handle.queue.put((handle.index, delta))
            except Exception:
                _log.exception("an answer's reader failed; the answer is cancelled")
                handle.cancelled = True
        if ended:
            self._handles = [handle for handle in self._handles if handle not in ended]
            with self._lock:
                self._open -= len(ended)

    def _measure(self, handle: RequestHandle, delta: TokenDelta) -> None:
        now, metrics = time.perf_counter(), self.book.metrics
        if delta.tokens:
            if handle.ttft is None:
                handle.ttft = now - handle.submitted
                metrics.observe("time_to_first_token", handle.ttft)
            else:
                metrics.tokens(len(delta.tokens), now - handle.latest)
            handle.latest = now
        if delta.last:
            reason = "error" if delta.error is not None else str(handle.sequence.finish_reason)
            seconds = now - handle.submitted
            self.book.answer_ended(reason, handle.sequence.stats, seconds, handle.ttft, handle.tpot)
            self._mean_seconds += (seconds - self._mean_seconds) * 0.1

    def _record_round(self, done: Round) -> None:
        if self._failures:
            self._failures, self._error = 0, None
        self.book.add(done)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
