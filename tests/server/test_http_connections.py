"""Clients that hold connections and send nothing, or too slowly: each is given up, and the server stays usable."""

import json
import socket
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import fakes
from ddtree.server import connections, security
from ddtree.server import run as runner

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
def service():
    return fakes.FakeService(max_connections=3)


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


def test_one_connection_too_many_is_told_so_and_closed(service):
    with fakes.served(service) as address:
        with connected(address), connected(address), connected(address), connected(address) as last:
            answer = everything(last)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer.lower()
            assert error(answer)["code"] == "too_many_connections"
        fakes.eventually(lambda: _status(address) == 200)


def _status(address):
    with httpx.Client() as client:
        return client.get(address + "/health").status_code


def test_a_body_that_has_not_come_whole_does_not_hold_up_the_end(service):
    with ExitStack() as open_still, fakes.served(service, grace=60.0) as address:
        connection = open_still.enter_context(connected(address))
        connection.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
        time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 10


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(service, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_LINGER", 0.2)
    service.script = lambda asked, index: fakes.said("a" * 200_000)
    body = json.dumps(
        {**json.loads(BODY), "stream": True, "ddtree_details": True, "logprobs": False}
    ).encode()
    with ExitStack() as open_still, fakes.served(service, grace=0.2) as address:
        connection = open_still.enter_context(connected(address))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1.5)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_another_protocol_is_neither_spoken_nor_advised(service, caplog):
    asked = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with fakes.served(service) as address, httpx.Client() as client:
        assert client.get(address + "/health", headers=asked).status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come_ends_the_connection(service, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_PATIENCE", 0.2)
    with fakes.served(service) as address, connected(address) as connection:
        connection.sendall(sent)
        assert everything(connection) == b""


def test_every_head_is_waited_for_as_the_first(service, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_PATIENCE", 0.5)
    with fakes.served(service) as address, connected(address) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            # Between two requests a connection may rest for longer than a head may take.
            time.sleep(0.8)
        connection.sendall(b"GET")
        assert everything(connection) == b""


def test_an_answer_may_take_longer_than_a_head(service, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_PATIENCE", 0.5)

    def slowly(asked, index):
        time.sleep(1.0)
        yield from fakes.said("late")

    service.script = slowly
    with fakes.served(service) as address, httpx.Client() as client:
        answer = client.post(
            address + "/v1/chat/completions", content=BODY, headers={"Content-Type": "application/json"}
        )
        assert answer.json()["choices"][0]["message"]["content"] == "late"


@pytest.mark.parametrize(("patience", "whole"), [(0.2, 60.0), (60.0, 1.5)])
def test_a_body_that_does_not_come_in_time_is_given_up(service, monkeypatch, patience, whole):
    monkeypatch.setattr(security, "BODY_PATIENCE", patience)
    monkeypatch.setattr(security, "BODY_TIME", whole)
    with fakes.served(service) as address, connected(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
        if patience > 1:
            for byte in BODY[:8]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and error(answer)["code"] == "request_timeout"
        assert not service.asked
