"""How training batches are drawn."""

import numpy as np
import pytest

import tiny
from ddtree.train.arguments import TrainConfig
from ddtree.train.batches import Batches, random_anchors, random_prefix_lengths
from ddtree.train.data import Conversation, Corpus, shard_path, write_shard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Conversations of 10 to 210 tokens; each user turn is its own."""
    folder = tmp_path_factory.mktemp("corpus")
    draws = np.random.default_rng(0)
    written = []
    for length in draws.integers(6, 206, size=300):
        written.append(Conversation(draws.integers(2, tiny.VOCAB, size=4 + length), 4, True))
    write_shard(shard_path(folder, 0), [1, 7], written)
    return Corpus(folder, held_out=0.1)


def batches(corpus, multiple=1, **changes):
    config = TrainConfig(**{"conversations": 8, "anchors": 16, **changes})
    return Batches(corpus, config, block=4, cached=False, multiple=multiple)


def test_a_batch_holds_its_conversations_with_anchors_in_their_answers(corpus):
    batch = batches(corpus)[3]
    for row, index in enumerate(batch.indices):
        start, length = corpus.span(index)
        there = batch.prefix_lengths[row] >= 0
        anchors = batch.anchors[row][there].tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == min(16, length - 1 - start)
        assert start <= anchors[0] and anchors[-1] < min(length - 1, batch.context + 1)
        # Cut behind the last block, as far as there is text.
        cut = int(batch.lengths[row])
        assert cut == min(length, anchors[-1] + 4)
        assert batch.tokens[row, :cut].tolist() == corpus.text(index)[:cut].tolist()
        assert not batch.tokens[row, cut:].any()


def test_a_batch_is_a_function_of_seed_and_number(corpus):
    first, again = batches(corpus, prefix_share=0.5), batches(corpus, prefix_share=0.5)
    list(again.ahead(iter(range(40))))
    for number in (0, 7, 35):
        for name in ("tokens", "anchors", "prefix_lengths"):
            assert getattr(first[number], name).equal(getattr(again[number], name))
    assert not first[0].tokens.equal(batches(corpus, seed=1)[0].tokens)


def test_an_epoch_shows_every_conversation_once(corpus):
    # 32 batches make a pool; the corpus has no whole number of them.
    count = len(corpus.train)
    made = batches(corpus, conversations=1)
    seen = [index for number in range(2 * 32 * (count // 32)) for index in made[number].indices]
    counts = np.bincount(seen, minlength=count)[corpus.train]
    assert counts.max() <= 3
    assert counts.sum() == len(seen)
    assert (counts > 0).mean() > 0.99


def test_padding_is_small(corpus):
    made = [batches(corpus)[number] for number in range(64)]
    used = sum(int(batch.lengths.sum()) for batch in made)
    assert used / sum(batch.tokens.numel() for batch in made) > 0.85


def test_lengths_are_padded_to_a_multiple(corpus):
    batch = batches(corpus, multiple=32)[0]
    assert batch.tokens.shape[1] % 32 == 0
    assert batch.context % 32 == 0 and batch.context <= batch.tokens.shape[1]


def test_batches_made_ahead_come_in_order(corpus):
    made = batches(corpus)
    for number, batch in zip((5, 0, 9), made.ahead(iter([5, 0, 9])), strict=True):
        assert batch.indices == made[number].indices


def test_held_out_conversations_have_an_anchor_at_every_so_many_tokens(corpus):
    looked = list(batches(corpus).held_out(every=3, limit=20))
    assert sorted(i for batch in looked for i in batch.indices) == sorted(corpus.held_out[:20])
    for batch in looked:
        for row, index in enumerate(batch.indices):
            start, length = corpus.span(index)
            anchors = batch.anchors[row][batch.prefix_lengths[row] >= 0].tolist()
            assert anchors == list(range(start, length - 1, 3))


def test_anchors_are_distinct_answer_positions_with_a_token_after_them():
    random = np.random.default_rng(0)
    assert random_anchors(5, 12, 50, random).tolist() == [5, 6, 7, 8, 9, 10]
    few = random_anchors(5, 1000, 8, random).tolist()
    assert few == sorted(set(few)) and len(few) == 8
    assert len(random_anchors(5, 6, 8, random)) == 0


def test_prefix_lengths_are_truncated_geometric():
    anchors = np.zeros(60_000, np.int64)
    config = TrainConfig(prefix_share=0.5, prefix_decay=0.7)
    known = random_prefix_lengths(anchors, 1000, 6, config, np.random.default_rng(0))
    shares = np.bincount(known, minlength=6) / len(known)
    expected = 0.7 ** np.arange(1, 5)
    np.testing.assert_allclose(shares[1:5], 0.5 * expected / expected.sum(), atol=0.01)
    assert shares[0] == pytest.approx(0.5, abs=0.01)
    assert shares[5] == 0  # a slot to predict is left


def test_prefixes_leave_a_token_of_the_text_to_predict():
    anchors = np.arange(10, 20)
    config = TrainConfig(prefix_share=1.0)
    known = random_prefix_lengths(anchors, 21, 8, config, np.random.default_rng(0))
    assert (anchors + known + 1 <= 20).all()
    assert known[-1] == 0


def test_no_prefixes_by_default():
    assert not random_prefix_lengths(np.arange(10), 50, 4, TrainConfig(), np.random.default_rng(0)).any()
