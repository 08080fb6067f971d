"""Draft trees inside transformers' generate: the same ids as its own loop, and its habits kept."""

import functools
import gc
import threading
import time

import pytest
import torch
import transformers as hf
from transformers import (
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    set_seed,
)

import ddtree
import talker
import tiny
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.ngram import Lookup
from ddtree.errors import CheckpointError, ConfigError, PromptError, UnsupportedModelError
from ddtree.integrations import transformers as transformers_hook
from ddtree.model import architectures

RAGGED = [tiny.prompt(n, n) for n in (3, 9, 6)]
PAD = 0


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(autouse=True)
def own_settings(model):
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD


@pytest.fixture(scope="module")
def network(tmp_path_factory, model):
    return str(checkpoint.write(tmp_path_factory.mktemp("drafter"), tiny.network(model)))


def batch(prompts):
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def ours(model, prompts, **options):
    return model.generate(**batch(prompts), custom_generate=ddtree.custom_generate, **options)


def theirs(model, prompts, **options):
    return model.generate(**batch(prompts), **options)


PROCESSING = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 3},
    "bad words": {"bad_words_ids": [[13], [24, 33]]},
    "bias": {"sequence_bias": {(13,): 2.0, (24, 33): -5.0}},
    "minimum": {"min_new_tokens": 12},
    "decay": {"exponential_decay_length_penalty": (5, 1.3)},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: range(3 + row, tiny.VOCAB)},
}


@pytest.mark.parametrize("eos", [None, 24, [13, 26]], ids=["no end", "an end", "two ends"])
@pytest.mark.parametrize("name", PROCESSING)
def test_greedy_ids_are_those_of_transformers_own_loop(model, name, eos):
    model.generation_config.eos_token_id = eos
    for prompts in ([tiny.prompt(12)], RAGGED):
        options = {"max_new_tokens": 50, "do_sample": False, **PROCESSING[name]}
        if eos is None and name in ("minimum", "decay"):
            continue
        assert torch.equal(ours(model, prompts, **options), theirs(model, prompts, **options))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "qwen3_moe"])
def test_other_families_agree_too(family):
    model = tiny.model(family)
    prompts = [tiny.prompt(7)]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(ours(model, prompts, **options), theirs(model, prompts, **options))


@pytest.mark.parametrize("method", ["off", "chain", "tree"])
def test_every_drafter_and_method_gives_the_same_samples(model, network, method):
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "repetition_penalty": 1.1}
    found = []
    for drafter in ("auto", "none", network, ["lookup", network]):
        set_seed(7)
        found.append(ours(model, RAGGED, drafter=drafter, method=method, budget=9, depth=5, **options))
    assert all(torch.equal(one, found[0]) for one in found)


def test_set_seed_reproduces_and_without_it_samples_differ(model):
    options = {"max_new_tokens": 20, "do_sample": True}
    set_seed(3)
    first, second = ours(model, RAGGED, **options), ours(model, RAGGED, **options)
    set_seed(3)
    assert torch.equal(ours(model, RAGGED, **options), first)
    assert not torch.equal(first, second)


