"""What is refused, with which status, and how it is told: OpenAI's form throughout, never a 500."""

import json

import httpx
import pytest
from pydantic import ValidationError

import fakes
from ddtree.errors import CacheMemoryError, PromptError
from ddtree.server.handle import BusyError, ClosingError, EngineError, TimeoutReached
from ddtree.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def worker():
    return fakes.FakeWorker(max_body=20_000, max_waiting=4, max_n=3)


@pytest.fixture(scope="module")
def client(worker):
    with fakes.served(worker) as address, httpx.Client(base_url=address) as client:
        yield client


@pytest.fixture
def refused(worker, client):
    """Send a request; gives status and error, and checks that nothing was submitted."""

    def call(path, body, status=400, **more):
        worker.asked.clear()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more}
        response = client.post(path, content=content, headers=headers)
        assert response.status_code == status, response.text
        assert not worker.asked
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]
        return error

    return call


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"), ("temperature", 200), ("temperature", -1), ("temperature", True), ("top_p", 2),
        ("top_k", 1.5), ("top_k", -2), ("min_p", -0.1), ("n", 0), ("n", 4), ("n", "2"), ("seed", 1.5), ("stop", 3),
        ("stop", [1]), ("stop", [""]), ("stop", ["x"] * 65), ("max_tokens", 0), ("max_tokens", -2),
        ("max_tokens", 2**40), ("max_completion_tokens", 0), ("max_completion_tokens", "9"),
        ("stop", "x" * 1025), ("bad_words", ["x" * 1025]),
        ("presence_penalty", 3), ("frequency_penalty", "x"), ("repetition_penalty", 0), ("logit_bias", [1]),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": None}), ("min_tokens", -1),
        ("stop_token_ids", [-1]), ("stop_token_ids", "1"), ("ignore_eos", "yes"), ("bad_words", "x"), ("stream", 1),
        ("stream_options", {"include_usage": True}), ("ddtree", {"depth": 17}), ("ddtree", {"method": "best"}),
        ("ddtree", {"dept": 3}), ("ddtree", {"drafter": "none of ours"}), ("ddtree", 3), ("ddtree_details", 1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_told_with_its_field(refused, field, value):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        error = refused(path, {**body, field: value})
        assert error["type"] == "invalid_request_error"
        # Places within a field are written after it.
        assert (error["param"].startswith(field) and field in error["message"]) or field == "ddtree"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_schema", "json_schema": {}}), ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}), ("modalities", ["audio"]), ("audio", {"voice": "x"}),
        ("prompt_logprobs", 1), ("prompt_logprobs", 0), ("use_beam_search", True), ("return_token_ids", True),
        ("chat_template", "{{ x }}"), ("web_search_options", {"a": 1}), ("documents", [{}]), ("echo", True),
        ("best_of", 2), ("continue_final_message", "x"), ("typical_p", 0.9), ("mirostat", 2), ("n_predict", 9),
        ("regex", "a+"), ("repeat_penalty", 1.1),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(refused, field, value):
    error = refused(CHATS, {**CHAT, field: value})
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"), ("best_of", 3), ("logprobs", 21), ("logprobs", True), ("prompt", []), ("prompt", ""),
        ("prompt", [[]]), ("prompt", [""]), ("prompt", [1, "a"]), ("prompt", None), ("prompt", [[1, True]]),
        ("prompt", {"text": "x"}), ("prompt", ["x"] * 7), ("max_tokens", 0),
    ],
)  # fmt: skip
def test_completions_refuse_by_name_too(refused, field, value):
    error = refused(COMPLETIONS, {**TEXT, field: value})
    assert error["param"] == field or (field, error["param"]) == ("prompt", None)


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "tools": [], "tool_choice": "auto"}, {**CHAT, "tools": [{}], "tool_choice": "none"},
        {**CHAT, "response_format": {"type": "text"}}, {**CHAT, "modalities": ["text"]}, {**CHAT, "audio": None},
        {**CHAT, "use_beam_search": False, "length_penalty": 1.0, "echo": False, "best_of": 1},
        {**CHAT, "typical_p": 1, "mirostat": 0, "n_predict": -1, "dry_multiplier": 0.0, "cache_prompt": True},
        {**CHAT, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "prediction": {"a": 1}},
        {**CHAT, "no_such_field": {"deep": [1, 2]}}, {name: None for name in ("temperature", "stop", "n")} | CHAT,
        {**CHAT, "model": "fake"}, {**CHAT, "top_k": -1, "seed": -5, "temperature": 0, "logit_bias": {"7": 1}},
        {**CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"loud": True}, "max_completion_tokens": 3},
        {"messages": [{"role": "developer", "content": "be"}, {"role": "user", "content": None, "name": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_unusual_is_tolerated(client, body):
    assert client.post(CHATS, json=body).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), ("hi", "messages"), ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"), ([["user"]], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)  # fmt: skip
def test_messages_are_checked_one_by_one(refused, messages, param):
    assert refused(CHATS, {"messages": messages})["param"].startswith(param)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors", "max_length", "truncation"])
def test_the_tokenizers_own_arguments_are_not_for_clients(refused, name):
    assert refused(CHATS, {**CHAT, "chat_template_kwargs": {name: 1}})["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"3", b'"x"', b"{'a': 1}", b"\xff\xfe", b"[" * 5000, b'{"messages": NaN}',
        b'{"messages": [], "temperature": NaN}', b'{"n": 1' + b"0" * 6000 + b"}", b'{"prompt": "\\ud800"}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_told_so(refused, body):
    for path in (CHATS, COMPLETIONS, "/tokenize", "/detokenize"):
        refused(path, body)


MANY = 9000


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, {**CHAT, "stop": [1] * MANY}), (ChatRequest, {**CHAT, "stop_token_ids": ["a"] * MANY}),
        (ChatRequest, {**CHAT, "bad_words": [1] * MANY}),
        (ChatRequest, {**CHAT, "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (CompletionRequest, {"prompt": [[1]] * MANY}),
        (CompletionRequest, {"prompt": [None] * MANY}), (CompletionRequest, {"prompt": [[None] * MANY] * 9}),
        (TokenizeRequest, {"messages": [1] * MANY}), (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)  # fmt: skip
def test_of_many_entries_that_are_wrong_few_are_told(schema, body):
    # A million complaints would hold up every other answer while they are written down.
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= 6


@pytest.mark.parametrize(
    ("status", "fields"), [(404, {"model": "x" * 9000}), (400, {"ddtree": {"method": "x" * 9000}})]
)
def test_what_a_client_sent_makes_no_message_long(refused, status, fields):
    assert len(refused(CHATS, {**CHAT, **fields}, status)["message"]) < 1100


@pytest.mark.parametrize("kind", ["text/plain", "text/x+json", "multipart/form-data; boundary=x", ""])
def test_other_types_of_body_are_refused(refused, kind):
    error = refused(CHATS, json.dumps(CHAT).encode(), 415, **{"Content-Type": kind})
    assert error["code"] == "unsupported_media_type"


def test_unknown_models_paths_and_methods(refused, client):
    assert refused(CHATS, {**CHAT, "model": "other"}, 404)["code"] == "model_not_found"
    assert "/v1/nothing" in refused("/v1/nothing", {}, 404)["message"]
    assert client.get("/v1/models/other").json()["error"]["param"] == "model"
    response = client.get(CHATS)
    assert response.status_code == 405 and response.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_not_parsed(client, worker, chunked):
    worker.asked.clear()
    body = json.dumps({**CHAT, "user": "x" * 200_000}).encode()
    content = iter([body[i : i + 10_000] for i in range(0, len(body), 10_000)]) if chunked else body
    response = client.post(CHATS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
    assert not worker.asked


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (BusyError("full", 7), 429, "queue_full", "7"), (ClosingError("closing"), 503, "shutting_down", "5"),
        (CacheMemoryError("no memory"), 503, "out_of_memory", "5"), (TimeoutReached("slow"), 504, "timeout", None),
        (PromptError("the prompt has 9 tokens and the context holds 8"), 400, "context_length_exceeded", None),
        (EngineError("secret"), 500, "internal_error", None), (RuntimeError("secret"), 500, "internal_error", None),
    ],
)  # fmt: skip
def test_what_the_worker_raises_has_its_status(client, worker, monkeypatch, error, status, code, retry_after):
    monkeypatch.setattr(worker, "refusal", error)
    # After an error that nobody foresaw the connection ends.
    response = client.post(CHATS, json=CHAT, headers={"Connection": "close"})
    told = response.json()["error"]
    assert (response.status_code, told["code"]) == (status, code) and "secret" not in told["message"]
    assert told["type"] == {429: "rate_limit_error", 400: "invalid_request_error"}.get(status, "server_error")
    assert response.headers.get("retry-after") == retry_after
