"""The official client against a real server with a tiny model: what it gets is what the library answers."""

import asyncio
import threading

import openai
import pytest

import ddtree
import fakes
import talker
from ddtree.server.config import ServerLimits
from ddtree.server.engine_thread import EngineThread

MESSAGES = [{"role": "user", "content": "To be, or not to be"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def model():
    """A second one, for what the library answers by itself."""
    return ddtree.load(talker.model(), tokenizer=talker.tokenizer())


@pytest.fixture(scope="module")
def worker():
    loaded = ddtree.load(talker.model(), tokenizer=talker.tokenizer(), max_rows=4, prefix_bytes=2**24)
    worker = EngineThread(loaded, name="tiny", limits=ServerLimits(max_waiting=16))
    worker.start()
    fakes.ready(worker)
    with loaded:
        yield worker
        worker.shutdown(0)


@pytest.fixture(scope="module")
def address(worker):
    with fakes.served(worker) as address:
        yield address + "/v1"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def answer(model, prompt=MESSAGES, **options):
    """What the library answers."""
    return model.generate(prompt, **{"temperature": 0.0, "max_tokens": 24, **options})


@pytest.fixture
def chat(client):
    """Ask a chat of the server."""
    return lambda **options: client.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **options})


def text_of(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat_is_the_librarys_answer(client, chat, model):
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    expected, found = answer(model), chat()
    (choice,) = found.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert choice.finish_reason == expected.finish_reason
    assert found.usage.prompt_tokens == len(expected.prompt_ids)
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.object == "chat.completion" and found.model == "tiny" and found.id.startswith("chatcmpl-")


def test_a_second_turn_is_the_librarys_answer_too(chat, model):
    said = {"role": "assistant", "content": answer(model).text}
    turn = [*MESSAGES, said, {"role": "user", "content": "and?"}]
    chat()
    found = chat(messages=turn)
    assert found.choices[0].message.content == answer(model, turn).text
    assert found.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("options", [{}, {"seed": 5, "temperature": 1.0, "top_p": 0.9}])
def test_a_stream_is_the_same_text_in_pieces(chat, model, options):
    expected = answer(model, **options)
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_the_streaming_helper_gathers_the_whole(client, model):
    text = answer(model).text
    with client.chat.completions.stream(messages=MESSAGES, stop=text[9:12], **GREEDY) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text[: text.index(text[9:12])]


def test_n_choices_have_seeds_in_a_row(chat, model):
    options = {"temperature": 1.0, "seed": 40, "n": 3}
    expected = [answer(model, temperature=1.0, seed=40 + i) for i in range(3)]
    texts = [one.text for one in expected]
    found = chat(**options)
    assert [choice.message.content for choice in found.choices] == texts and len(set(texts)) == 3
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert found.usage.prompt_tokens == len(expected[0].prompt_ids)
    chunks = list(chat(stream=True, **options))
    assert [text_of(chunks, index) for index in range(3)] == texts


def test_stop_strings_end_the_text_before_them(chat, model):
    whole = answer(model).text
    stop = whole[4:6]
    text = whole[: whole.index(stop)]
    (choice,) = chat(stop=[stop, "never there"]).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    kept = chat(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text + stop
    assert text_of(chat(stop=stop, stream=True)) == text


def test_log_probabilities_of_chats(chat, model):
    expected = answer(model, logprobs=3)
    found = chat(logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert len(content) == len(expected.token_ids)
    for entry, other in zip(content, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(
            [p for _, p in other.top], abs=1e-5
        )
    spelt = b"".join(bytes(entry.bytes) for entry in content if entry.token not in talker.SPECIAL)
    assert spelt.decode(errors="replace") == found.choices[0].message.content
    streamed = chat(logprobs=True, stream=True)
    told = [entry for c in streamed if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in told] == [entry.token for entry in content]


def test_completions_of_texts_ids_and_lists_of_them(client, model):
    tokenizer = talker.tokenizer()
    texts, options = ["one", "and another"], {**GREEDY, "max_tokens": 10}
    expected = [answer(model, text, max_tokens=10) for text in texts]
    for prompt in (texts, [tokenizer.encode(text) for text in texts]):
        found = client.completions.create(prompt=prompt, **options)
        assert [choice.text for choice in found.choices] == [one.text for one in expected]
        assert found.usage.prompt_tokens == sum(len(one.prompt_ids) for one in expected)
    for prompt in (texts[0], tokenizer.encode(texts[0])):
        (choice,) = client.completions.create(prompt=prompt, **options).choices
        assert choice.text == expected[0].text and choice.finish_reason == expected[0].finish_reason
    (choice,) = client.completions.create(prompt=texts[1], echo=True, **options).choices
    assert choice.text == texts[1] + expected[1].text


def test_completions_of_several_prompts_n_times(client, model):
    options = {**GREEDY, "temperature": 1.0, "seed": 3, "max_tokens": 6}
    found = client.completions.create(prompt=["one", "two"], n=2, **options)
    assert [choice.text for choice in found.choices] == [
        answer(model, prompt, temperature=1.0, seed=3 + i, max_tokens=6).text
        for prompt in ("one", "two")
        for i in range(2)
    ]


def test_log_probabilities_of_completions(client, model):
    expected = answer(model, "one", logprobs=2, max_tokens=6)
    (choice,) = client.completions.create(prompt="one", logprobs=2, **{**GREEDY, "max_tokens": 6}).choices
    told = choice.logprobs
    assert told.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-5)
    assert [len(top) for top in told.top_logprobs] == [2] * len(told.tokens)
    assert told.text_offset[0] == 0 and len(told.text_offset) == len(told.tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_tells_those_of_the_prompt(client, model, stream):
    expected = answer(model, "one two", logprobs=2, prompt_logprobs=2, max_tokens=6)
    options = {**GREEDY, "max_tokens": 6, "echo": True, "logprobs": 2}
    if stream:
        chunks = list(client.completions.create(prompt="one two", stream=True, **options))
        told = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    else:
        (choice,) = client.completions.create(prompt="one two", **options).choices
        told, text = [choice.logprobs], choice.text
    values = [value for part in told for value in part.token_logprobs]
    assert text == "one two" + expected.text
    assert values[0] is None and told[0].top_logprobs[0] is None
    own = [one.logprob for one in (*expected.prompt_logprobs, *expected.logprobs)]
    assert values[1:] == pytest.approx(own, abs=1e-5)
    assert len(values) == len(expected.prompt_ids) + len(expected.token_ids)
    offsets = [offset for part in told for offset in part.text_offset]
    assert offsets[0] == 0 and offsets[len(expected.prompt_ids)] == len("one two")


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_tells_of_the_prompt_and_of_nothing_else(client, model, stream):
    options = {**GREEDY, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt": "one two"}
    expected = answer(model, "one two", logprobs=1, prompt_logprobs=1, max_tokens=1)
    if stream:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.completions.create(**options, **more)
        choices, usage = [chunk.choices[0] for chunk in chunks], last.usage
    else:
        reply = client.completions.create(**options)
        choices, usage = reply.choices, reply.usage
    assert "".join(choice.text for choice in choices) == "one two"
    assert choices[-1].finish_reason == "length"
    values = choices[0].logprobs.token_logprobs
    assert values == [None, *[pytest.approx(one.logprob, abs=1e-5) for one in expected.prompt_logprobs]]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_ids), 0)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"top_k": 3}, {"top_k": 3}), ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}), ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"min_tokens": 20, "stop_token_ids": [70]}, {"min_tokens": 20, "stop_token_ids": [70]}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}), ({"bad_words": ["e"]}, {"bad_words": ["e"]}),
        ({"chat_template_kwargs": {"loud": True}}, {"chat_template_kwargs": {"loud": True}}),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}),
        ({"logit_bias": {"70": 5, "71": -100}}, {"logit_bias": {70: 5.0, 71: -100.0}}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ],
)  # fmt: skip
def test_every_control_of_sampling_reaches_the_sampler(chat, model, sent, meant):
    options = {"temperature": 1.0, "seed": 8}
    found = chat(extra_body=sent, **options)
    assert found.choices[0].message.content == answer(model, **options, **meant).text


