"""The one thread that decodes, and what the rest of a server says to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddtree.api import Model
from ddtree.engine.engine import Engine, Round
from ddtree.errors import ConfigError, DDTreeError
from ddtree.policy import Request
from ddtree.sampling.sampler import SamplingParams
from ddtree.server.controllers import Controllers
from ddtree.server.drafting import Drafting
from ddtree.server.events import Event
from ddtree.server.limits import BusyError, ClosingError, EngineError, Limits, TimeoutReached
from ddtree.server.metrics import Metrics
from ddtree.server.reports import Reports
from ddtree.server.rolling import Rolling
from ddtree.server.ticket import Ticket
from ddtree.server.tokens import TokenTexts

_UNDECIDED = Request("off", 0, (), 0)
_FAILING = 3  # broken rounds in a row after which the service is not ready
_LONGEST_RETRY = 60
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """One answer to be made: `submit`'s arguments.

    Attributes:
        prompt: token ids.
        params: how to sample.
        deliver: called with each event, from the engine's thread; must not block. One that raises is told no more, and
            its answer is cancelled.
        drafting: fields of `Drafting` that this answer fixes; the others follow the server's setting, live.
        text: make text of the tokens; False leaves `Event.text` empty.
    """

    prompt: list[int]
    params: SamplingParams
    deliver: Callable[[Event], None]
    drafting: Mapping[str, Any] | None = None
    text: bool = True


class Service:
    """Owns a thread that runs the engine while there is work and sleeps otherwise.

    Nothing else may use the model's engine meanwhile. All methods may be called from any thread, and none waits for a
    round, except `shutdown` and `wait_ready`.

    Args:
        model: decodes; closing it stays its owner's.
        name: what the model is called in figures.
        drafting: how to draft where a request says nothing.
        limits: how much to take on.

    Attributes:
        metrics: for Prometheus.
        texts: of single tokens.

    Raises:
        ConfigError: `drafting` names a drafter that is not loaded.
    """

    def __init__(
        self, model: Model, *, name: str, drafting: Drafting | None = None, limits: Limits | None = None
    ) -> None:
        self.model = model
        self.name = name
        self.limits = limits or Limits()
        self.metrics = Metrics(name)
        self._drafting = drafting or Drafting()
        self._drafting.check_drafter(model.engine.members)
        self._rolling = Rolling()
        self.texts = TokenTexts(model.tokenizer)
        self._reports = Reports(self.texts)
        self._controllers = Controllers(self.metrics.switched)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open = 0
        self._closing = False
        self._ready, self._over = threading.Event(), threading.Event()
        self._error: str | None = None
        self._broken = 0
        self._dead = False
        self._tickets: list[Ticket] = []
        self._seconds = dict(self._engine.clock.seconds)
        self._kv = self._engine.kv_bytes()
        self._pace = 1.0
        self._thread = threading.Thread(target=self._run, name="ddtree engine", daemon=True)
        self._engine.listener = self._listen
        self._watch_gauges()

    @property
    def drafting(self) -> Drafting:
        """How answers are drafted for where their requests say nothing."""
        return self._drafting

    def set_drafting(self, drafting: Drafting) -> None:
        """Change that, from the next round on, of running answers too; texts stay the same. Raises ConfigError."""
        drafting.check_drafter(self._engine.members)
        self._drafting = drafting
        self._post(self._redraft)

    @property
    def health(self) -> dict[str, Any]:
        """`live`, `ready`, `status` ("starting", "ready", "failing", "closing", "stopped" or "failed") and `error`, the
        engine's last one if no round has gone well since."""
        if self._dead:
            status = "failed"
        elif self._over.is_set():
            status = "stopped"
        elif self._closing:
            status = "closing"
        elif not self._ready.is_set():
            status = "starting"
        else:
            status = "failing" if self._broken >= _FAILING else "ready"
        return {
            "live": self._thread.is_alive() and not self._dead,
            "ready": status == "ready",
            "status": status,
            "error": self._error,
        }

    def start(self) -> None:
        """Start the thread; answers may be submitted, and wait until it has measured what rounds cost here."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until answers are being made; False when that has not come about."""
        return self._ready.wait(timeout) and self.health["ready"]

    def shutdown(self, grace: float = 30.0) -> None:
        """Refuse new answers, finish those admitted, and end what is left after `grace` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is None:
            self._over.set()
        elif not self._over.wait(max(0.0, grace)):
            self._post(lambda: self._end(ClosingError("the server shut down before the answer ended")))
        if self._thread.ident is not None:
            self._thread.join()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        drafting: Mapping[str, Any] | None = None,
        text: bool = True,
    ) -> Ticket:
        """Ask for an answer; see `Asked`.

        Raises:
            PromptError: the prompt is empty, holds unknown ids, or does not fit.
            ConfigError: a setting is unknown or out of range.
            BusyError: too many wait already.
            ClosingError: the server is shutting down, or cannot decode any more.
        """
        return self.submit_all([Asked(prompt, params, deliver, drafting, text)])[0]

    def submit_all(self, asked: Sequence[Asked]) -> list[Ticket]:
        """As `submit`, of several answers, which are admitted together or not at all."""
        self._check_open()
        tickets = [self._ticket(one) for one in asked]
        with self._wake:
            self._check_open()
            room = self._engine.max_rows + self.limits.max_waiting - self._open
            if len(tickets) > room:
                self.metrics.refused("busy")
                raise BusyError(
                    f"the queue is full, with {self._open} made or waiting: try again later",
                    self._retry_after(),
                )
            self._open += len(tickets)
            self._inbox.extend([lambda one=one: self._admit(one) for one in tickets])  # type: ignore[misc]
            self._wake.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """End an answer; its row is free within a round. Nothing happens to one that has ended."""
        self._post(lambda: self._cancel(ticket))

    def watch(self, deliver: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call `deliver` with reports of rounds, some 20 a second at most, from the engine's thread; it must not block.

        Returns what ends that.
        """
        return self._reports.watch(deliver)

    def state(self) -> dict[str, Any]:
        """What goes on, as plain JSON values."""
        engine = self._engine
        used, limit = self._kv
        rows = len(engine.running)
        return {
            "model": self.name,
            "drafters": list(engine.members),
            "drafting": self._drafting.as_dict(),
            "health": self.health,
            "rows": rows,
            "max_rows": engine.max_rows,
            "waiting": max(0, self._open - rows),
            "kv": {"used": used, "limit": limit},
            "rolling": self._rolling.figures(),
            "controller": self._controllers.groups,
            "switches": list(self._controllers.switches),
            "accepted_per_depth": self._rolling.accepted_per_depth(),
            "tree": self._reports.tree,
        }

    @property
    def _engine(self) -> Engine:
        return self.model.engine

    def _watch_gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("rows_running", "Answers being made.", lambda: len(self._engine.running))
        gauge("rows_max", "Most answers made at once.", lambda: self._engine.max_rows)
        gauge("requests_waiting", "Answers that wait.", lambda: self.state()["waiting"])
        gauge("kv_used_bytes", "Keys and values in use.", lambda: self._kv[0])
        gauge("kv_limit_bytes", "Keys and values that there may be.", lambda: self._kv[1])

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _check_open(self) -> None:
        if self._dead or self._closing:
            self.metrics.refused("closing")
            raise ClosingError(
                f"the server can decode no more ({self._error})"
                if self._dead
                else "the server is shutting down"
            )
        if self._engine.closed:
            self.metrics.refused("busy")
            raise BusyError("the engine is being made anew: try again", 1)

    def _retry_after(self) -> int:
        turns = self._open / self._engine.max_rows
        return max(1, min(_LONGEST_RETRY, round(self._pace * turns / 2)))

    def _ticket(self, asked: Asked) -> Ticket:
        """Check an answer; the engine is not touched."""
        self._drafting.merged(asked.drafting)
        Drafting().merged(asked.drafting).check_drafter(self._engine.members)
        text = self.model.detokenizer(asked.params) if asked.text else None
        if asked.params.stop and text is None:
            raise ConfigError("stop strings need text: use stop_token_ids, or let text be made")
        sequence = self._engine.sequence(asked.prompt, asked.params, _UNDECIDED, text)
        return Ticket(sequence, asked.deliver, asked.drafting or {})

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            self.model.prepare()
            self._ready.set()
            while self._commanded():
                if not self._engine.idle:
                    self._step()
                elif self._tickets:
                    self._end(EngineError("it lost the answer"))
        except BaseException as error:
            self._die(error)
        finally:
            self._ready.set()
            self._over.set()

    def _commanded(self) -> bool:
        """Do what others have asked for, waiting where there is nothing else to do; False when all is over."""
        with self._wake:
            while not self._inbox and not self._tickets and not self._closing:
                self._wake.wait()
            commands = self._taken()
        for command in commands:
            try:
                command()
            except Exception as error:
                self._recover(error)
        self._end_late()
        return bool(self._tickets) or not self._closing

    def _taken(self) -> list[Callable[[], None]]:
        commands = list(self._inbox)
        self._inbox.clear()
        return commands

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            self.model.step()
        except Exception as error:
            self._recover(error)
        self._left_queue(began)
        seconds = dict(self._engine.clock.seconds)
        self.metrics.spent({part: value - self._seconds[part] for part, value in seconds.items()})
        self._seconds = seconds
        self._controllers.look(self._engine.policy, at_once=self._engine.idle)
        self._tell()

    def _recover(self, error: Exception) -> None:
        """A round broke off and ended all answers in it; go on with an engine that holds nothing."""
        _log.error("a round broke off", exc_info=error)
        self.metrics.failed()
        self._broken += 1
        self._error = " ".join(f"{type(error).__name__}: {error}".split())
        failure = error if isinstance(error, DDTreeError) else EngineError(self._error)
        if self._engine.closed:
            self.model.renew()
            self._engine.listener = self._listen
            self._seconds = dict(self._engine.clock.seconds)
        self._end(failure)

    def _die(self, error: BaseException) -> None:
        """The service itself failed: say so, and leave nobody waiting."""
        _log.critical("the server can decode no more", exc_info=error)
        with self._wake:
            self._dead = True
            self._error = " ".join(f"{type(error).__name__}: {error}".split())
            commands = self._taken()
        for command in commands:
            with suppress(Exception):
                command()
        self._end(ClosingError(f"the server can decode no more ({self._error})"))

    def _admit(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        if self._dead:
            return
        self._apply(ticket)
        self._engine.queue(ticket.sequence)

    def _apply(self, ticket: Ticket) -> None:
        """Let the engine draft for an answer as its request and the server's setting say now."""
        wanted = self._drafting.merged(ticket.drafting)
        method, budget = self.model.decided(wanted.method, wanted.budget)
        members = None
        if wanted.drafter is not None:
            # An engine that was renewed may have lost its drafter.
            members = tuple(name for name in self._engine.members if name == wanted.drafter)
        sequence = ticket.sequence
        sequence.request = self._engine.request(
            method, budget, wanted.depth, members, sampled=not sequence.params.greedy
        )
        sequence.stats.method = sequence.request.method
        sequence.stats.drafter = "+".join(sequence.request.members) or "none"

    def _redraft(self) -> None:
        for ticket in self._tickets:
            self._apply(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        self.model.cancel(ticket.sequence)
        self._tell()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.sequence.error = error
        # Rows that cannot be freed close the engine, which the next step tells.
        with suppress(Exception):
            self.model.cancel(ticket.sequence)

    def _end(self, error: Exception) -> None:
        """End all answers."""
        for ticket in self._tickets:
            self._fail(ticket, error)
        self._tell()

    def _end_late(self) -> None:
        longest = self.limits.request_timeout
        if longest:
            late = time.perf_counter() - longest
            for ticket in self._tickets:
                if ticket.submitted < late:
                    self._fail(
                        ticket, TimeoutReached(f"the answer was not complete after {longest:g} seconds")
                    )
            self._tell()

    def _tell(self) -> None:
        """Deliver what is new of each answer; forget those that have ended."""
        # Answers that are cancelled may leave nothing behind that would take a step.
        self._kv = self._engine.kv_bytes()
        ended, failed = 0, False
        for ticket in list(self._tickets):
            event = ticket.event()
            if event is None:
                continue
            self._measure(ticket, event)
            if event.last:
                self._tickets.remove(ticket)
                ended += 1
            try:
                ticket.deliver(event)
            except Exception:
                _log.exception("an answer's reader failed; the answer is cancelled")
                ticket.deliver = _nobody
                self.model.cancel(ticket.sequence)
                failed = True
        if ended:
            with self._wake:
                self._open -= ended
        if failed:
            self._tell()

    def _left_queue(self, began: float) -> None:
        """Note who has left the queue in a step that began then."""
        waiting = set(map(id, self._engine.waiting))
        for ticket in self._tickets:
            if not ticket.joined and id(ticket.sequence) not in waiting:
                ticket.joined = True
                self.metrics.queued(began - ticket.submitted)

    def _measure(self, ticket: Ticket, event: Event) -> None:
        now = time.perf_counter()
        if event.tokens:
            if ticket.first is None:
                ticket.first = now
                self.metrics.first(now - ticket.submitted)
            else:
                self.metrics.tokens(len(event.tokens), now - ticket.latest)
            ticket.latest = now
        if event.last:
            sequence = ticket.sequence
            reason = "error" if event.error is not None else str(sequence.finish_reason)
            seconds, tpot = now - ticket.submitted, ticket.tpot
            self.metrics.ended(reason, sequence.stats, seconds, tpot)
            self._pace += (seconds - self._pace) * 0.1
            if ticket.first is not None and tpot is not None:
                drafted = any(arm != "off" for arm in sequence.stats.arms)
                self._rolling.ended(ticket.first - ticket.submitted, tpot, drafted=drafted)

    def _listen(self, done: Round) -> None:
        if self._broken:
            self._broken, self._error = 0, None
        # Within a step, where an error would end every answer.
        try:
            self.metrics.round(done)
            self._rolling.round(done)
            self._reports.round(done)
        except Exception:
            _log.exception("a round could not be reported")


def _nobody(event: Event) -> None:
    """Takes the events of an answer whose reader has failed."""
