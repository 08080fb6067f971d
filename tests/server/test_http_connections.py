"""Clients that hold connections and send nothing, or too slowly: each is given up, and the server stays usable."""

import json
import socket
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import fakes
from ddtree.server import http
from ddtree.server import run as runner
from ddtree.server.handle import TokenDelta

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
def worker():
    return fakes.FakeWorker(max_connections=3)


@contextmanager
def connected(address):
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        connection.settimeout(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        yield connection


def everything(connection):
    """What comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def error(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_one_connection_too_many_is_told_so_and_closed(worker):
    with fakes.served(worker) as address:
        with connected(address), connected(address), connected(address), connected(address) as last:
            answer = everything(last)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer.lower()
            assert error(answer)["code"] == "too_many_connections"
        fakes.eventually(lambda: _status(address) == 200)


def _status(address):
    with httpx.Client() as client:
        return client.get(address + "/health").status_code


def test_a_body_that_has_not_come_whole_does_not_hold_up_the_end(worker):
    with ExitStack() as open_still, fakes.running(worker, grace=60.0) as (server, _, address):
        connection = open_still.enter_context(connected(address))
        connection.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
        fakes.eventually(lambda: server.server_state.tasks)
        began = time.monotonic()
    assert time.monotonic() - began < 10


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(worker, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_LINGER", 0.2)
    worker.script = lambda handle, index: [TokenDelta("a" * 10_000, [1], [0])] * 1000
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    with ExitStack() as open_still, fakes.running(worker, grace=0.2) as (server, _, address):
        connection = open_still.enter_context(connected(address))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        fakes.eventually(lambda: any(one.flow.write_paused for one in server.server_state.connections))
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_another_protocol_is_neither_spoken_nor_advised(worker, caplog):
    asked = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with fakes.served(worker) as address, httpx.Client() as client:
        assert client.get(address + "/health", headers=asked).status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come_ends_the_connection(worker, monkeypatch, sent):
    monkeypatch.setattr(runner, "HEAD_PATIENCE", 0.2)
    with fakes.served(worker) as address, connected(address) as connection:
        connection.sendall(sent)
        assert everything(connection) == b""


def test_every_head_is_waited_for_as_the_first_and_an_answer_takes_its_time(worker, monkeypatch):
    monkeypatch.setattr(runner, "HEAD_PATIENCE", 0.2)

    def slowly(handle, index):
        time.sleep(0.4)
        yield from fakes.said("late")

    worker.script = slowly
    with fakes.served(worker) as address, connected(address) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert b"late" in answer
            # Between two requests a connection may rest for longer than a head may take.
            time.sleep(0.3)
        connection.sendall(b"GET")
        assert everything(connection) == b""


@pytest.mark.parametrize(("patience", "whole"), [(0.2, 60.0), (60.0, 0.5)])
def test_a_body_that_does_not_come_in_time_is_given_up(worker, monkeypatch, patience, whole):
    monkeypatch.setattr(http, "BODY_PATIENCE", patience)
    monkeypatch.setattr(http, "BODY_TIME", whole)
    with fakes.served(worker) as address, connected(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
        if patience > 1:
            for byte in BODY[:3]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and error(answer)["code"] == "request_timeout"
        assert not worker.asked
