"""Answers written by the target itself."""

import argparse
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import tiny
from ddtree.errors import CacheMemoryError, ConfigError
from ddtree.model import kv_cache
from ddtree.model.target import Target
from ddtree.train import synthesize
from ddtree.train.arguments import SynthesisConfig, add_options
from ddtree.train.cli import synthesis_config
from ddtree.train.conversations import ChatTemplate
from ddtree.train.data import read_shard, shard_indices, shard_path, write_shard
from ddtree.train.synthesize import Synthesizer

EOS = 5
TEMPLATE = ChatTemplate(prefix=[1, 7, 9], middle=[EOS, 3, 11])
CONFIG = SynthesisConfig(tokens=400, rows=8, max_turn=60, max_answer=24, seed=3)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model(eos_token_id=EOS, initializer_range=0.15))


def shards(folder):
    return [read_shard(shard_path(folder, index)) for index in shard_indices(folder)]


def test_conversations_follow_the_template_and_the_limits(target, tmp_path):
    made = Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()
    found = [c for prefix, conversations in shards(tmp_path) for c in conversations]
    assert made.tokens == sum(len(c.answer) for c in found) >= CONFIG.tokens
    assert made.conversations == len(found)
    assert {c.greedy for c in found} == {True, False}
    for conversation in found:
        start = conversation.answer_start
        assert conversation.tokens[start - 3 : start].tolist() == TEMPLATE.middle
        assert EOS not in conversation.tokens[: start - 3]
        assert 4 <= len(conversation.answer) <= CONFIG.max_answer
        assert EOS not in conversation.answer[:-1]


def greedy_choices(target, prefix, conversation):
    """What the target's plain forward would have said along an answer."""
    ids = torch.tensor([prefix + conversation.tokens.tolist()])
    with torch.inference_mode():
        best = target.model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
    return best[len(prefix) + conversation.answer_start - 1 : -1].tolist()


def test_greedy_answers_are_the_targets_own(target, tmp_path):
    Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()
    prefix, conversations = shards(tmp_path)[0]
    greedy = [c for c in conversations if c.greedy]
    assert greedy
    for conversation in greedy:
        assert greedy_choices(target, prefix, conversation) == conversation.answer


def test_a_killed_run_taken_up_again_gives_the_same_shards(target, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Synthesizer(target, TEMPLATE, whole, CONFIG).run()

    class Killed(Exception):
        pass

    def write_one(path, *arguments):
        if len(shard_indices(broken)) == 1:
            raise Killed
        write_shard(path, *arguments)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(synthesize, "write_shard", write_one)
        Synthesizer(target, TEMPLATE, broken, CONFIG).run()
    shard_path(broken, 1).with_suffix(".npz.partial").write_bytes(b"half a shard")
    Synthesizer(target, TEMPLATE, broken, CONFIG).run()
    assert shard_indices(whole) == shard_indices(broken)
    for (_, ours), (_, theirs) in zip(shards(whole), shards(broken), strict=True):
        assert [c.tokens.tolist() for c in ours] == [c.tokens.tolist() for c in theirs]


def test_a_lost_shard_is_made_again_and_the_others_are_kept(target, tmp_path):
    Synthesizer(target, TEMPLATE, tmp_path, replace(CONFIG, tokens=800)).run()
    before = shard_path(tmp_path, 0).read_bytes()
    kept = shard_path(tmp_path, 1).stat().st_mtime_ns
    shard_path(tmp_path, 0).unlink()
    Synthesizer(target, TEMPLATE, tmp_path, replace(CONFIG, tokens=800)).run()
    assert shard_path(tmp_path, 1).stat().st_mtime_ns == kept
    with np.load(shard_path(tmp_path, 0)) as made:
        tokens = made["tokens"]
    shard_path(tmp_path, 0).write_bytes(before)
    with np.load(shard_path(tmp_path, 0)) as first:
        assert np.array_equal(first["tokens"], tokens)


def test_a_model_that_ends_no_turn_is_refused(tmp_path):
    target = Target(tiny.model(eos_token_id=EOS))
    target.head.weight.data[EOS] = 0.0  # its score is never the highest
    template = ChatTemplate(prefix=[1], middle=[EOS])
    with pytest.raises(ConfigError, match="ends no user turn"):
        Synthesizer(target, template, tmp_path, replace(CONFIG, rows=2, max_turn=4)).run()


def test_conversations_beyond_the_context_are_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="exceed the target's context of 512"):
        Synthesizer(target, TEMPLATE, tmp_path, replace(CONFIG, max_answer=500))


def test_rows_that_do_not_fit_are_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 10_000)
    with pytest.raises(CacheMemoryError, match="8 conversations at once do not fit: lower --rows"):
        Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()


