"""Shards, features and the split of a corpus."""

import json

import numpy as np
import pytest
import torch

import tiny
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from ddtree.train.data import (
    Conversation,
    Corpus,
    features_path,
    read_shard,
    shard_path,
    teacher_pass,
    write_shard,
)
from ddtree.train.initial import draft_vocabulary

PREFIX = [1, 7, 9]


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model(num_hidden_layers=3))


def conversations(count, seed=0):
    draws = np.random.default_rng(seed)
    return [
        Conversation(draws.integers(2, tiny.VOCAB, size=8 + i % 5), answer_start=4, greedy=i % 2 == 0)
        for i in range(count)
    ]


def test_a_shard_reads_back_as_written(tmp_path):
    written = conversations(5)
    write_shard(tmp_path / "shard00000.npz", PREFIX, written)
    prefix, read = read_shard(tmp_path / "shard00000.npz")
    assert prefix == PREFIX
    for ours, theirs in zip(written, read, strict=True):
        assert (ours.tokens.tolist(), ours.answer_start, ours.greedy) == (
            theirs.tokens.tolist(),
            theirs.answer_start,
            theirs.greedy,
        )


@pytest.mark.parametrize(("highest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_token_ids_take_as_little_room_as_the_highest_allows(tmp_path, highest, dtype):
    write_shard(tmp_path / "s.npz", PREFIX, [Conversation(np.array([2, 3, highest]), 1, True)])
    with np.load(tmp_path / "s.npz") as arrays:
        assert arrays["tokens"].dtype == dtype
        assert arrays["tokens"][-1] == highest


def test_a_damaged_shard_is_named(tmp_path):
    path = tmp_path / "shard00000.npz"
    path.write_bytes(b"PK half of it")
    with pytest.raises(CheckpointError, match=r"shard00000\.npz is not a shard"):
        read_shard(path)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no answers"):
        Corpus(tmp_path)


def test_a_user_turn_that_came_up_before_is_left_out(tmp_path):
    first = conversations(4)
    again = Conversation(np.concatenate([first[1].tokens[:4], [5, 6, 7]]), 4, False)
    write_shard(shard_path(tmp_path, 0), PREFIX, first)
    write_shard(shard_path(tmp_path, 1), PREFIX, [again, *conversations(2, seed=1)])
    corpus = Corpus(tmp_path)
    assert len(corpus.conversations) == 6
    assert all(c.tokens.tolist() != again.tokens.tolist() for c in corpus.conversations)


def test_the_split_stays_the_same_while_shards_are_added(tmp_path):
    write_shard(shard_path(tmp_path, 0), PREFIX, conversations(60))
    before = Corpus(tmp_path, held_out=0.3)
    write_shard(shard_path(tmp_path, 1), PREFIX, conversations(60, seed=1))
    after = Corpus(tmp_path, held_out=0.3)
    assert [i for i in after.held_out if i < 60] == before.held_out
    assert 5 < len(before.held_out) < 40
    assert not set(after.held_out) & set(after.train)


def test_features_of_a_batch_are_those_of_each_text_alone(target):
    texts = [PREFIX + list(range(5, 5 + n)) for n in (3, 9, 6)]
    together = teacher_pass(target, texts, (0, 2))
    for text, features in zip(texts, together, strict=True):
        with torch.inference_mode():
            out = target.model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
        assert features.shape == (len(text), 3, target.hidden_size)
        # hidden_states[1] is the output of layer 0; the last entry is what enters the head.
        expected = torch.stack(
            [out.hidden_states[1][0], features[:, 1].float(), out.hidden_states[-1][0]], dim=1
        )
        torch.testing.assert_close(features.float(), expected, rtol=0.01, atol=0.01)
        logits = target.head(features[:, 2].float())
        torch.testing.assert_close(logits, out.logits[0], rtol=0.05, atol=0.2)


def test_examples_carry_the_features_of_their_own_tokens(target, tmp_path):
    write_shard(shard_path(tmp_path, 0), PREFIX, conversations(4))
    write_shard(shard_path(tmp_path, 1), PREFIX, conversations(4, seed=1))
    corpus = Corpus(tmp_path)
    corpus.prepare(target, (1,))
    for index, conversation in enumerate(corpus.conversations):
        example = corpus.example(index)
        text = PREFIX + conversation.tokens.tolist()
        assert example.tokens.tolist() == text
        assert example.tokens[example.answer_start :].tolist() == conversation.answer
        [alone] = teacher_pass(target, [text], (1,))
        torch.testing.assert_close(example.features, alone[:, :-1], rtol=0.02, atol=0.02)
        torch.testing.assert_close(example.hidden, alone[:, -1], rtol=0.02, atol=0.02)


def test_features_are_made_once_and_again_for_other_layers(target, tmp_path):
    write_shard(shard_path(tmp_path, 0), PREFIX, conversations(3))
    corpus = Corpus(tmp_path)
    corpus.prepare(target, (1,))
    made = features_path(tmp_path, 0).stat().st_mtime_ns
    corpus.prepare(target, (1,))
    assert features_path(tmp_path, 0).stat().st_mtime_ns == made
    Corpus(tmp_path).prepare(target, (0, 2))
    assert np.load(features_path(tmp_path, 0)).shape[1] == 3
    assert json.loads((tmp_path / "features.json").read_text())["layers"] == [0, 2]


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers(tmp_path):
    answers = [[4, 4, 4, 9, 9, 2], [9, 4, 3, 3, 8]]
    written = [Conversation(np.array([30 + i, 31, *a]), 2, True) for i, a in enumerate(answers)]
    write_shard(shard_path(tmp_path, 0), PREFIX, written)
    corpus = Corpus(tmp_path, held_out=0.0)
    assert draft_vocabulary(corpus, 3, frozenset()).tolist() == [3, 4, 9]
    assert draft_vocabulary(corpus, 3, frozenset({40})).tolist() == [4, 9, 40]
    with pytest.raises(ConfigError, match="draft_vocabulary=1"):
        draft_vocabulary(corpus, 1, frozenset())
