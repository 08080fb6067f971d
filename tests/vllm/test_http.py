"""vLLM's own server with the plugin: the texts of plain vLLM, and wrong requests that leave it alive."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest

import talker

NAME = "talker"
KEY = "secret"
PROMPTS = ("the cat sat on the mat, the cat sat on", "abcabcabcabc", "To be, or not to be", "11 12 13 14 15")
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target"), **SHAPE))


@contextmanager
def served(folder, tmp_path, *more):
    """A client of a server of its own, which ends by a signal, with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "ddtree", "serve", folder, "--engine", "vllm", "--name", NAME, "--port", str(port),
        "--dtype", "float32", "--max-context", "256", "--max-rows", "4", "--kv-memory", "64M", "--threads", "1",
        "--grace", "0", "--api-key", KEY, *more, "--", "--enforce-eager",
    ]  # fmt: skip
    # As a user has it: the other tests set what the engine in their own process needs.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "OMP_"))
    }
    log = tmp_path / f"{port}.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"Authorization": f"Bearer {KEY}"}
        ) as client,
    ):
        try:
            ready(client, process, log)
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM), log.read_text()[-2000:]


def ready(client, process, log):
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def body(prompt, **fields):
    return {"model": NAME, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}


def complete(client, prompt, **fields):
    return client.post("/v1/completions", json=body(prompt, **fields))


def stream(client, prompt, **fields):
    """A streamed answer as it comes."""
    return client.stream("POST", "/v1/completions", json=body(prompt, stream=True, **fields))


def text(client, prompt, **fields):
    answer = complete(client, prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def chat(client, prompt):
    messages = [{"role": "user", "content": prompt}]
    sent = {"model": NAME, "messages": messages, "max_tokens": 40, "temperature": 0}
    return client.post("/v1/chat/completions", json=sent).json()["choices"][0]["message"]["content"]


def together(ask, client):
    """The answers to all prompts, asked at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: ask(client, prompt), PROMPTS))


def figure(client, name, route="/metrics"):
    """The sum of a counter over its labels; None where it is missing."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", client.get(route).text, re.MULTILINE)
    return sum(map(float, found)) if found else None


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """What plain vLLM answers, and what can be seen of us there."""
    with served(folder, tmp_path_factory.mktemp("log"), "--drafting", "off") as client:
        return {
            "texts": [text(client, prompt) for prompt in PROMPTS],
            "chats": [chat(client, prompt) for prompt in PROMPTS],
            "penalized": text(client, PROMPTS[0], repetition_penalty=1.3, presence_penalty=0.5),
            "drafts": figure(client, "vllm:spec_decode_num_drafts_total"),
            "route": client.get("/ddtree/metrics").status_code,
            "grammar": complete(client, "x", structured_outputs={"regex": "a+"}).status_code,
        }


@pytest.fixture(scope="module")
def client(folder, plain, tmp_path_factory):
    with served(
        folder, tmp_path_factory.mktemp("log"), "--drafter", "lookup", "--method", "tree", "--budget", "16"
    ) as client:
        yield client


def test_off_is_plain_vllm(plain):
    assert plain["drafts"] is None and plain["route"] == 404 and plain["grammar"] == 200


def test_four_clients_at_once_get_plain_vllms_texts(client, plain):
    assert together(text, client) == plain["texts"]
    assert together(chat, client) == plain["chats"]
    assert figure(client, "ddtree_vllm_accepted_total", "/ddtree/metrics") > 0


def test_every_way_to_draft_gives_the_same_text(client, plain):
    for own in (
        {"method": "off"},
        {"method": "chain"},
        {"method": "tree", "budget": 3, "depth": 2},
        {"method": "auto"},
    ):
        assert text(client, PROMPTS[0], ddtree=own) == plain["texts"][0]


def test_penalties_hold_on_every_path(client, plain):
    assert text(client, PROMPTS[0], repetition_penalty=1.3, presence_penalty=0.5) == plain["penalized"]


def test_off_for_a_request_drafts_nothing(client):
    def nodes():
        return figure(client, "ddtree_vllm_nodes_total", "/ddtree/metrics")

    before = nodes()
    text(client, PROMPTS[1], ddtree={"method": "off"})
    assert nodes() == before
    text(client, PROMPTS[1], ddtree={"method": "tree", "budget": 8})
    assert nodes() > before


def test_a_seed_gives_the_same_text_however_it_is_drafted(client):
    def drawn(seed, **own):
        return text(client, PROMPTS[2], temperature=1.0, top_p=0.9, min_p=0.02, seed=seed, ddtree=own)

    assert (
        drawn(1, method="off")
        == drawn(1, method="tree")
        == drawn(1, method="chain")
        != drawn(2, method="tree")
    )


