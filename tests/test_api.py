"""load, generate, stream: what a user gets, and what bad input says."""

import copy
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
from tiny_families import build

import ddtree
import talker
import tiny
from ddtree import api
from ddtree.drafters.dflash import checkpoint
from ddtree.errors import CacheMemoryError, CheckpointError, ConfigError, PromptError, UnsupportedModelError
from ddtree.model import demo
from ddtree.model import kv_cache as cache_module

PROMPT = "To be, or not to be"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model():
    return ddtree.load(talker.model(), "lookup", tokenizer=talker.tokenizer())


@pytest.fixture(autouse=True)
def no_row_is_left(request):
    yield
    if "model" in request.fixturenames:
        gc.collect()
        engine = request.getfixturevalue("model").engine
        assert engine.idle and engine._cache.rows == 0 and not engine.drafter._rows


def own_greedy(prompt, count):
    """transformers' greedy ids of a prompt."""
    ids = torch.tensor([prompt])
    out = talker.model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def test_a_folder_is_loaded_and_answers_as_transformers_does(tmp_path):
    model = ddtree.load(talker.save(tmp_path), device="cpu")
    result = model.generate(PROMPT, max_tokens=60, temperature=0)
    assert result.prompt_ids == talker.tokenizer().encode(PROMPT)
    assert result.token_ids == own_greedy(result.prompt_ids, 60)
    assert result.text == talker.tokenizer().decode(result.token_ids, skip_special_tokens=True)
    assert (result.stats.method, result.stats.drafter) == ("auto", "lookup")
    assert sum(result.stats.arms.values()) == result.stats.rounds
    assert result.stats.output_tokens == len(result.token_ids)


def test_a_result_tells_why_it_ended(model):
    assert model.generate(PROMPT, max_tokens=3, ignore_eos=True).finish_reason == "length"
    result = model.generate(PROMPT, logit_bias={talker.EOS: 100}, max_tokens=9)
    assert (result.finish_reason, result.token_ids, result.text) == ("stop", [talker.EOS], "")


def test_ids_text_and_messages_give_the_same_as_their_ids(model):
    options = {"seed": 5, "max_tokens": 20}
    for prompt in (PROMPT, MESSAGES):
        ids = model.encode(prompt)
        assert model.generate(prompt, **options).token_ids == model.generate(ids, **options).token_ids
    chat = model.generate("hi", chat=True, **options)
    assert chat.prompt_ids == model.encode(MESSAGES)
    loud = model.generate("hi", chat=True, chat_template_kwargs={"loud": True}, **options)
    assert loud.prompt_ids == model.encode(MESSAGES, chat_template_kwargs={"loud": True}) != chat.prompt_ids


def test_a_batch_is_each_prompt_alone_even_beyond_the_rows(model):
    prompts = [PROMPT[:n] for n in range(1, 12)]
    together = model.generate(prompts, seed=3, max_tokens=15)
    assert len(together) == 11 > model.engine.max_rows
    assert [r.token_ids for r in together] == [
        model.generate(p, seed=3, max_tokens=15).token_ids for p in prompts
    ]
    mixed = model.generate([PROMPT, MESSAGES, [5, 6]], seed=3, max_tokens=5)
    assert [r.prompt_ids for r in mixed] == [model.encode(PROMPT), model.encode(MESSAGES), [5, 6]]


