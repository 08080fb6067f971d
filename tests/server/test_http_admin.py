"""The rest of the routes: what the server tells of itself, and the dashboard's."""

import asyncio
import json
from dataclasses import asdict

import httpx
import pytest

import ddtree
import fakes
import talker
from ddtree.server.handle import DeltaQueue, TokenDelta


@pytest.fixture(scope="module")
def worker():
    return fakes.FakeWorker()


@pytest.fixture(scope="module")
def client(worker):
    with fakes.served(worker) as address, httpx.Client(base_url=address) as client:
        yield client


def test_models_version_and_health(client, worker):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 512)
    assert client.get("/v1/models/fake").json() == card
    assert client.get("/version").json() == {"version": ddtree.__version__}
    for path in ("/health", "/health/live", "/health/ready"):
        head = client.head(path)
        assert client.get(path).status_code == head.status_code == 200 and not head.content
    worker.health = {**worker.health, "ready": False, "status": "starting"}
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").status_code == 503
    worker.health = {**worker.health, "ready": True, "status": "ready"}


def test_metrics_are_prometheus_text(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:spec_decode_num_drafts_total{" in response.text


def test_tokens_of_texts_and_chats_and_back(client):
    tokenizer = talker.tokenizer()
    found = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode("héllo") and found["count"] == len(found["tokens"])
    assert found["token_strs"][:2] == ["<s>", "h"] and found["max_model_len"] == 512
    bare = client.post("/tokenize", json={"prompt": "héllo", "add_special_tokens": False}).json()["tokens"]
    assert bare == found["tokens"][1:]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = client.post("/tokenize", json=chat).json()["tokens"]
    assert tokens == tokenizer.apply_chat_template(
        chat["messages"], add_generation_prompt=True, return_dict=False
    )
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<s><user>hi<bot>"}
    assert client.post("/detokenize", json={"tokens": [talker.VOCAB]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/tokenize", json={**chat, "prompt": "x"}).status_code == 400


def test_drafting_is_told_and_changed_field_by_field(client, worker):
    before = client.get("/api/drafting").json()
    assert before == {"method": "auto", "depth": 16, "budget": "auto", "drafter": None}
    changed = client.post("/api/drafting", json={"depth": 3, "budget": 8, "drafter": "lookup"}).json()
    assert changed == {"method": "auto", "depth": 3, "budget": 8, "drafter": "lookup"}
    assert asdict(worker.drafting) == changed
    assert client.post("/api/drafting", json={"drafter": None}).json()["drafter"] is None
    for bad in ({"depth": 17}, {"method": "fast"}, {"dept": 3}, {"drafter": "other"}, {"budget": -1}):
        response = client.post("/api/drafting", json=bad)
        assert response.status_code == 400 and response.json()["error"]["message"]
    assert worker.drafting.depth == 3


def test_state_and_events(client, worker, monkeypatch):
    monkeypatch.setattr("ddtree.server.app.STATE_EVERY", 0.05)
    assert client.get("/api/state").json() == {"model": "fake", "rows": 0}
    found = []
    with client.stream("GET", "/api/events") as response:
        fakes.eventually(lambda: worker.book._watchers)
        for number in range(3):
            worker.book._watchers[0]({"t": number})
        for line in response.iter_lines():
            found.append(line)
            if len([one for one in found if one == "event: state"]) == 2:
                break
    rounds = [json.loads(found[i + 1][6:]) for i, line in enumerate(found) if line == "event: round"]
    assert rounds == [{"t": 0}, {"t": 1}, {"t": 2}]
    fakes.eventually(lambda: not worker.book._watchers)


def test_open_streams_of_events_do_not_keep_a_server_alive(monkeypatch):
    monkeypatch.setattr("ddtree.server.app.STATE_EVERY", 0.05)
    client = httpx.Client()
    with fakes.served(fakes.FakeWorker()) as address:
        response = client.send(client.build_request("GET", address + "/api/events"), stream=True)
    assert all(line.startswith(("event: state", "data: ")) for line in response.iter_lines() if line)


def test_the_api_is_described(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert paths.keys() >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/api/drafting",
    }
    assert client.get("/docs").status_code == 404


def test_a_queue_gives_everything_once_and_a_slow_readers_deltas_are_joined():
    async def read():
        queue = DeltaQueue()
        for delta in fakes.said("hey"):
            queue.put(delta)
        taken = await queue.take(1)
        assert await queue.take(0.01) == []
        return TokenDelta.joined(taken)

    whole = asyncio.run(read())
    assert (whole.text, whole.tokens, whole.origins) == ("hey", [104, 101, 121], [0, 1, 0])
    assert whole.result is not None and not whole.logprobs


def test_a_queue_with_a_limit_drops_the_oldest():
    async def read():
        queue = DeltaQueue(most=2)
        for number in range(5):
            queue.put(number)
        return await queue.take(1)

    assert asyncio.run(read()) == [3, 4]
