"""The middleware of vLLM's server, in front of apps that replace vLLM: bodies, refusals, counters."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from ddtree.integrations.vllm.frontend import METRICS, FieldError, Middleware, translate

WRONG = {"method": "x"}


def body(**fields):
    return json.dumps({"model": "m", "prompt": "hello", **fields}).encode()


def moved(**fields):
    """What a request's fields become for vLLM."""
    sent = json.loads(translate(body(**fields)))
    said = sent.pop("vllm_xargs", {}).get("ddtree")
    return sent, None if said is None else json.loads(said)


async def echo(scope, receive, send):
    """Answers with the body it got."""
    message = await receive()
    await answer(send, 200, message["body"])
    assert (await receive())["type"] == "http.disconnect"


async def guarded(scope, receive, send):
    """Has no key from anyone, and reads nothing."""
    await answer(send, 401, b"no key")


async def mending(scope, receive, send):
    """Answers what cannot be read by itself, as FastAPI does."""
    try:
        await receive()
    except FieldError:
        await answer(send, 400, b"There was an error parsing the body")


async def answer(send, status, text):
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": text})


def exchanged(incoming, app=echo, path="/v1/completions", method="POST", state=None):
    """Messages that a client gets for those it sends, and how many of these were read."""
    waiting, outgoing = list(incoming), []

    async def receive():
        return waiting.pop(0)

    async def send(message):
        outgoing.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": state}
    asyncio.run(Middleware(app)(scope, receive, send))
    return outgoing, len(incoming) - len(waiting)


def asked(sent, **how):
    """Status and body of the answer to a body in two parts."""
    half = len(sent) // 2
    parts = [
        {"type": "http.request", "body": sent[:half], "more_body": True},
        {"type": "http.request", "body": sent[half:]},
        {"type": "http.disconnect"},
    ]
    (start, *rest), _ = exchanged(parts, **how)
    assert all(message["type"] == "http.response.body" for message in rest)
    return start["status"], b"".join(message["body"] for message in rest)


def test_requests_are_passed_on_changed():
    status, got = asked(body(ddtree={"method": "tree"}))
    assert status == 200 and json.loads(got)["vllm_xargs"] == {"ddtree": '{"method": "tree"}'}


def test_the_app_is_told_no_length_that_is_another_one():
    async def app(scope, receive, send):
        assert [name for name, _ in scope["headers"]] == [b"content-type"]
        await echo(scope, receive, send)

    assert asked(body(ddtree={}), app=app)[0] == 200


def test_refusals_have_openais_form():
    for app in (echo, mending):
        status, got = asked(body(ddtree=WRONG), app=app)
        error = json.loads(got)["error"]
        assert (status, error["param"], error["code"]) == (400, "ddtree", 400)
        assert "choose auto, off, chain or tree" in error["message"]


def test_who_has_no_key_is_told_so_whatever_was_sent():
    assert asked(body(ddtree=WRONG), app=guarded) == (401, b"no key")


def test_nothing_is_read_before_the_app_asks_for_it():
    _, read = exchanged([{"type": "http.request", "body": body(ddtree=WRONG)}], guarded)
    assert read == 0


def test_a_client_that_leaves_within_its_request_has_left():
    seen = []

    async def app(scope, receive, send):
        seen.append(await receive())

    half = {"type": "http.request", "body": b'{"ddtree": ', "more_body": True}
    assert exchanged([half, {"type": "http.disconnect"}], app) == ([], 2)
    assert seen == [{"type": "http.disconnect"}]


def test_the_vocabulary_is_the_models():
    model = SimpleNamespace(get_vocab_size=lambda: 64)
    state = SimpleNamespace(state=SimpleNamespace(vllm_config=SimpleNamespace(model_config=model)))
    assert asked(body(logit_bias={"63": 1}), state=state)[0] == 200
    assert asked(body(logit_bias={"64": 1}), state=state)[0] == 400


def test_the_counters_of_all_engines_are_summed():
    class Core:
        async def call_utility_all_async(self, *call):
            assert call[:2] == ("collective_rpc", "ddtree_counters")
            own = {"nodes": 3, "tau": 1.5, "arms": {"off": 1, 'a"b': 2}, "drafting_failed": 0}
            return [[own, own], [{"nodes": 4, "arms": {"off": 1}, "drafting_failed": 1}]]

    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=Core())))
    status, got = asked(b"", path=METRICS, method="GET", state=app)
    lines = got.decode().splitlines()
    assert status == 200
    assert "ddtree_vllm_nodes_total 7" in lines
    assert 'ddtree_vllm_arms_total{arm="off"} 2' in lines
    assert 'ddtree_vllm_arms_total{arm="a\\"b"} 2' in lines
    assert "# TYPE ddtree_vllm_nodes_total counter" in lines
    assert "# TYPE ddtree_vllm_drafting_failed gauge" in lines and "ddtree_vllm_drafting_failed 1" in lines
    assert not any("tau" in line for line in lines)


def test_requests_that_say_nothing_of_drafting_are_not_touched():
    nested = b'{"min_p": ' + b"[" * 100_000
    for sent in (body(temperature=0), b"{", b"[]", b"", b'["min_p"]', b'{"min_p', nested):
        assert translate(sent) is sent


def test_drafting_travels_where_vllm_has_a_place_for_it():
    sent, said = moved(ddtree={"method": "chain", "depth": 4}, temperature=0)
    assert sent == {"model": "m", "prompt": "hello", "temperature": 0}
    assert said == {"method": "chain", "depth": 4}


def test_what_vllm_refuses_beside_drafting_travels_with_it():
    sent, said = moved(min_p=0.1, logit_bias={"7": 3})
    assert "min_p" not in sent and "logit_bias" not in sent
    assert said == {"min_p": 0.1, "logit_bias": {"7": 3}}


@pytest.mark.parametrize("fields", [{"min_p": None}, {"logit_bias": None}, {"ddtree": None}, {"ddtree": {}}])
def test_fields_that_ask_for_nothing_are_dropped(fields):
    assert moved(**fields) == ({"model": "m", "prompt": "hello"}, None)


def test_a_clients_own_arguments_stay():
    sent = json.loads(translate(body(vllm_xargs={"mine": 1}, min_p=0.5)))
    assert sent["vllm_xargs"] == {"mine": 1, "ddtree": '{"min_p": 0.5}'}


@pytest.mark.parametrize("arguments", ["mine", "", []])
def test_arguments_that_are_no_object_stay_for_vllm_to_refuse(arguments):
    assert json.loads(translate(body(vllm_xargs=arguments, min_p=0.5)))["vllm_xargs"] == arguments


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ddtree": {"method": "x"}}, "ddtree"),
        ({"ddtree": {"depth": 99}}, "ddtree"),
        ({"ddtree": "tree"}, "ddtree"),
        ({"min_p": 3}, "min_p"),
        ({"min_p": "low"}, "min_p"),
        ({"min_p": ""}, "min_p"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"-1": 3}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
    ],
)
def test_what_is_wrong_in_a_request_is_refused_with_its_field(fields, param):
    with pytest.raises(FieldError) as refused:
        translate(body(**fields))
    assert refused.value.field == param


def test_a_bias_of_a_token_that_the_model_lacks_is_refused():
    assert translate(body(logit_bias={"63": 1}), 64)
    with pytest.raises(FieldError, match="logit_bias names token 64") as refused:
        translate(body(logit_bias={"64": 1}), 64)
    assert refused.value.field == "logit_bias"