@pytest.mark.parametrize("method", ["off", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_method_changes_the_text(model, method, temperature):
    options = {"seed": 8, "max_tokens": 40, "temperature": temperature}
    result = model.generate(PROMPT * 3, method=method, budget=8, depth=4, **options)
    assert result.stats.method == method
    assert result.token_ids == model.generate(PROMPT * 3, **options).token_ids


def test_pieces_are_the_text_and_the_last_carries_the_result(model):
    options = {"seed": 2, "max_tokens": 60}
    whole = model.generate(PROMPT, **options)
    stream = model.stream(PROMPT, **options)
    with pytest.raises(ConfigError, match="the stream has not ended"):
        _ = stream.result
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    assert [piece.result is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].result is stream.result
    for copied in (copy.deepcopy(pieces[-1]), pickle.loads(pickle.dumps(pieces[-1]))):
        assert (copied, copied.token_ids) == (
            pieces[-1],
            pieces[-1].token_ids,
        ) and copied.result == stream.result
    assert stream.result.token_ids == whole.token_ids
    assert len(pieces) > 5


def test_stop_strings_end_the_text_and_are_held_back(model):
    options = {"seed": 4, "max_tokens": 80, "ignore_eos": True}
    text = model.generate(PROMPT, **options).text
    stop = text[10:13]
    pieces = list(model.stream(PROMPT, stop=stop, **options))
    assert "".join(pieces) == text[: text.index(stop)]
    assert pieces[-1].result.finish_reason == "stop"


def test_closing_a_stream_frees_its_row_and_keeps_what_there_is(model):
    stream = model.stream(PROMPT, seed=1, ignore_eos=True)
    first = next(stream)
    assert model.engine._cache.rows == 1
    stream.close()
    assert model.engine._cache.rows == 0
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text.startswith(first)
    assert list(stream) == []
    for _ in model.stream(PROMPT, seed=1, ignore_eos=True):
        break
    gc.collect()
    assert model.engine.idle and model.engine._cache.rows == 0


def test_streams_that_overlap_give_what_each_gives_alone(model):
    alone = [model.generate(PROMPT[n:], seed=n, max_tokens=30).text for n in range(3)]
    streams = [model.stream(PROMPT[n:], seed=n, max_tokens=30) for n in range(3)]
    texts = [""] * 3
    while any(streams):
        for n, stream in enumerate(streams):
            if stream is not None:
                piece = next(stream, None)
                texts[n] += piece or ""
                streams[n] = stream if piece is not None else None
    assert texts == alone


def test_a_stream_read_while_another_thread_ends_its_answer_gets_all_of_it(model, monkeypatch):
    """The reader comes when the answer has its finish reason, and not yet its last character."""
    ends, reads, found = threading.Event(), threading.Event(), []
    stream = model.stream([5, 6], max_tokens=1, processors=[half_a_character])
    finish = stream._sequence.text.finish

    def slow_finish():
        ends.set()
        assert reads.wait(30)
        finish()

    monkeypatch.setattr(stream._sequence.text, "finish", slow_finish)

    class Watched:
        """The model's lock, telling that the reader asks for it."""

        def __enter__(self):
            if threading.current_thread() is reader:
                reads.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def read():
        found.extend(stream)
        reads.set()

    lock, reader = model._lock, threading.Thread(target=read)
    monkeypatch.setattr(model, "_lock", Watched())
    stepper = threading.Thread(target=model.step)
    stepper.start()
    assert ends.wait(30)
    reader.start()
    for thread in (stepper, reader):
        thread.join(30)
    assert found == ["\ufffd"] and found[0].result.text == "\ufffd"


def half_a_character(prefix, logits):
    """Let the model write the first byte of a character."""
    return torch.where(torch.arange(len(logits)) == HALF, 0.0, -1e9)


HALF = talker.tokenizer().encode("ž", add_special_tokens=False)[0]


def test_threads_share_a_model(model):
    alone = [model.generate(PROMPT[n:], seed=n, max_tokens=20).token_ids for n in range(4)]
    found = [None] * 4

    def run(n):
        found[n] = model.generate(PROMPT[n:], seed=n, max_tokens=20).token_ids

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_drawn_seed_is_told_and_gives_the_text_again(model):
    first, second = (model.generate(PROMPT, max_tokens=30) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert model.generate(PROMPT, max_tokens=30, seed=first.seed).token_ids == first.token_ids


def test_fields_override_the_parameters(model):
    params = ddtree.SamplingParams(temperature=0.0, max_tokens=7)
    assert len(model.generate(PROMPT, params, ignore_eos=True).token_ids) == 7
    assert len(model.generate(PROMPT, params, max_tokens=4, ignore_eos=True).token_ids) == 4


def test_without_a_limit_an_answer_ends_at_512_tokens_or_the_context(model):
    assert ddtree.api.MAX_TOKENS == 512
    result = model.generate([5, 6, 7], ignore_eos=True, temperature=0)
    assert (len(result.token_ids), result.finish_reason) == (512 - 3, "length")


def test_bad_words_may_be_strings(model):
    options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    plain = model.generate(PROMPT, **options)
    word = next(char for char in plain.text if char.isascii() and char.isprintable() and char.strip())
    assert word not in model.generate(PROMPT, bad_words=[word], **options).text
    ids = talker.tokenizer().encode(word, add_special_tokens=False)
    assert (
        model.generate(PROMPT, bad_words=[ids], **options).token_ids
        == model.generate(PROMPT, bad_words=word, **options).token_ids
    )


def test_logprobs_are_the_targets_and_the_result_is_json(model):
    result = model.generate(PROMPT, temperature=0, max_tokens=4, logprobs=2)
    ids = torch.tensor([result.prompt_ids + result.token_ids])
    with torch.inference_mode():
        expected = talker.model()(ids).logits[0, len(result.prompt_ids) - 1 : -1].log_softmax(-1)
    for one, row, token in zip(result.logprobs, expected, result.token_ids, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
    read = json.loads(json.dumps(result.as_dict()))
    assert read["token_ids"] == result.token_ids and read["stats"]["rounds"] == result.stats.rounds
    assert read["logprobs"][0]["top"][0][0] == result.logprobs[0].top[0][0]


def test_without_a_tokenizer_ids_go_in_and_come_out():
    model = ddtree.load(tiny.model(), "lookup")
    result = model.generate(tiny.prompt(5), max_tokens=6, temperature=0)
    assert result.text == "" and len(result.token_ids) == 6
    pieces = list(model.stream(tiny.prompt(5), max_tokens=6, temperature=0))
    assert [t for piece in pieces for t in piece.token_ids] == result.token_ids and len(pieces) > 1
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        model.generate([1], stop="x")
    with pytest.raises(ConfigError, match="bad_words as strings need a tokenizer"):
        model.generate([1], bad_words=["x"])
    with pytest.raises(PromptError, match="no tokenizer"):
        model.generate("text")


def test_the_automatic_drafter_is_the_demos_own_for_the_demo_target(tmp_path, monkeypatch):
    folder = talker.save(tmp_path / "target")
    monkeypatch.setattr(
        "ddtree.model.pretrained.resolve", lambda name: str(folder) if name == "demo" else name
    )
    monkeypatch.setattr(
        demo, "demo_drafter", lambda: checkpoint.write(tmp_path / "own", tiny.network(talker.model()))
    )
    monkeypatch.setattr("ddtree.api.demo_drafter", demo.demo_drafter)
    assert ddtree.load("demo", device="cpu").engine.drafter.name == "dflash+lookup"
    assert ddtree.load(str(folder), device="cpu").engine.drafter.name == "lookup"

    def missing():
        raise CheckpointError("this build carries no demo drafter")

    monkeypatch.setattr("ddtree.api.demo_drafter", missing)
    assert ddtree.load("demo", device="cpu").engine.drafter.name == "lookup"


@pytest.mark.parametrize("drafter", [None, "none"])
def test_without_a_drafter_decoding_is_autoregressive(drafter):
    model = ddtree.load(talker.model(), drafter, tokenizer=talker.tokenizer())
    result = model.generate(PROMPT, temperature=0, max_tokens=9)
    assert (result.stats.method, result.stats.drafter) == ("off", "none")
    assert result.token_ids == own_greedy(result.prompt_ids, 9)


def test_a_recurrent_target_is_decoded_autoregressively_unless_a_drafter_is_named():
    recurrent = build("mamba").model
    for drafter in ("auto", "none"):
        model = ddtree.load(recurrent, drafter)
        result = model.generate(tiny.prompt(6), temperature=0, max_tokens=8)
        assert result.stats.method == "off"
        ids = torch.tensor([tiny.prompt(6)])
        own = recurrent.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert result.token_ids == own[0, 6:].tolist()
    with pytest.raises(UnsupportedModelError, match=r'MambaForCausalLM .*use drafter="none"'):
        ddtree.load(recurrent, "lookup")


def test_closing_a_model_takes_its_hooks_off(tmp_path):
    inner = tiny.model()
    folder = checkpoint.write(tmp_path, tiny.network(inner))
    with ddtree.load(inner, folder) as model:
        stream = model.stream(tiny.prompt(5))
        next(stream)
        assert any(layer._forward_hooks for layer in inner.model.layers)
    assert not any(layer._forward_hooks for layer in inner.model.layers)
    assert list(stream)[-1].result.finish_reason == "cancelled"
    model.close()
    with pytest.raises(ConfigError, match="the model is closed: load it again"):
        model.generate(tiny.prompt(5))


def test_the_package_is_light_until_it_is_used():
    code = (
        "import sys, ddtree; dir(ddtree); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_names_are_there_and_others_are_not():
    assert all(getattr(ddtree, name) is not None for name in ddtree.__all__)
    assert set(ddtree.__all__) <= set(dir(ddtree))
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = ddtree.laod


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "unknown method 'magic': choose auto, off, chain or tree"),
        ({"budget": -1}, r"budget=-1 is outside 0..1024"),
        ({"budget": "many"}, "budget='many' is outside 0..1024: give a whole number in that range"),
        ({"depth": 0}, r"depth=0 is outside 1..16"),
        ({"depth": 1.5}, "depth=1.5 is outside 1..16"),
        ({"temprature": 1}, "unknown option 'temprature': did you mean temperature?"),
        ({"zzzz": 1}, "unknown option 'zzzz': choose from temperature"),
        ({"temperature": -1}, "temperature must be from 0 to 100, not -1"),
        ({"max_tokens": 10**30}, "max_tokens must be from 1 to"),
        ({"seed": 2**63}, "seed must be from -1 to 9223372036854775807"),
        (
            {"stop_token_ids": [talker.VOCAB]},
            "stop_token_ids names token 260, but the model's ids end at 259",
        ),
        ({"stop": ""}, "stop contains an empty string"),
        ({"bad_words": [""]}, "bad word '' is empty"),
        ({"bad_words": 5}, "bad_words must be a list of strings or token id lists, not 5"),
        ({"bad_words": {"e": 1}}, "bad_words must be a list of strings or token id lists, not {'e': 1}"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must map names to values, not 5"),
        ({"params": {"max_tokens": 5}}, "params must be SamplingParams, not dict: give fields as keyword"),
        ({"params": 5}, "params must be SamplingParams, not int"),
    ],
)
def test_a_bad_option_is_named(model, options, message):
    for call in (model.generate, model.stream):
        with pytest.raises(ConfigError, match=message):
            call(PROMPT, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1}, "max_context must be at least 2, not 1"),
        ({"max_context": "all"}, "max_context must be a whole number"),
        ({"max_rows": 0}, "max_rows must be at least 1, not 0"),
        ({"max_rows": 2.0}, "max_rows must be a whole number"),
        ({"device": "cpu"}, "device and dtype of a loaded model are its own"),
        ({"dtype": "float16"}, "device and dtype of a loaded model are its own"),
        ({"drafter": 3}, "drafter=3 is not a drafter"),
    ],
)
def test_a_bad_argument_of_load_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ddtree.load(talker.model(), **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 512, "the prompt has 512 tokens and the context holds 512: shorten it to 511 or less"),
        ([260], r"token id 260 is outside the vocabulary 0\.\.259"),
        ([-1], "token id -1 is outside"),
        *((prompt, "the prompt is empty") for prompt in ("", [], [PROMPT, ""], [[]])),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_named(model, prompt, message):
    with pytest.raises(PromptError, match=message):
        model.generate(prompt)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        *(
            (name, ConfigError, f"{re.escape(repr(name))} names no model: give demo, a checkpoint's folder")
            for name in (None, 5, "", b"demo", ["demo"])
        ),
        (torch.nn.Linear(2, 2), UnsupportedModelError, "Linear is no transformers model: load one with Auto"),
        (tiny.model().model, UnsupportedModelError, "LlamaModel has no language-model head: load it with A"),
    ],
)
def test_a_target_that_is_no_language_model_is_named(target, error, message):
    with pytest.raises(error, match=message):
        ddtree.load(target)


