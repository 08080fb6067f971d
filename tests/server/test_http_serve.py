"""`ddtree serve` as a program, and how a server starts and ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

import ddtree
import fakes
import talker
from ddtree.cli import main
from ddtree.server.config import DraftSettings
from ddtree.server.engine_thread import EngineThread
from ddtree.server.handle import TokenDelta

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@contextmanager
def streamed(address, tokens):
    """The lines of a stream that has begun."""
    body = {**CHAT, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    with httpx.stream("POST", address + "/v1/chat/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def endless(handle, index):
    while True:
        yield TokenDelta("x", [1], [0])
        time.sleep(0.01)


def ready(address):
    try:
        return httpx.get(address + "/health/ready").status_code == 200
    except httpx.ConnectError:
        return False


@contextmanager
def program(folder, port=0):
    """`ddtree serve` of a tiny model: the process and its address, once it is ready."""
    target = talker.save(folder / "tiny", max_position_embeddings=1024)
    command = [sys.executable, "-m", "ddtree", "serve", target, "--device", "cpu", "--port", str(port)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            address = re.match(r"ddtree: tiny at (http://127.0.0.1:\d+)/v1", process.stdout.readline())[1]
            fakes.eventually(lambda: ready(address), 60)
            yield process, address
        finally:
            process.kill()


@pytest.mark.slow
def test_the_program_answers_by_its_name_and_ends_well_at_a_signal(tmp_path):
    with program(tmp_path) as (process, address):
        assert httpx.get(address + "/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 421
        with streamed(address, 400) as lines:
            process.send_signal(signal.SIGTERM)
            *_, end, done = lines
        assert json.loads(end[6:])["choices"][0]["finish_reason"] == "length" and done == "data: [DONE]"
        assert process.wait(20) == 0
        assert "finishing" in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)


@pytest.mark.exhaustive
def test_after_a_kill_the_next_one_serves_on_the_same_port(tmp_path):
    with program(tmp_path) as (process, address), streamed(address, 900):
        process.kill()
        process.wait()
    with program(tmp_path, address.rpartition(":")[2]) as (_, again):
        assert again == address


def test_a_second_signal_stops_at_once_and_a_restart_serves_again():
    worker = fakes.FakeWorker()
    worker.script = endless
    with fakes.running(worker, grace=60.0) as (server, thread, address), streamed(address, 9) as lines:
        server.handle_exit(signal.SIGTERM, None)
        for _ in range(20):
            assert next(lines)
        assert thread.is_alive()
        began = time.monotonic()
        server.handle_exit(signal.SIGINT, None)
        thread.join(30)
        assert time.monotonic() - began < 10
    # The connection was cut, so the port waits for its last packets: that stands in nobody's way.
    with fakes.served(fakes.FakeWorker(), port=int(address.rpartition(":")[2])) as again:
        assert again == address and httpx.get(again + "/health").status_code == 200


def test_answers_are_cut_off_when_grace_is_over(monkeypatch):
    with ddtree.load(talker.model(), "lookup", tokenizer=talker.tokenizer()) as model:
        step = model.step
        monkeypatch.setattr(model, "step", lambda: (time.sleep(0.02), step()))
        worker = EngineThread(model, name="tiny", drafting=DraftSettings(method="off"))
        worker.start()
        with fakes.running(worker, grace=0.2) as (server, _, address), streamed(address, 450) as lines:
            server.handle_exit(signal.SIGTERM, None)
            *_, end, done = lines
    assert json.loads(end[6:])["error"]["code"] == "shutting_down" and done == "data: [DONE]"


def refusal(capsys, *arguments):
    """What it says of a command that must fail; a target that does not exist lets none of them serve."""
    assert main(["serve", "no such model", *arguments]) == 2
    return capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = refusal(capsys, "--port", str(port))
    assert f"port {port} of 127.0.0.1 is taken" in told and told.count("\n") == 1


def test_options_that_cannot_work_are_told(capsys, tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    for options, words in [
        (["--api-key-file", str(empty)], "holds no key"),
        (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
        (["--api-key", " "], "API key"),
        (["--cors-origin", "example.com"], "is no origin"),
        (["--host", "no.such.host.invalid"], "no address"),
        (["--port", "99999"], "--port"),
        (["--grace", "-1"], "--grace"),
        (["--max-n", "0"], "max_n"),
        (["--depth", "17"], "depth"),
        (["--port", "0"], "no such model"),
    ]:
        told = refusal(capsys, *options)
        assert words in told and told.count("\n") == 1, told


def test_an_open_address_without_a_key_is_warned_of(capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    assert "anyone" in refusal(capsys, "--host", "0.0.0.0", "--port", "0")
    assert "anyone" not in refusal(capsys, "--port", "0")
    locked = ["--host", "0.0.0.0", "--port", "0", "--api-key-file", str(keys)]
    assert "anyone" not in refusal(capsys, *locked)
