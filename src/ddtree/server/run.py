"""Listening, and ending well: the first signal lets running answers end, the second stops at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ddtree.errors import ConfigError
from ddtree.server.engine_thread import EngineThread
from ddtree.server.security import LimitedConnection

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LINGER = 5.0  # seconds beyond the grace in which clients may read what was answered
_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, not listening yet. Port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is no address of this machine.
    """
    # Some systems take a port beyond the last one for another.
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is outside 0..65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host} is no address of this machine: try 127.0.0.1") from error
    bound = socket.socket(family, kind, protocol)
    try:
        # A restart need not wait for old connections to time out.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_error(host, port, error) from error
    return bound


def url(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            host, port = bound.getsockname()[:2]
            raise _bind_error(host, port, error) from error
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


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        message = f"port {port} of {host} is taken: stop what uses it, or choose another with --port"
    elif error.errno == errno.EACCES:
        message = f"port {port} may not be used: choose one above 1023 with --port"
    else:
        message = f"{host}:{port} cannot be listened on ({error.strerror}): choose another --host or --port"
    return ConfigError(message)
