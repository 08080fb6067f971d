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
from ddtree.server.connections import Connection
from ddtree.server.worker import Service

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BACKLOG = 2048
_LINGER = 5.0
"""Seconds beyond the grace in which what has been answered may still be read."""
_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, to be listened on later; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or may not be used, or there is no such host.
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
        # So that a restart need not wait for connections of before to time out.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_error(host, port, error) from error
    return bound


def url(bound: socket.socket) -> str:
    """Where a bound socket can be reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, with a service behind it.

    Args:
        app: see `create_app`.
        service: started already; `run` has shut it down when it returns.
        grace: seconds that running answers have to end after the first signal.
        access_log: write a line for each request.
    """

    def __init__(
        self, app: FastAPI, service: Service, *, grace: float = 30.0, access_log: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            limit_concurrency=service.limits.max_connections,
            lifespan="off",
            ws="none",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            server_header=False,
        )
        super().__init__(config)
        self._service = service
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
            self._service.shutdown(0)

    def stop(self) -> None:
        """What a signal does: the first call lets running answers end, the second one does not. Never waits."""
        if self.should_exit:
            self.force_exit = True
            self._end_service(0.0)
        else:
            self.should_exit = True
            self._end_service(self._grace)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for connections to end; a second signal ends them, and so does time."""
        loop = asyncio.get_running_loop()
        # Answers have been ended by then; what is left are readers too slow to take them.
        until = loop.time() + self._grace + _LINGER
        ending = asyncio.create_task(super().shutdown(sockets))
        while not ending.done():
            await asyncio.wait({ending}, timeout=0.1)
            if self.force_exit or loop.time() > until:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's handler of signals; the program ends as usual and not by the signal."""
        _log.warning(
            "%s: %s",
            signal.Signals(sig).name,
            "stopping at once" if self.should_exit else "finishing answers",
        )
        self.stop()

    def _end_service(self, grace: float) -> None:
        threading.Thread(target=self._service.shutdown, args=(grace,), daemon=True).start()


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} of {host} is taken: stop what uses it, or choose another with --port"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} may not be used: choose one above 1023 with --port")
    return ConfigError(
        f"{host}:{port} cannot be listened on ({error.strerror}): choose another --host or --port"
    )