def test_a_cache_that_does_not_fit_into_memory_is_named_and_the_model_lives_on(model, monkeypatch):
    expected = model.generate(PROMPT, seed=1, max_tokens=8).token_ids
    model.engine._cache = model.target.new_cache()
    model.generate(PROMPT, seed=1, max_tokens=2)
    monkeypatch.setattr(cache_module, "available_bytes", lambda _: 1000)
    with pytest.raises(
        CacheMemoryError, match=r"the key/value cache for 2 rows of 256 tokens needs .* MiB are free; use"
    ):
        model.generate([PROMPT, PROMPT], max_tokens=5)
    with pytest.raises(CacheMemoryError, match="for 1 rows of 512 tokens"):
        list(model.stream([5] * 250, max_tokens=50, ignore_eos=True))
    assert model.generate(PROMPT, seed=1, max_tokens=8).token_ids == expected


def test_a_device_that_runs_out_of_memory_is_named(model, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.target, "verify", full)
    with pytest.raises(CacheMemoryError, match="cpu ran out of memory: use fewer sequences"):
        model.generate(PROMPT)


def test_an_error_in_a_processor_reaches_its_caller_and_no_other(model):
    def broken(prefix, logits):
        if len(prefix) > len(PROMPT) + 4:
            raise ZeroDivisionError("mine")
        return logits

    other = model.stream(PROMPT, seed=6, max_tokens=25)
    start = next(other)
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.generate([PROMPT, PROMPT + "?"], processors=[broken])
    assert start + "".join(other) == model.generate(PROMPT, seed=6, max_tokens=25).text