def test_an_answer_in_a_loop_is_cut_there(target, tmp_path, monkeypatch):
    looping = []

    def is_looping(tokens):
        looping.append(len(tokens))
        return len(tokens) == 16

    monkeypatch.setattr(synthesize, "is_looping", is_looping)
    config = replace(CONFIG, max_turn=12, tokens=1)  # messages end before the first check
    Synthesizer(target, TEMPLATE, tmp_path, config).run()
    [(_, conversations)] = shards(tmp_path)
    assert set(looping) == {16}
    assert max(len(c.answer) for c in conversations) == 16


@pytest.mark.parametrize("change", [{"rows": 0}, {"greedy_share": 1.5}, {"turn_top_p": 0.0}])
def test_settings_outside_their_range_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(CONFIG, **change)


def test_a_user_turn_of_an_earlier_shard_is_left_out(target, tmp_path, monkeypatch):
    draws = synthesize._draws
    monkeypatch.setattr(synthesize, "_draws", lambda seed, index: draws(seed, max(0, index - 1)))
    config = replace(CONFIG, rows=32, tokens=600)
    made = Synthesizer(target, TEMPLATE, tmp_path, config).run()
    first, second, *_ = (conversations for _, conversations in shards(tmp_path))
    assert first and not second
    assert made.left_out["duplicate turn"] == len(first)
    assert f"duplicate turn {len(first)}" in str(made)


def test_a_folder_made_with_other_settings_is_refused(target, tmp_path):
    Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()
    with pytest.raises(ConfigError, match=r"answers made with seed=3, not 4: give another folder"):
        Synthesizer(target, TEMPLATE, tmp_path, replace(CONFIG, seed=4)).run()


@pytest.fixture(scope="module")
def talking():
    """A target with a tokenizer whose template is the one of these tests."""
    words = {f"w{i}": i for i in range(tiny.VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}")
    wrapped.chat_template = "w1 w7 w9 {{ messages[0]['content'] }} w5 w3 w11"
    return Target(tiny.model(eos_token_id=EOS, initializer_range=0.15), wrapped)


def test_given_messages_are_answered_whatever_was_killed(talking, tmp_path):
    turns = [" ".join(f"w{t}" for t in tiny.prompt(2 + n % 5, n) if t != EOS) for n in range(20)]
    config = replace(CONFIG, tokens=10**6)
    assert ChatTemplate.of(talking.tokenizer) == TEMPLATE
    made = Synthesizer(talking, TEMPLATE, tmp_path / "whole", config, turns).run()
    found = shards(tmp_path / "whole")
    assert len(found) == 3
    asked = [talking.tokenizer.decode(c.tokens[: c.answer_start - 3]) for _, part in found for c in part]
    assert set(asked) <= set(turns)
    assert made.conversations == len(asked)
    assert len(asked) + sum(made.left_out.values()) == len(turns)
    for index in range(3):
        other = tmp_path / f"without{index}"
        shutil.copytree(tmp_path / "whole", other)
        shard_path(other, index).unlink()
        Synthesizer(talking, TEMPLATE, other, config, turns).run()
        assert shard_path(other, index).read_bytes() == shard_path(tmp_path / "whole", index).read_bytes()


def test_greedy_answers_to_given_turns_are_the_targets_own(talking, tmp_path):
    turns = ["w20 w21", "w22 w23 w24 w25", "w26"]
    config = replace(CONFIG, greedy_share=1.0)
    Synthesizer(talking, TEMPLATE, tmp_path, config, turns).run()
    [(prefix, conversations)] = shards(tmp_path)
    for conversation in conversations:
        assert greedy_choices(talking, prefix, conversation) == conversation.answer


def test_given_turns_and_own_ones_do_not_mix_in_a_folder(talking, tmp_path):
    Synthesizer(talking, TEMPLATE, tmp_path, replace(CONFIG, tokens=1)).run()
    with pytest.raises(ConfigError, match="holds answers made with prompts="):
        Synthesizer(talking, TEMPLATE, tmp_path, CONFIG, ["w20"]).run()


@pytest.mark.parametrize(
    ("given", "device", "rows"), [([], "cpu", 192), ([], "cuda", 4096), (["7"], "cuda", 7)]
)
def test_a_gpu_gets_more_rows_unless_told(given, device, rows):
    parser = argparse.ArgumentParser()
    add_options(parser, SynthesisConfig)
    args = parser.parse_args(["--tokens", "5", *(f"--rows={n}" for n in given)])
    config = synthesis_config(args, torch.device(device))
    assert (config.rows, config.tokens) == (rows, 5)
