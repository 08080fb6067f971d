"""Listening, and ending well: the first signal lets running answers end, the second stops at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree.errors import ConfigError
from ddtree.server.engine_thread import EngineThread
from ddtree.server.http import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEAD_PATIENCE = 30.0
"""Seconds that the head of a request may take."""
_LINGER = 5.0  # seconds beyond the grace in which clients may read what was answered
_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Port 0 takes a free one.

    Connections wait until the server takes them. A restart need not wait for old ones to time out.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is no address of this machine.
    """
    # Some systems take a port beyond the last one for another.
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is outside 0..65535")
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host} is no address of this machine: try 127.0.0.1") from error
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        message = f"{host}:{port} cannot be listened on ({error.strerror}): choose another --host or --port"
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken: stop what uses it, or choose another with --port"
        elif error.errno == errno.EACCES:
            message = f"port {port} may not be used: choose one above 1023 with --port"
        raise ConfigError(message) from error


def url(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LimitedConnection(H11Protocol):
    """uvicorn's connection, with a limit on their number (`limit_concurrency`) and on the time of a request's head.

    uvicorn's own limit is checked at each request, and answers those of older connections in plain text. Here one
    connection too many gets an error in OpenAI's form and is closed. uvicorn's own timer only runs between requests.
    """

    _head_deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, or close a connection too many."""
        super().connection_made(transport)
        most, self.limit_concurrency = self.limit_concurrency, None
        if most is not None and len(self.connections) > most:
            transport.write(_too_many_connections())
            transport.close()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request. A head must be complete in time, however many pieces it comes in."""
        super().data_received(data)
        if self._answering:
            self._head_deadline = None
        else:
            self._wait_for_head()

    def shutdown(self) -> None:
        """End with the server. A request whose body is incomplete would only be refused, at its sender's pace."""
        if self._answering and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def _should_upgrade(self) -> bool:
        # Such requests are answered over HTTP; uvicorn would log the advice to install another protocol.
        return False

    @property
    def _answering(self) -> bool:
        # None before the first request, whatever its type says.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.time() + HEAD_PATIENCE
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._head_deadline, self.timeout_keep_alive_handler)


def _too_many_connections() -> bytes:
    error = ApiError(503, "too many connections: try again later", code="too_many_connections")
    response = error.response()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + bytes(response.body)


class HttpServer(uvicorn.Server):
    """uvicorn in front of an engine thread.

    Args:
        app: see `create_app`.
        worker: started already; `serve_on` has shut it down when it returns.
        grace: seconds that running answers have to end after the first signal.
        access_log: write a line for each request.
    """

    def __init__(
        self, app: FastAPI, worker: EngineThread, *, grace: float = 30.0, access_log: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedConnection,
            limit_concurrency=worker.limits.max_connections,
            lifespan="off",
            ws="none",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            timeout_keep_alive=75,
            server_header=False,
        )
        super().__init__(config)
        self._worker = worker
        self._grace = grace

    def serve_on(self, bound: socket.socket) -> None:
        """Serve until a signal comes or `stop` is called, then end running answers."""
        try:
            self.run(sockets=[bound])
        finally:
            bound.close()
            self._worker.shutdown(0)

    def stop(self) -> None:
        """Do what a signal does, without waiting: the first call lets running answers end, the second one does not."""
        self.force_exit = self.should_exit
        self.should_exit = True
        grace = 0.0 if self.force_exit else self._grace
        threading.Thread(target=self._worker.shutdown, args=(grace,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for connections to end as uvicorn does, but no longer than a second signal and the grace allow."""
        loop = asyncio.get_running_loop()
        # The answers have ended by then: what is left are clients that read too slowly.
        until = loop.time() + self._grace + _LINGER
        ending = asyncio.create_task(super().shutdown(sockets))
        while not ending.done():
            await asyncio.wait({ending}, timeout=0.1)
            if self.force_exit or loop.time() > until:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; the program ends with its usual exit code and not by the signal."""
        doing = "stopping at once" if self.should_exit else "finishing answers"
        _log.warning("%s: %s", signal.Signals(sig).name, doing)
        self.stop()
