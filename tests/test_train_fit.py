"""Fitting a drafter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.errors import CheckpointError, ConfigError
from ddtree.stats import Clock
from ddtree.target import Target
from ddtree.train.data import Conversation, Corpus, shard_path, write_shard
from ddtree.train.fit import Fit, FitConfig, draft_scores, learning_rate
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.objective import Vocabulary

PREFIX = [1, 7]
MASK = 47
CONFIG = FitConfig(
    steps=12, conversations=2, anchors=6, evaluate_every=4, patience=0, learning_rate=5e-3, weight_decay=0.0
)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model(num_hidden_layers=4))


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory):
    """Answers that count upwards: after token t comes t + 1."""
    folder = tmp_path_factory.mktemp("corpus")
    draws = np.random.default_rng(0)
    written = []
    for start in draws.integers(2, 6, size=40) * 5:
        turn = draws.integers(2, 40, size=4)
        written.append(Conversation(np.concatenate([turn, np.arange(start, start + 14)]), 4, True))
    write_shard(shard_path(folder, 0), PREFIX, written)
    corpus = Corpus(folder, held_out=0.2)
    corpus.prepare(target, feature_layers(target, 2))
    return corpus


@pytest.fixture
def net(target, corpus):
    config = draft_config(target, feature_layers(target, 2), draft_layers=2, block=4, mask_id=MASK)
    return initial_net(target, config, corpus.example(corpus.train[0]))


def embedding(target):
    return target.embed.weight.detach()


def vocabulary(target):
    return Vocabulary(None, target.head.weight.detach())


def fitting(target, corpus, net, folder, config=CONFIG):
    return Fit(net, vocabulary(target), embedding(target), corpus, folder, config)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_blocks_packed_together_score_as_each_would_alone(target, corpus, net):
    example = corpus.example(corpus.train[0])
    anchors = torch.tensor([7, 9, 10, 15])
    together, _ = draft_scores(net, vocabulary(target), embedding(target), example, anchors)
    for index, anchor in enumerate(anchors):
        alone, _ = draft_scores(net, vocabulary(target), embedding(target), example, anchor[None])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-5)


def test_a_block_depends_on_the_context_before_its_anchor_and_on_nothing_after(target, corpus, net):
    example = corpus.example(corpus.train[0])
    anchors = torch.tensor([8, 12])
    before, _ = draft_scores(net, vocabulary(target), embedding(target), example, anchors)
    for place, changed in ((7, [True, True]), (8, [False, True]), (11, [False, True]), (12, [False, False])):
        features = example.features.clone()
        features[place] += 1.0
        after, _ = draft_scores(
            net, vocabulary(target), embedding(target), replace(example, features=features), anchors
        )
        assert [bool((b - a).abs().max() > 1e-4) for b, a in zip(before, after, strict=True)] == changed


def test_training_blocks_are_what_the_drafter_runs_when_drafting(target, corpus, net):
    example = corpus.example(corpus.train[0])
    anchor = 9
    packed, _ = draft_scores(net, vocabulary(target), embedding(target), example, torch.tensor([6, anchor]))
    drafter = DFlash(net, target)
    seen = []
    drafter.trace = lambda _row, logprobs: seen.append(logprobs)
    drafter.add_row()
    tokens = example.tokens[: anchor + 1].tolist()
    drafter.observe(0, tokens[:-1], example.features[:anchor].flatten(1).float())
    drafter.draft([DraftRow(tokens, budget=4, depth=3)], Clock())
    torch.testing.assert_close(seen[0], packed[1].log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_a_small_drafter_learns_a_small_set(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=150, conversations=4, evaluate_every=50, soft=0.0, learning_rate=3e-2)
    fit = fitting(target, corpus, net, tmp_path, config)
    before = fit.look(every=1)
    after = fit.run()
    assert before.chain < 1.5
    assert after.chain > 2.2
    assert after.loss < before.loss / 3


def test_a_killed_fit_taken_up_again_ends_the_same(target, corpus, net, tmp_path):
    start = {name: value.clone() for name, value in net.state_dict().items()}
    fitting(target, corpus, net, tmp_path / "whole").run()
    whole = weights(net)

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.step == 6:  # two steps past the last checkpoint
            raise Killed

    net.load_state_dict(start)
    with pytest.raises(Killed):
        fitting(target, corpus, net, tmp_path / "broken").run(kill)
    net.load_state_dict(start)
    fit = fitting(target, corpus, net, tmp_path / "broken")
    steps = []
    fit.run(lambda progress: steps.append(progress.step))
    assert steps[0] == 5
    assert torch.equal(weights(net), whole)


def test_a_fit_with_other_settings_does_not_resume(target, corpus, net, tmp_path):
    fitting(target, corpus, net, tmp_path).run()
    with pytest.raises(CheckpointError, match="other settings"):
        fitting(target, corpus, net, tmp_path, replace(CONFIG, seed=1)).run()


def test_the_best_on_held_out_answers_is_kept_and_a_stale_fit_stops(target, corpus, net, tmp_path):
    # So high a rate that the first look is the best.
    config = replace(CONFIG, steps=200, evaluate_every=2, patience=2, learning_rate=3.0)
    looks = []
    best = fitting(target, corpus, net, tmp_path, config).run(lambda p: looks.append(p.held_out))
    seen = [look for look in looks if look]
    assert len(looks) < 200
    assert best.loss == min(look.loss for look in seen)
    assert fitting(target, corpus, net, tmp_path, config).look().loss == pytest.approx(best.loss)


def test_the_target_is_left_alone(target, corpus, net, tmp_path):
    before = target.embed.weight.clone()
    fitting(target, corpus, net, tmp_path).run()
    assert torch.equal(target.embed.weight, before)
    assert target.embed.weight.grad is None


def test_the_rate_warms_up_and_falls_to_nothing():
    config = FitConfig(steps=100, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[100] == pytest.approx(0.0)


def test_the_drafter_starts_from_the_targets_last_layers(target, corpus, net):
    source = target.model.get_decoder().layers[-1]
    assert torch.equal(net.layers[1].mlp.up_proj.weight, source.mlp.up_proj.weight)
    assert feature_layers(target, 2) == (1,)
    assert feature_layers(Target(tiny.model(num_hidden_layers=12)), 2) == (1, 5, 9)
    # The identity on the last feature layer: the context is that layer's output, normalized.
    features = corpus.example(0).features.flatten(1).float()
    last = features[:, -target.hidden_size :]
    torch.testing.assert_close(net.context(features), net.hidden_norm(last))


def test_the_mask_is_a_token_that_no_answer_holds(target, corpus):
    mask = mask_token(target, corpus)
    assert mask not in PREFIX
    assert all(mask not in c.tokens for c in corpus.conversations)


def test_too_many_draft_layers_are_refused(target):
    with pytest.raises(ConfigError, match="draft_layers=4"):
        feature_layers(target, 4)


@pytest.mark.parametrize("change", [{"steps": 0}, {"learning_rate": 0.0}, {"soft": 1.5}])
def test_settings_outside_their_range_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(CONFIG, **change)