@pytest.mark.slow
@pytest.mark.skipif(
    not (demo.cache_folder() / demo.FOLDER / "checksums.json").exists(),
    reason="the demo target is not fetched",
)
def test_the_demo_answers_alike_with_and_without_drafts():
    model = ddtree.load("demo", dtype="float32")
    messages = [{"role": "user", "content": "Say: the quick brown fox jumps. Now say it again."}]
    for temperature in (0.0, 1.0):
        options = {"seed": 3, "max_tokens": 32, "temperature": temperature}
        drafted = model.generate(messages, **options)
        assert drafted.text and drafted.stats.nodes > 0
        assert drafted.token_ids == model.generate(messages, method="off", **options).token_ids
        assert "".join(model.stream(messages, **options)) == drafted.text


def test_plain_decoding_measures_nothing(monkeypatch):
    def never(*_, **__):
        raise AssertionError("measured")

    monkeypatch.setattr(api.calibration, "quick", never)
    model = ddtree.load(tiny.model(), "lookup")
    for choice in ({"method": "off"}, {"budget": 0}, {"method": "off", "budget": "auto"}):
        assert model.generate([3, 4, 5], max_tokens=3, **choice).stats.nodes == 0


ANY = RuntimeError("aten.view is not implemented for these weights")


@pytest.mark.parametrize(
    "error", [ConfigError("short"), CacheMemoryError("full"), torch.OutOfMemoryError(), ANY]
)
def test_what_cannot_be_measured_is_served_all_the_same(monkeypatch, error):
    """A context too short to calibrate, or too little memory, is no reason to refuse a request that fits."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(api.calibration, "quick", fails)
    model = ddtree.load(tiny.model(), "lookup")
    first = model.generate([3, 4, 5, 3, 4], max_tokens=8, seed=1)
    assert first.token_ids == model.generate([3, 4, 5, 3, 4], max_tokens=8, seed=1, method="off").token_ids


@pytest.mark.parametrize("part", ["plan", "cut", "learn", "state", "key"])
def test_a_policy_that_fails_costs_speed_only(monkeypatch, caplog, part):
    def fails(*_, **__):
        raise ANY

    options = {"max_tokens": 24, "seed": 1}
    plain = ddtree.load(tiny.model(), "none").generate([3, 4, 5, 3, 4], **options)
    model = ddtree.load(tiny.model(), "lookup")
    model.generate([3, 4, 5], max_tokens=2)
    monkeypatch.setattr(*((api.cache, "key") if part == "key" else (type(model.engine.policy), part)), fails)
    assert model.generate([3, 4, 5, 3, 4], **options).token_ids == plain.token_ids
    model.close()
    assert caplog.records or part == "state"


def test_weights_that_hold_no_readable_values_have_a_fingerprint():
    class Quantized(torch.nn.Parameter):
        def reshape(self, *_):
            raise ANY

    own = tiny.model()
    own.model.norm.weight = Quantized(own.model.norm.weight.detach())
    model = ddtree.load(own, "lookup")
    assert api.cache.key(model.target, model.engine.drafter)["weights"]


def test_ctrl_c_ends_the_answer_and_leaves_the_model_usable(model):
    expected = model.generate(PROMPT, temperature=0, max_tokens=30).token_ids

    def interrupt(prefix, logits):
        if len(prefix) > 30:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    with pytest.raises(KeyboardInterrupt):
        model.generate([PROMPT, PROMPT], temperature=0, max_tokens=30, processors=[interrupt])
    assert model.engine.idle and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert model.generate(PROMPT, temperature=0, max_tokens=30).token_ids == expected


def test_a_stream_that_ctrl_c_breaks_off_goes_on_without_a_gap(model):
    """Between two pieces no token may be lost."""
    stream, taken, own = model.stream(PROMPT, temperature=0, max_tokens=30), [], api.Sequence.take_new
    pieces = []

    def interrupted(sequence):
        new = own(sequence)
        if not taken and new.text:
            taken.append(new)
            os.kill(os.getpid(), signal.SIGINT)
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.Sequence, "take_new", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pieces += stream
    pieces += stream
    assert [t for piece in pieces for t in piece.token_ids] == stream.result.token_ids


def test_a_second_ctrl_c_breaks_a_processor_off(model):
    reached = []

    def hang(prefix, logits):
        for place in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(place)
        return logits

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, max_tokens=5, processors=[hang])
    assert model.generate(PROMPT, max_tokens=2).token_ids and model.engine.idle and reached == [0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [("cache", "take"), ("cache", "commit"), ("cache", "drop_row"), ("drafter", "add_row"), ("drafter", "observe"),
     ("drafter", "drop_row"), ("engine", "_leave"), ("engine", "_round"), ("sequence", "finish")],
)  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_an_interruption_anywhere_in_a_step_leaves_the_model_usable(monkeypatch, owner, name, before):
    """A timer's, for example, which is not held back as Ctrl-C is."""
    options = {"temperature": 0, "max_tokens": 12, "budget": 4}
    model = ddtree.load(tiny.model(), "lookup", prefix_bytes=10_000)
    expected = model.generate([3, 4, 5, 3, 4], **options).token_ids
    engine = model.engine
    owners = {"cache": engine._cache, "drafter": engine.drafter, "engine": engine}
    holder = type(owners[owner]) if owner in owners else api.Sequence
    own = getattr(holder, name)
    with monkeypatch.context() as patch:

        def interrupted(*args, **kwargs):
            patch.undo()
            if not before:
                own(*args, **kwargs)
            raise KeyboardInterrupt

        patch.setattr(holder, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate([[3, 4, 5, 3, 4], [3, 4]], **options)
    assert model.generate([3, 4, 5, 3, 4], **options).token_ids == expected
    assert model.engine.idle and model.engine._cache.rows == 0


def test_a_short_context_is_served():
    model = ddtree.load(tiny.model(), "lookup", max_context=16)
    assert len(model.generate([3, 4, 5], max_tokens=3).token_ids) == 3


def test_a_stop_string_of_a_half_character_at_the_limit_is_a_stop(model):
    ids = model.generate(PROMPT, temperature=0, max_tokens=60).token_ids
    cut = next(n for n in range(1, 60) if model.tokenizer.decode(ids[:n]).endswith("\ufffd"))
    result = model.generate(PROMPT, temperature=0, max_tokens=cut, stop="\ufffd")
    assert result.finish_reason == "stop" and "\ufffd" not in result.text


def test_tokens_that_the_models_own_config_bans_do_not_come(caplog):
    own = talker.model()
    first = ddtree.load(own, "none").generate([1, 2, 3], temperature=0, max_tokens=1).token_ids
    own.generation_config.update(suppress_tokens=first, max_new_tokens=3, no_repeat_ngram_size=2)
    model = ddtree.load(own, "lookup")
    assert [record.getMessage().split()[0] for record in caplog.records] == ["no_repeat_ngram_size"]
    result = model.generate([1, 2, 3], temperature=0)
    assert len(result.token_ids) == 3 and not set(first) & set(result.token_ids)
    given = ddtree.SamplingParams(temperature=0, max_tokens=1)
    assert model.generate([1, 2, 3], given).token_ids == first