def test_greedy_search_leaves_the_random_generator_alone(model):
    before = torch.get_rng_state()
    ours(model, RAGGED, max_new_tokens=4, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_follow_the_processed_distribution(model):
    """Chi-square of the first token over many rows, top-k 4 at temperature 0.8: 3 degrees of freedom."""
    prompt, rows = tiny.prompt(5), 600
    set_seed(0)
    ids = ours(
        model, [prompt], max_new_tokens=1, do_sample=True, top_k=4, temperature=0.8, num_return_sequences=rows
    )
    with torch.inference_mode():
        top = model(torch.tensor([prompt])).logits[0, -1].topk(4)
    expected = (top.values / 0.8).softmax(-1) * rows
    counts = torch.stack([(ids[:, -1] == token).sum() for token in top.indices]).float()
    assert counts.sum() == rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # p = 0.001


def test_rows_of_one_prompt_are_samples_of_their_own(model):
    set_seed(1)
    ids = ours(model, [tiny.prompt(5)], max_new_tokens=12, do_sample=True, num_return_sequences=3)
    assert len({tuple(row.tolist()) for row in ids}) == 3


class Recorder:
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("prompts", [[tiny.prompt(8)], RAGGED], ids=["one", "three"])
@pytest.mark.parametrize("eos", [None, 24])
def test_a_streamer_is_fed_as_by_transformers(model, prompts, eos):
    model.generation_config.eos_token_id = eos
    own, other = Recorder(), Recorder()
    ours(model, prompts, max_new_tokens=25, do_sample=False, streamer=own)
    theirs(model, prompts, max_new_tokens=25, do_sample=False, streamer=other)
    assert own.puts == other.puts and own.ended == 1


def test_a_text_streamer_gets_the_text():
    model, tokenizer = talker.model(), talker.tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    inputs = tokenizer("hello there", return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 30, "do_sample": False}
    call = {**inputs, **options, "streamer": streamer, "custom_generate": ddtree.custom_generate}
    thread = threading.Thread(target=model.generate, kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    whole = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(whole)


def test_stop_strings_end_in_the_middle_of_an_accepted_path():
    model, tokenizer = talker.model(), talker.tokenizer()
    model.generation_config.eos_token_id = None
    inputs = tokenizer("abc" * 5, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
    text = tokenizer.decode(plain[len(inputs["input_ids"][0]) + 8 :])
    stop = next(char for char in text if "!" < char < "~")
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    options = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": criteria}
    expected = model.generate(**inputs, **options)
    assert expected.shape[1] < len(plain)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=ddtree.custom_generate), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["as it is", "partial"])
def test_stop_strings_by_name_are_those_of_transformers(wrap):
    model, tokenizer = talker.model(), talker.tokenizer()
    model.generation_config.eos_token_id = None
    inputs = tokenizer("abc" * 5, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
    text = tokenizer.decode(plain[len(inputs["input_ids"][0]) + 8 :])
    stop = next(char for char in text if "!" < char < "~")
    options = {"max_new_tokens": 40, "do_sample": False, "stop_strings": [stop], "tokenizer": tokenizer}
    expected = model.generate(**inputs, **options)
    assert expected.shape[1] < len(plain)
    own = model.generate(**inputs, **options, custom_generate=wrap(ddtree.custom_generate))
    assert torch.equal(own, expected)
    with pytest.raises(ValueError, match="stop strings"):
        model.generate(**inputs, **options | {"tokenizer": None}, custom_generate=ddtree.custom_generate)


def test_a_tokenizer_without_stop_strings_changes_nothing(model):
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = theirs(model, RAGGED, **options)
    assert torch.equal(ours(model, RAGGED, tokenizer=talker.tokenizer(), **options), expected)


class Until(StoppingCriteria):
    """Ends a row when it holds `token`; without an end token, transformers' other rows run on unpadded."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == self.token


def test_criteria_of_ones_own_end_rows_as_in_transformers(model):
    criteria = StoppingCriteriaList([Until(24)])
    options = {"max_new_tokens": 60, "do_sample": False, "stopping_criteria": criteria}
    expected = theirs(model, RAGGED, **options)
    assert expected.shape[1] < 9 + 60
    assert torch.equal(ours(model, RAGGED, **options), expected)


def test_a_time_limit_ends_the_text(model):
    criteria = StoppingCriteriaList([MaxTimeCriteria(0.0, time.time() - 1)])
    ids = ours(model, [tiny.prompt(4)], max_new_tokens=50, do_sample=False, stopping_criteria=criteria)
    assert ids.shape[1] == 5


def test_criteria_see_the_scores_where_they_are_asked_for(model):
    seen = []

    class Looks(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            seen.append((input_ids.shape[1], len(scores), scores[-1].shape))
            return torch.zeros(1, dtype=torch.bool)

    ours(
        model, [tiny.prompt(4)], max_new_tokens=3, do_sample=False, return_dict_in_generate=True,
        output_scores=True, stopping_criteria=StoppingCriteriaList([Looks()]),
    )  # fmt: skip
    assert seen == [(4 + n, n, (1, tiny.VOCAB)) for n in (1, 2, 3)]


def test_the_output_class_has_scores_and_logits(model):
    model.generation_config.eos_token_id = 24
    options = {
        "max_new_tokens": 30, "do_sample": False, "repetition_penalty": 1.3, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    }  # fmt: skip
    own, other = ours(model, RAGGED, **options), theirs(model, RAGGED, **options)
    assert torch.equal(own.sequences, other.sequences)
    for name in ("scores", "logits"):
        mine, yours = getattr(own, name), getattr(other, name)
        assert len(mine) == len(yours)
        for row in range(3):
            new = own.sequences[row, 9:].tolist()
            length = new.index(24) + 1 if 24 in new else len(new)
            for step in range(length):
                assert torch.allclose(mine[step][row], yours[step][row], atol=1e-4)
            assert all(not step[row].any() for step in mine[length:])


def test_a_processor_of_ones_own_sees_the_prefix_of_each_choice(model):
    seen = []

    def note(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    ids = ours(
        model,
        [tiny.prompt(6)],
        max_new_tokens=12,
        do_sample=False,
        logits_processor=LogitsProcessorList([note]),
    )
    assert seen == [ids[0, :end].tolist() for end in range(6, 18)]


def test_the_model_is_left_as_it_was(model, network):
    attention = model.config._attn_implementation
    ours(model, RAGGED, max_new_tokens=8, drafter=network)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == attention


def test_a_drafter_is_read_once_and_keeps_nothing_from_call_to_call(model, network, monkeypatch):
    reads = []
    load = transformers_hook.load_drafter
    monkeypatch.setattr(transformers_hook, "load_drafter", lambda *a: reads.append(a) or load(*a))
    transformers_hook._drafters.clear()
    options = {"max_new_tokens": 25, "do_sample": False, "drafter": network}
    first = ours(model, RAGGED, **options)
    ours(model, [tiny.prompt(30, 9)], **options)
    again = ours(model, RAGGED, **options)
    assert torch.equal(first, again) and len(reads) == 1
    (kept,) = transformers_hook._drafters[model].values()
    assert kept.backbone._cache.rows == 0


def test_a_call_that_fails_leaves_no_drafter_behind(model, network):
    def broken(input_ids, scores):
        raise ZeroDivisionError("mine")

    transformers_hook._drafters.clear()
    ours(model, RAGGED, max_new_tokens=4, drafter=network)
    assert len(transformers_hook._drafters[model]) == 1
    with pytest.raises(ZeroDivisionError, match="mine"):
        ours(model, RAGGED, max_new_tokens=4, drafter=network, logits_processor=LogitsProcessorList([broken]))
    assert not transformers_hook._drafters[model]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_drafter_of_ones_own_serves_call_after_call_and_is_free_between(model):
    drafter = Lookup(vocab_size=tiny.VOCAB)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = theirs(model, RAGGED, **options)
    for _ in range(2):
        assert torch.equal(ours(model, RAGGED, drafter=drafter, **options), expected)
    with ddtree.load(tiny.model(), drafter), pytest.raises(ConfigError, match="in use by another model"):
        ours(model, RAGGED, drafter=drafter, **options)
    assert torch.equal(ours(model, RAGGED, drafter=drafter, **options), expected)


def test_kept_drafters_do_not_keep_their_model_alive(network):
    transformers_hook._drafters.clear()
    other = tiny.model()
    ours(other, RAGGED, max_new_tokens=4, drafter=network, pad_token_id=PAD)
    assert len(transformers_hook._drafters) == 1
    del other
    gc.collect()
    assert len(transformers_hook._drafters) == 0


def test_a_recurrent_model_is_decoded_autoregressively():
    torch.manual_seed(0)
    config = hf.MambaConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, num_hidden_layers=2, initializer_range=0.3, eos_token_id=None
    )
    model = hf.MambaForCausalLM(config).eval()
    ids = torch.tensor([tiny.prompt(6)])
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=ddtree.custom_generate, **options), expected)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        model.generate(ids, custom_generate=ddtree.custom_generate, drafter="lookup", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "not beam search: leave out the options"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "not contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "not assisted generation"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions cannot be given"),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states cannot be given",
        ),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"budget": 5000}, r"budget=5000 is outside 0..1024"),
        ({"depth": 0}, r"depth=0 is outside 1..16"),
        ({"budget": 2.5}, "budget must be a whole number, not 2.5"),
        ({"budget": True}, "budget must be a whole number, not True"),
        ({"depth": "deep"}, "depth must be a whole number, not 'deep'"),
        ({"depth": True}, "depth must be a whole number, not True"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(model, options, message):
    with pytest.raises(ConfigError, match=message):
        ours(model, [tiny.prompt(5)], max_new_tokens=5, **options)


def test_inputs_that_trees_do_not_take_are_refused_by_name(model):
    def call(**inputs):
        return model.generate(**inputs, custom_generate=ddtree.custom_generate, max_new_tokens=5)

    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedModelError, match="inputs_embeds is an input that draft trees do not take"):
        call(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(UnsupportedModelError, match="pad on the left"):
        call(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(UnsupportedModelError, match="position_ids of one's own"):
        call(input_ids=ids, position_ids=torch.tensor([[4, 5, 6]]))
    name = architectures.cache_argument(model)
    cache = architectures.cache_of(model(ids[:, :2], use_cache=True))
    with pytest.raises(UnsupportedModelError, match=f"{name} of one's own is neither continued nor filled"):
        call(input_ids=ids, **{name: cache})


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
SHORT = 24


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_past_its_context_a_rotary_model_goes_on_as_in_transformers(family):
    model = tiny.model(family, max_position_embeddings=SHORT)
    options = {"max_new_tokens": SHORT, "do_sample": False, "pad_token_id": PAD}
    for prompt in (tiny.prompt(SHORT // 2), tiny.prompt(SHORT + 3)):
        expected = theirs(model, [prompt], **options)
        assert expected.shape[1] == len(prompt) + SHORT
        assert torch.equal(ours(model, [prompt], **options), expected)


def test_positions_that_change_with_the_length_end_with_the_context():
    model = tiny.model(max_position_embeddings=SHORT, **DYNAMIC)
    options = {"max_new_tokens": SHORT, "do_sample": False, "pad_token_id": PAD}
    ids = ours(model, [tiny.prompt(SHORT // 2)], **options)
    assert ids.shape[1] == SHORT
    assert torch.equal(ids, theirs(model, [tiny.prompt(SHORT // 2)], **options)[:, :SHORT])


def test_a_prompt_without_room_and_a_missing_drafter_are_named(model):
    with pytest.raises(PromptError, match=f"the context holds {SHORT}"):
        ours(tiny.model(max_position_embeddings=SHORT, **DYNAMIC), [tiny.prompt(SHORT)], max_new_tokens=5)
    with pytest.raises(CheckpointError, match="/no/such/drafter does not exist"):
        ours(model, RAGGED, max_new_tokens=5, drafter="/no/such/drafter")
    assert not any(module._forward_hooks for module in model.modules())


def test_an_argument_that_generate_drops_is_found_in_its_call():
    found = []

    def custom(model, input_ids, **_):
        found.append(transformers_hook._dropped_argument("streamer"))
        return input_ids

    class Streamer:
        def put(self, value):
            pass

    streamer = Streamer()
    ids = torch.tensor([tiny.prompt(4)])
    tiny.model().generate(ids, custom_generate=custom, streamer=streamer, max_new_tokens=2)
    tiny.model().generate(ids, custom_generate=custom, max_new_tokens=2)
    assert found == [streamer, None]
    assert transformers_hook._dropped_argument("streamer") is None


def picture_model():
    """A tiny model of text and pictures, whose positions are of several kinds."""
    shape = {name: value for name, value in tiny._SHAPE.items() if name != "max_position_embeddings"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    config = hf.Qwen2VLConfig(
        text_config={**shape, "rope_parameters": rope}, vision_config=vision, image_token_id=47
    )
    return hf.Qwen2VLForConditionalGeneration(config).eval()


def test_text_alone_is_taken_from_a_model_of_text_and_pictures():
    model = picture_model()
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD}
    for prompts in ([tiny.prompt(12)], RAGGED):
        expected = theirs(model, prompts, **options)
        assert torch.equal(ours(model, prompts, **options), expected)
        kinds = torch.zeros_like(batch(prompts)["input_ids"])
        assert torch.equal(ours(model, prompts, mm_token_type_ids=kinds, **options), expected)
    kinds[0, -1] = 1
    with pytest.raises(UnsupportedModelError, match="mm_token_type_ids is an input"):
        ours(model, RAGGED, mm_token_type_ids=kinds, **options)
    with pytest.raises(UnsupportedModelError, match="position_ids of one's own"):
        model.generate(
            torch.tensor([[5, 6, 7]]), position_ids=torch.tensor([[[0, 1, 2]], [[0, 1, 2]], [[0, 1, 1]]]),
            custom_generate=ddtree.custom_generate, **options,
        )  # fmt: skip
