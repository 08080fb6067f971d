"""`ddtree serve` as a program: starting, stopping, and what it says when it cannot."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

import fakes
import talker
from ddtree.cli import main

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target") / "tiny", max_position_embeddings=8192))


@pytest.fixture
def serve(target, tmp_path):
    """Start the program; gives its process and address."""
    running = []

    def call(*options, port="0"):
        command = [
            sys.executable,
            "-m",
            "ddtree",
            "serve",
            target,
            "--device",
            "cpu",
            "--port",
            port,
            *options,
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        running.append(process)
        line = process.stdout.readline()
        found = re.match(r"ddtree: (\S+) at (http://127.0.0.1:\d+)/v1", line)
        assert found, (line, process.stderr.read())
        address = found[2]
        fakes.eventually(lambda: answers(address), 60)
        return process, address

    yield call
    for process in running:
        process.kill()
        process.communicate()


def answers(address):
    try:
        return httpx.get(address + "/health/ready").status_code == 200
    except httpx.ConnectError:
        return False


def refusal(capsys, *arguments):
    """What it says of a command that must fail; a target that does not exist lets none of them serve."""
    assert main(["serve", "no such model", *arguments]) == 2
    return capsys.readouterr().err


def stream(address, tokens):
    """A stream's response, and an iterator over its lines that has begun."""
    client = httpx.Client(timeout=60)
    body = {**CHAT, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    response = client.send(
        client.build_request("POST", address + "/v1/chat/completions", json=body), stream=True
    )
    lines = (line for line in response.iter_lines() if line)
    return lines, next(lines)


@pytest.mark.slow
def test_it_answers_by_its_name_and_ends_well_at_a_signal(serve):
    process, address = serve()
    assert httpx.get(address + "/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 421
    lines, _ = stream(address, 400)
    process.send_signal(signal.SIGTERM)
    *_, end, done = lines
    assert json.loads(end[6:])["choices"][0]["finish_reason"] == "length" and done == "data: [DONE]"
    assert process.wait(20) == 0
    assert "finishing" in process.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(serve):
    process, address = serve()
    _lines, _ = stream(address, 8000)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    # Much less than the 30 seconds of grace, also on a machine that is busy.
    assert process.wait(20) == 0 and time.monotonic() - began < 15


@pytest.mark.exhaustive
def test_after_a_kill_the_next_one_serves_on_the_same_port(serve):
    process, address = serve()
    port = address.rpartition(":")[2]
    process.kill()
    process.wait()
    serve(port=port)


@pytest.mark.slow
def test_answers_are_cut_off_when_grace_is_over(serve):
    process, address = serve("--grace", "0.5")
    lines, _ = stream(address, 8000)
    process.send_signal(signal.SIGTERM)
    *_, end, done = lines
    assert json.loads(end[6:])["error"]["code"] == "shutting_down" and done == "data: [DONE]"
    assert process.wait(20) == 0


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
