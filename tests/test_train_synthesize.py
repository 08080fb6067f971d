"""Answers written by the target itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from ddtree.errors import ConfigError
from ddtree.target import Target
from ddtree.train.data import features_path, read_shard, shard_indices, shard_path, teacher_pass
from ddtree.train.synthesize import SynthesisConfig, Synthesizer, Template, draw, loops

EOS = 5
TEMPLATE = Template(prefix=[1, 7, 9], middle=[EOS, 3, 11])
CONFIG = SynthesisConfig(tokens=400, rows=8, max_turn=60, max_answer=24, seed=3)
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model(eos_token_id=EOS, initializer_range=0.15))


def shards(folder):
    return [read_shard(shard_path(folder, index)) for index in shard_indices(folder)]


def test_conversations_follow_the_template_and_the_limits(target, tmp_path):
    held = Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()
    found = [c for prefix, conversations in shards(tmp_path) for c in conversations]
    assert held == sum(len(c.answer) for c in found) >= CONFIG.tokens
    assert {c.greedy for c in found} == {True, False}
    for conversation in found:
        start = conversation.answer_start
        assert conversation.tokens[start - 3 : start].tolist() == TEMPLATE.middle
        assert EOS not in conversation.tokens[: start - 3]
        assert 4 <= len(conversation.answer) <= CONFIG.max_answer
        assert EOS not in conversation.answer[:-1]


def test_greedy_answers_are_the_targets_own(target, tmp_path):
    Synthesizer(target, TEMPLATE, tmp_path, CONFIG).run()
    prefix, conversations = shards(tmp_path)[0]
    greedy = [c for c in conversations if c.greedy]
    assert greedy
    for conversation in greedy:
        ids = torch.tensor([prefix + conversation.tokens.tolist()])
        with torch.inference_mode():
            best = target.model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        start = len(prefix) + conversation.answer_start
        assert best[start - 1 : -1].tolist() == conversation.answer


def test_a_killed_run_taken_up_again_gives_the_same_shards(target, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Synthesizer(target, TEMPLATE, whole, CONFIG).run()

    class Killed(Exception):
        pass

    def kill(_held):
        if len(shard_indices(broken)) == 1:
            raise Killed

    with pytest.raises(Killed):
        Synthesizer(target, TEMPLATE, broken, CONFIG).run(kill)
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


def test_features_written_on_the_way_are_those_of_a_pass_over_the_text(target, tmp_path):
    Synthesizer(target, TEMPLATE, tmp_path, CONFIG, LAYERS).run()
    for index in shard_indices(tmp_path):
        prefix, conversations = read_shard(shard_path(tmp_path, index))
        stored = torch.from_numpy(np.load(features_path(tmp_path, index))).view(torch.bfloat16)
        assert len(stored) == sum(len(c.tokens) for c in conversations)
        texts = [prefix + c.tokens.tolist() for c in conversations]
        for whole, conversation in zip(teacher_pass(target, texts, LAYERS), conversations, strict=True):
            n = len(conversation.tokens)
            torch.testing.assert_close(stored[: n - 1], whole[len(prefix) : -1], rtol=0.02, atol=0.02)
            stored = stored[n:]


def test_a_model_that_ends_no_turn_is_refused(tmp_path):
    target = Target(tiny.model())
    template = Template(prefix=[1], middle=[tiny.VOCAB + 1])
    with pytest.raises(ConfigError, match="ends no user turn"):
        Synthesizer(target, template, tmp_path, replace(CONFIG, rows=2, max_turn=4)).run()


def test_conversations_beyond_the_context_are_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="exceed the target's context of 512"):
        Synthesizer(target, TEMPLATE, tmp_path, replace(CONFIG, max_answer=500))


@pytest.mark.parametrize("change", [{"rows": 0}, {"greedy_share": 1.5}, {"turn_top_p": 0.0}])
def test_settings_outside_their_range_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(CONFIG, **change)


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        Template.of(object())


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    uniform = (torch.arange(4000) + 0.5) / 4000
    counts = draw(logits.expand(4000, 4), uniform).bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=1e-3, rtol=0)


def test_a_nucleus_holds_the_smallest_set_that_reaches_its_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    uniform = (torch.arange(1000) + 0.5) / 1000
    counts = draw(logits.expand(1000, 4), uniform, top_p=0.7).bincount(minlength=4) / 1000
    torch.testing.assert_close(counts, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=2e-3, rtol=0)


def test_the_largest_uniform_never_draws_a_token_without_mass():
    logits = torch.tensor([[3.0, 1.0, float("-inf"), float("-inf")]])
    assert draw(logits, torch.tensor([1.0])).tolist() == [1]


def test_loops_are_found_by_their_period():
    phrase = list(range(10))
    assert loops([50, 51] + phrase * 4)
    assert loops([7] * 30)
    assert not loops(phrase * 2)
    assert not loops(list(range(100)))