def test_drafting_changes_no_text_and_is_what_was_asked_for(chat, model):
    expected = answer(model, max_tokens=40).text
    tree, chain = {"method": "tree", "budget": 7, "depth": 3}, {"method": "chain", "budget": 4}
    for drafting in ({"method": "off"}, tree, chain):
        found = chat(extra_body={"ddtree": drafting, "ddtree_timings": True}, max_tokens=40)
        assert found.choices[0].message.content == expected
        (timings,) = found.ddtree["timings"]
        assert all(arm.startswith(drafting["method"]) for arm in timings["arms"])
        assert timings["predicted_n"] == found.usage.completion_tokens


def test_sampling_follows_the_models_own_config_unless_told_otherwise(worker, model, client):
    assert worker.model.target.model.generation_config.temperature is None
    sampled = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=24)
    assert sampled.choices[0].message.content == answer(model, temperature=1.0, seed=3).text


def test_errors_are_the_clients_own(client, chat):
    def refused(kind, **options):
        with pytest.raises(kind) as caught:
            chat(**options)
        return caught.value

    assert refused(openai.NotFoundError, model="other").code == "model_not_found"
    assert refused(openai.BadRequestError, temperature=500).param == "temperature"
    assert refused(openai.BadRequestError, response_format={"type": "json_object"}).param == "response_format"
    assert refused(openai.BadRequestError, messages=[]).param == "messages"
    long = refused(openai.BadRequestError, messages=[{"role": "user", "content": "x" * 600}])
    assert (long.code, long.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[1, 99999])
    assert caught.value.param == "prompt"


def test_a_full_queue_is_a_rate_limit(chat):
    """4 rows and 16 places: of 8 requests for 8 choices, some do not fit."""
    errors, texts = [], []

    def ask():
        try:
            found = chat(n=8, max_tokens=120)
            texts.extend(choice.message.content for choice in found.choices)
        except openai.RateLimitError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors and int(errors[0].response.headers["retry-after"]) >= 1
    assert len(texts) == 8 * (8 - len(errors)) and len(set(texts)) == 1


def test_a_stream_that_is_closed_frees_its_row(chat, worker):
    stream = chat(stream=True, extra_body={"ignore_eos": True}, max_tokens=450)
    next(iter(stream))
    stream.close()
    fakes.eventually(lambda: worker.state()["rows"] == 0)


def test_streams_side_by_side_are_those_alone(address, model):
    """Asynchronous clients, more of them than rows."""
    prompts = [f"prompt number {i}" * (i + 1) for i in range(8)]

    async def ask(client, prompt):
        chunks = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == [answer(model, prompt).text for prompt in prompts]
