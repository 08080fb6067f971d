"""Streams as clients read them on the wire, and readers that leave or dawdle."""

import json
import socket
import time

import httpx
import pytest

import fakes
import talker
from ddtree.server.handle import TokenDelta
from ddtree.server.tokens import TokenTexts

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def worker():
    return fakes.FakeWorker()


@pytest.fixture(scope="module")
def address(worker):
    with fakes.served(worker) as address:
        yield address


@pytest.fixture(autouse=True)
def clean(worker):
    worker.asked.clear()
    worker.cancelled.clear()
    worker.script = lambda handle, index: fakes.said("hey")


def lines(address, path="/v1/chat/completions", **body):
    """The stream's events, JSON read, with what differs from run to run checked and taken out."""
    with httpx.stream("POST", address + path, json={"stream": True, **body}, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n") and text.count("[DONE]") == 1
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    heads = {(chunk.pop("id"), chunk.pop("created"), chunk.pop("model")) for chunk in chunks if "id" in chunk}
    assert len(heads) <= 1
    return chunks


def joined(chunks, index=0):
    parts = [choice for chunk in chunks for choice in chunk.get("choices", []) if choice["index"] == index]
    return "".join(part["delta"].get("content") or "" for part in parts)


def test_a_chat_streams_role_then_content_then_the_end(address):
    def chunk(delta, reason=None):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    first, *pieces, last = lines(address, **CHAT)
    assert first == chunk({"role": "assistant", "content": ""})
    assert pieces == [chunk({"content": joined([piece])}) for piece in pieces] and joined(pieces) == "hey"
    assert last == chunk({}, "stop")


def test_usage_comes_last_and_only_when_asked_for(address):
    assert not any("usage" in chunk for chunk in lines(address, **CHAT))
    *chunks, last = lines(address, **CHAT, stream_options={"include_usage": True})
    assert not any("usage" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_continuous_usage_grows_to_the_whole(address):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in lines(address, **CHAT, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == 3


def test_choices_stream_side_by_side_each_whole(address, worker):
    worker.script = lambda handle, index: fakes.said(f"answer {index}", "length" if index else "stop")
    chunks = lines(address, **CHAT, n=3)
    assert [joined(chunks, index) for index in range(3)] == ["answer 0", "answer 1", "answer 2"]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert {end["index"]: end["finish_reason"] for end in ends} == {0: "stop", 1: "length", 2: "length"}
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_completions_stream_text_and_echo(address):
    first, *pieces, last = lines(address, "/v1/completions", prompt="ab", echo=True)
    assert first["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": None}]
    assert first["object"] == "text_completion"
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "hey"
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]


def test_details_tell_of_each_token_how_it_came(address):
    chunks = lines(address, **CHAT, ddtree_details=True)
    told = [chunk["ddtree"] for chunk in chunks if "tokens" in chunk.get("ddtree", {})]
    assert [token for one in told for token in one["tokens"]] == [ord(char) for char in "hey"]
    assert [origin for one in told for origin in one["origins"]] == [0, 1, 0]
    texts = TokenTexts(talker.tokenizer())
    assert [text for one in told for text in one["texts"]] == [texts(ord(char))[0] for char in "hey"]
    assert chunks[-1]["ddtree"]["timings"][0]["predicted_n"] == 3


def test_timings_are_with_the_usage_where_there_is_one(address):
    *chunks, last = lines(address, **CHAT, ddtree_timings=True, stream_options={"include_usage": True})
    assert not any("ddtree" in chunk for chunk in chunks)
    assert last["ddtree"]["timings"][0].keys() >= {"time_to_first_token_ms", "tau", "rounds", "seed"}


def test_an_error_in_the_middle_is_told_in_the_stream(address, worker):
    worker.script = lambda handle, index: [
        TokenDelta("he", [1], [0]),
        TokenDelta(error=RuntimeError("secret")),
    ]
    *_, last = lines(address, **CHAT)
    assert last["error"]["code"] == "internal_error" and "secret" not in str(last)


def test_an_answer_that_the_server_gave_up_is_no_whole_answer(address, worker):
    worker.script = lambda handle, index: fakes.said("he", "cancelled")
    assert lines(address, **CHAT)[-1]["error"]["code"] == "shutting_down"
    response = httpx.post(address + "/v1/chat/completions", json=CHAT)
    assert response.status_code == 503 and response.headers["retry-after"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_answer(address, worker, stream):
    def endless(handle, index):
        while not worker.cancelled:
            yield TokenDelta("x", [1], [0])
            time.sleep(0.01)

    worker.script = endless
    with socket.create_connection(address.removeprefix("http://").split(":")) as connection:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        head = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        connection.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        fakes.eventually(lambda: worker.asked)
        if stream:
            assert connection.recv(64)
    fakes.eventually(lambda: worker.asked[0] in worker.cancelled)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(address, worker):
    """Megabytes that the reader does not read: the engine's thread is through at once, and all of it arrives."""
    took = []
    piece, count = "0123456789" * 400, 2000

    def script(handle, index):
        began = time.monotonic()
        for _ in range(count):
            handle.send(TokenDelta(piece, [1], [0]))
        took.append(time.monotonic() - began)
        return [TokenDelta(result=fakes.result(piece * count, [1] * count))]

    worker.script = script
    with httpx.stream(
        "POST", address + "/v1/chat/completions", json={**CHAT, "stream": True}, timeout=30
    ) as response:
        time.sleep(0.5)
        assert took and took[0] < 0.4
        # Others are served meanwhile.
        worker.script = lambda handle, index: fakes.said("hey")
        assert joined(lines(address, **CHAT)) == "hey"
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            for line in response.iter_lines()
            if line.startswith("data: {")
        )
    assert text == piece * count


@pytest.mark.parametrize("char", ["\x85", "\u2028", "\u2029"])
def test_no_character_of_a_text_ends_a_line_of_the_stream(worker, address, char):
    worker.script = lambda handle, index: fakes.said(f"a{char}b")
    with httpx.stream("POST", address + "/v1/chat/completions", json={"stream": True, **CHAT}) as response:
        # As many clients do, by whatever Python takes for the end of a line.
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert joined([json.loads(event) for event in events[:-1]]) == f"a{char}b"