def test_biases_hold_on_every_path(client):
    (letter,) = talker.tokenizer().encode("z", add_special_tokens=False)
    assert text(client, PROMPTS[3], logit_bias={str(letter): 100}) == "z" * 40


def test_streams_carry_the_same_text(client, plain):
    with stream(client, PROMPTS[0]) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == plain["texts"][0]


def test_clients_that_leave_within_a_stream_leave_the_others(client, plain):
    for _ in range(8):
        with stream(client, PROMPTS[1], max_tokens=200) as answer:
            assert next(answer.iter_lines()).startswith("data: {")
    assert together(text, client) == plain["texts"]


def test_a_wrong_request_for_a_stream_is_refused_before_it_begins(client):
    for fields in ({"ddtree": {"method": "fast"}}, {"min_p": 3}, {"logit_bias": {"99999999": 1}}):
        with stream(client, "x", **fields) as answer:
            assert answer.status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 254, "max_tokens": 1},
        {"prompt": "x" * 200, "max_tokens": None},
        {"ddtree": {"budget": 1024}},
        {"echo": True, "logprobs": 3},
        {"n": 3, "temperature": 1.0, "min_p": 0.1},
        {"use_beam_search": True, "n": 2, "min_p": 0.1},
        {"stop": ["n", "é"], "bad_words": ["🌳"]},
        {"logit_bias": {str(token): -100 for token in range(talker.VOCAB)}},
        {"vllm_xargs": {"ddtree": '{"method": "chain"}'}},
    ],
    ids=str,
)
def test_what_is_asked_seldom_is_answered_too(client, plain, fields):
    answer = complete(client, **{"prompt": PROMPTS[0], **fields})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == fields.get("n", 1)
    assert text(client, PROMPTS[0]) == plain["texts"][0]


def test_openais_client_says_how_to_draft(client, plain):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY) as asked:
        answer = asked.completions.create(
            model=NAME, prompt=PROMPTS[0], max_tokens=40, temperature=0,
            extra_body={"ignore_eos": True, "ddtree": {"method": "tree", "budget": 8}},
        )  # fmt: skip
        assert answer.choices[0].text == plain["texts"][0]
        with pytest.raises(openai.BadRequestError, match="choose auto, off, chain or tree") as refused:
            asked.completions.create(model=NAME, prompt="x", extra_body={"ddtree": {"method": "best"}})
        assert refused.value.param == "ddtree"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ddtree": {"method": "fast"}}, "ddtree"),
        ({"ddtree": {"depth": 0}}, "ddtree"),
        ({"ddtree": []}, "ddtree"),
        ({"ddtree": {"budgets": 3}}, "ddtree"),
        ({"vllm_xargs": {"ddtree": "{"}}, None),
        ({"min_p": 3}, "min_p"),
        ({"min_p": ""}, "min_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"presence_penalty": 7}, None),
        ({"repetition_penalty": 5000.0}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_the_engine_lives(client, plain, fields, param):
    answer = complete(client, "x", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400 and error["message"]
    if param is not None:
        assert error["param"] == param
    assert text(client, PROMPTS[0]) == plain["texts"][0]


def test_without_a_key_the_answer_is_vllms_whatever_was_sent(client):
    route = f"{client.base_url}/v1/completions"
    for fields in ({}, {"ddtree": {"method": "fast"}}, {"min_p": 3}, {"guided_regex": "a+"}):
        answer = httpx.post(route, json={"model": NAME, "prompt": "x", **fields})
        assert answer.status_code == 401, answer.text
    for route in ("/metrics", "/ddtree/metrics"):
        assert httpx.get(f"{client.base_url}{route}").status_code == 200


def test_what_vllm_has_no_route_for_is_not_found(client):
    assert client.post("/v1/nothing", json={"ddtree": {"method": "fast"}}).status_code == 404


def test_our_counters_agree_with_vllms(client):
    text(client, PROMPTS[0])
    for ours, theirs in (("nodes", "draft_tokens"), ("accepted", "accepted_tokens")):
        own = figure(client, f"ddtree_vllm_{ours}_total", "/ddtree/metrics")
        deadline = time.monotonic() + 10
        # vLLM counts a step some time after it has sent its tokens.
        while figure(client, f"vllm:spec_decode_num_{theirs}_total") != own > 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert figure(client, "ddtree_vllm_drafting_failed", "/ddtree/metrics") == 0
