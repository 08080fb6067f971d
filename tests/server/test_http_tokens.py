"""Texts and bytes of single tokens; sampling that a request leaves out."""

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

import talker
import tiny
import words
from ddtree.sampling.params import read_generation_config
from ddtree.sampling.sampler import TokenLogprobs
from ddtree.server.schemas import ChatRequest, CompletionRequest, requested_logprobs, sampling_params, seeded
from ddtree.server.tokens import CompletionLogprobs, TokenTexts, chat_logprobs

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_byte_level_tokens_are_their_bytes():
    tokenizer = talker.tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a é\n€", add_special_tokens=False)
    assert b"".join(texts(token)[1] for token in ids) == "a é\n€".encode()
    assert [texts(token)[0] for token in ids[:3]] == ["a", " ", "bytes:\\xc3"]
    assert texts(talker.BOT) == ("<bot>", b"<bot>")
    assert {len(texts(token)[1]) for token in range(256)} == {1}
    assert len({texts(token)[1] for token in range(256)}) == 256


def test_words_byte_fallback_and_spaces_of_sentencepiece():
    vocab = {"<unk>": 0, "▁the": 1, "re": 2, "<0xE2>": 3, "▁": 4}
    built = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=built))
    assert [texts(token) for token in (1, 2, 3, 4)] == [
        (" the", b" the"), ("re", b"re"), ("bytes:\\xe2", b"\xe2"), (" ", b" "),
    ]  # fmt: skip
    assert TokenTexts(words.tokenizer())(9)[0] == "bb"
    # A model may have more ids than its tokenizer has tokens.
    assert TokenTexts(words.tokenizer())(4000) == ("", b"")
    # Texts of a model without a tokenizer must tell tokens apart, too.
    assert TokenTexts(None)(3) == ("3", b"")


def test_log_probabilities_in_both_forms():
    texts = TokenTexts(words.tokenizer())
    entries = [
        TokenLogprobs(9, -3.0, ((0, -0.5), (1, -1.0))),
        TokenLogprobs(0, float("-inf"), ((0, float("-inf")),)),
    ]
    (first, second) = chat_logprobs(entries, texts)["content"]
    assert first["token"] == "bb" and first["bytes"] == [98, 98] and first["logprob"] == -3.0
    assert [one["token"] for one in first["top_logprobs"]] == ["aa", "ab"]
    assert second["logprob"] == -9999.0
    one = CompletionLogprobs(texts, 10)
    assert one(entries[:1]) == {
        "tokens": ["bb"], "token_logprobs": [-3.0], "top_logprobs": [{"ab": -1.0, "aa": -0.5, "bb": -3.0}],
        "text_offset": [10],
    }  # fmt: skip
    assert one(entries[1:])["text_offset"] == [12]
    assert CompletionLogprobs(texts, 0, frozenset([9]))(entries)["text_offset"] == [0, 0]


def params(defaults=None, **fields):
    request = ChatRequest(**CHAT, **fields)
    return sampling_params(request, defaults or {}, talker.tokenizer(), max_tokens=20)


def test_a_request_goes_before_the_models_config_and_that_before_ours():
    model = tiny.model()
    model.generation_config = GenerationConfig(
        temperature=0.6, top_k=20, top_p=0.9, do_sample=True, max_length=7
    )
    defaults, ignored = read_generation_config(model, 100)
    assert ignored == [] and defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    found = params(defaults, top_k=5, temperature=None)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 5, 0.9, 0.0)
    assert params().temperature == 1.0 and params(defaults, temperature=0).greedy
    model.generation_config = GenerationConfig()
    assert read_generation_config(model, 100) == ({}, [])


def test_the_models_banned_tokens_and_longest_answer_hold_beside_the_requests():
    model = tiny.model()
    model.generation_config = GenerationConfig(
        suppress_tokens=[3], bad_words_ids=[[4, 5]], max_new_tokens=7, no_repeat_ngram_size=2, top_p=1.5,
        begin_suppress_tokens=[1000],
    )  # fmt: skip
    defaults, ignored = read_generation_config(model, 100)
    assert defaults == {"bad_words": ((4, 5), (3,)), "max_tokens": 7}
    assert [reason.split()[0] for reason in ignored] == [
        "top_p",
        "no_repeat_ngram_size",
        "begin_suppress_tokens",
    ]
    found = params(defaults, bad_words=["a"])
    assert found.max_tokens == 7 and set(found.bad_words) > {(4, 5), (3,)}
    model.generation_config = GenerationConfig(suppress_tokens=[1000])
    assert "suppress_tokens" in read_generation_config(model, 100)[1][0]


def test_minus_one_means_not_given():
    found = params(seed=-1, max_tokens=-1, top_k=-1)
    assert (found.seed, found.max_tokens, found.top_k) == (None, 20, 0)
    assert params(max_completion_tokens=-1, max_tokens=3).max_tokens == 3


def test_whole_numbers_may_be_written_with_a_point():
    found = params(max_tokens=6.0, top_k=5.0, seed=2.0, stop_token_ids=[9.0], min_tokens=1.0)
    assert (found.max_tokens, found.top_k, found.seed, found.stop_token_ids) == (6, 5, 2, (9,))
    with pytest.raises(ValidationError):
        ChatRequest(**CHAT, max_tokens=6.5)


def test_no_logprobs_in_every_spelling_that_clients_send():
    assert params(top_logprobs=0).logprobs is None and params(logprobs=False, top_logprobs=0).logprobs is None
    assert requested_logprobs(CompletionRequest(prompt="x", logprobs=False)) is None
    assert requested_logprobs(CompletionRequest(prompt="x", logprobs=0)) == 0


def test_names_that_differ_from_the_librarys():
    found = params(
        include_stop_str_in_output=True, stop="x", bad_words=["a"], max_tokens=3, max_completion_tokens=4,
        logit_bias={"7": 1.5}, seed=-2, ignore_eos=True, min_tokens=2, skip_special_tokens=False, stop_token_ids=[9],
    )  # fmt: skip
    assert found.include_stop and found.stop == ("x",) and found.bad_words and found.max_tokens == 4
    assert found.logit_bias == {7: 1.5} and found.seed == 2**63 - 2 and found.ignore_eos
    assert found.min_tokens == 2 and not found.skip_special_tokens and found.stop_token_ids == (9,)
    assert params().max_tokens == 20 and params(max_tokens=3).max_tokens == 3


@pytest.mark.parametrize("seed", [None, 5, 2**63 - 1])
def test_each_choice_has_a_seed_of_its_own_and_the_first_the_one_given(seed):
    seeds = [one.seed for one in seeded(params(seed=seed), 3)]
    assert seeds[0] == seed
    assert seeds == [None] * 3 if seed is None else len(set(seeds)) == 3
