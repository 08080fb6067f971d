"""Fitting a drafter."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from ddtree.stats import Clock
from ddtree.train import arguments
from ddtree.train.arguments import Objective, Schedule, TrainConfig
from ddtree.train.batches import Batches, block_states
from ddtree.train.data import Conversation, Corpus, Teacher, shard_path, write_shard
from ddtree.train.evaluate import replay
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.jobs import DrafterJob, TrainingBackbone
from ddtree.train.loss import Vocabulary, head_loss
from ddtree.train.trainer import Trainer
from ddtree.train.training_log import read_log

PREFIX = [1, 7]
MASK = 47
CONFIG = TrainConfig(
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
        written.append(Conversation(np.concatenate([turn, np.arange(start, start + 13)]), 4, True))
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
    job = DrafterJob(TrainingBackbone.of(net, target, None), config.objective)
    return Trainer(job, corpus, folder, config, target.device)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def batch_of(corpus, anchors, known=None, indices=None):
    """A batch of training conversations, one of them by default, each with its anchors."""
    indices = corpus.train[: len(anchors)] if indices is None else indices
    known = [[0] * len(places) for places in anchors] if known is None else known
    places = [np.array(p) for p in anchors]
    return Batches(corpus, CONFIG, block=4, cached=True).collate(
        indices, places, [np.array(k) for k in known]
    )


def scores(target, net, batch, features=None):
    features = batch.features if features is None else features
    states, _ = block_states(net, embedding(target), batch, features[:, :, :-1])
    return vocabulary(target).logits(net.norm(states))


def test_blocks_packed_together_score_as_each_would_alone(target, corpus, net):
    anchors = [[7, 9, 10, 15], [8, 9]]
    known = [[0, 2, 0, 1], [0, 1]]
    together = scores(target, net, batch_of(corpus, anchors, known))
    for row, places in enumerate(anchors):
        for index, anchor in enumerate(places):
            single = batch_of(corpus, [[anchor]], [[known[row][index]]], [corpus.train[row]])
            alone = scores(target, net, single)
            torch.testing.assert_close(together[row, index], alone[0, 0], rtol=1e-4, atol=1e-5)


def test_a_block_depends_on_the_context_before_its_anchor_and_on_nothing_after(target, corpus, net):
    batch = batch_of(corpus, [[8, 12]])
    before = scores(target, net, batch)[0]
    for place, changed in ((7, [True, True]), (8, [False, True]), (11, [False, True]), (12, [False, False])):
        features = batch.features.clone()
        features[:, place] += 1.0
        after = scores(target, net, batch, features)[0]
        assert [bool((b - a).abs().max() > 1e-4) for b, a in zip(before, after, strict=True)] == changed


def test_a_block_sees_its_anchor_and_given_tokens_and_no_other_token(target, corpus, net):
    batch = batch_of(corpus, [[8, 12]], [[1, 0]])
    before = scores(target, net, batch)[0]
    for place, changed in ((7, [0, 0]), (8, [1, 0]), (9, [1, 0]), (10, [0, 0]), (12, [0, 1]), (13, [0, 0])):
        tokens = batch.tokens.clone()
        tokens[:, place] = 3
        after = scores(target, net, replace(batch, tokens=tokens))[0]
        assert [int((b - a).abs().max() > 1e-4) for b, a in zip(before, after, strict=True)] == changed


def gradient(target, net, batch):
    """The gradient of the summed objective of a batch by the drafter's weights."""
    states, blocks = block_states(net, embedding(target), batch, batch.features[:, :, :-1])
    normed = net.norm(states)
    hidden = batch.features[:, :, -1]
    _, derived = head_loss(
        normed.detach(), batch, blocks, hidden, vocabulary(target), Objective("ce", soft=0.5)
    )
    net.zero_grad()
    normed.backward(derived)
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def test_the_gradient_of_a_batch_is_the_sum_of_that_of_its_blocks(target, corpus, net):
    together = gradient(target, net, batch_of(corpus, [[7, 9, 14], [8, 9]], [[0, 1, 0], [2, 0]]))
    parts = torch.zeros_like(together)
    for row, places in ((0, [(7, 0), (9, 1), (14, 0)]), (1, [(8, 2), (9, 0)])):
        for anchor, known in places:
            parts += gradient(target, net, batch_of(corpus, [[anchor]], [[known]], [corpus.train[row]]))
    torch.testing.assert_close(together, parts, rtol=1e-3, atol=1e-4 * float(together.abs().max()))


def test_training_blocks_are_what_the_drafter_runs_when_drafting(target, corpus, net):
    example = corpus.example(corpus.train[0])
    anchor = 9
    packed = scores(target, net, batch_of(corpus, [[6, anchor]]))[0]
    backbone = Backbone(net, target)
    drafter = DFlash(backbone)
    seen = []
    drafter.trace = lambda _row, logprobs: seen.append(logprobs)
    drafter.add_row()
    tokens = example.tokens[: anchor + 1].tolist()
    drafter.observe(0, tokens[:-1], example.features[:anchor].flatten(1).float())
    drafter.draft([DraftRow(tokens, budget=4, depth=3)], Clock())
    torch.testing.assert_close(seen[0], packed[1].log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_blocks_with_given_tokens_are_those_of_a_second_pass(target, corpus, net):
    example = corpus.example(corpus.train[0])
    anchor, known = 9, 2
    batch = batch_of(corpus, [[6, anchor]], [[0, known]])
    states, _ = block_states(net, embedding(target), batch, batch.features[:, :, :-1])
    backbone = Backbone(net, target)
    backbone.add_row()
    backbone.observe(0, example.features[:anchor].flatten(1).float())
    given = example.tokens[anchor : anchor + known + 1][None, None]
    drafted = backbone.branches(given, torch.tensor([[known + 1]]), 3)
    torch.testing.assert_close(drafted[0, 0], states[0, 1], rtol=1e-4, atol=1e-4)


def test_features_computed_in_the_step_are_those_of_the_disk(target, corpus):
    batch = batch_of(corpus, [[8, 12], [7, 9]])
    online = Teacher(target, feature_layers(target, 2))(batch.tokens)
    for row in range(2):
        length = int(batch.lengths[row])
        torch.testing.assert_close(
            online[row, :length].bfloat16(), batch.features[row, :length], rtol=0.02, atol=0.02
        )


@pytest.mark.slow
def test_a_small_drafter_learns_a_small_set_by_heart(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=250, conversations=8, evaluate_every=250, soft=0.0, learning_rate=2e-2)
    fit = fitting(target, corpus, net, tmp_path, config)
    before = fit.evaluate(every=1)["dflash"]
    after = fit.run()["dflash"]
    assert before.tau < 1.5
    assert after.tau > 2
    examples = [corpus.example(index) for index in corpus.train]
    tau = replay(DFlash(Backbone(net, target)), examples, budget=3, chain=True, dtype=torch.float32).tau
    assert tau > 0.9 * 4


@pytest.mark.parametrize(
    "change", [{}, {"accumulate": 2, "ema": 0.9, "prefix_share": 0.5, "loss": "dpace"}], ids=["plain", "all"]
)
def test_a_killed_fit_taken_up_again_ends_the_same(target, corpus, net, tmp_path, change):
    config = replace(CONFIG, **change)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    fitting(target, corpus, net, tmp_path / "whole", config).run()
    whole = weights(net)

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.step == 6:  # two steps past the last checkpoint
            raise Killed

    net.load_state_dict(start)
    with pytest.raises(Killed):
        fitting(target, corpus, net, tmp_path / "broken", config).run(kill)
    net.load_state_dict(start)
    fit = fitting(target, corpus, net, tmp_path / "broken", config)
    steps = []
    fit.run(lambda progress: steps.append(progress.step))
    assert steps[0] == 5
    assert torch.equal(weights(net), whole)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("whole", "broken")]
    for line in (line for log in logs for line in log):
        del line["seconds"]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [4, 8, 12]


def test_a_fit_with_other_settings_does_not_resume(target, corpus, net, tmp_path):
    fitting(target, corpus, net, tmp_path).run()
    fitting(target, corpus, net, tmp_path).run()
    other = initial_net(target, replace(net.config, block_size=5), corpus.example(corpus.train[0]))
    with pytest.raises(CheckpointError, match="other settings"):
        fitting(target, corpus, other, tmp_path).run()
    with pytest.raises(CheckpointError, match="other settings"):
        fitting(target, corpus, net, tmp_path, replace(CONFIG, seed=1)).run()


def test_the_best_on_held_out_answers_is_kept_and_a_stale_fit_stops(target, corpus, net, tmp_path):
    # So high a rate that the first look is the best.
    config = replace(CONFIG, steps=200, evaluate_every=2, patience=2, learning_rate=3.0)
    looks = []
    best = fitting(target, corpus, net, tmp_path, config).run(lambda p: looks.append(p.held_out))["dflash"]
    seen = [look["dflash"] for look in looks if look]
    assert len(looks) < 200
    assert best.loss == min(look.loss for look in seen)
    assert fitting(target, corpus, net, tmp_path, config).evaluate()["dflash"].loss == pytest.approx(
        best.loss
    )


def test_the_target_is_left_alone(target, corpus, net, tmp_path):
    before = target.embed.weight.clone()
    fitting(target, corpus, net, tmp_path).run()
    assert torch.equal(target.embed.weight, before)
    assert target.embed.weight.grad is None


def test_the_rate_warms_up_and_falls_to_nothing():
    schedule = Schedule(replace(CONFIG, steps=100, learning_rate=1.0))
    rates = [schedule.learning_rate(step) for step in range(100)]
    assert rates[:4] == pytest.approx([0.125, 0.375, 0.625, 0.875])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[99] == pytest.approx(0.0, abs=1e-3)


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on by a hundredth of a second whenever it is read."""
    ticks = count()
    monkeypatch.setattr(arguments, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))


def test_a_fit_by_the_clock_ends_in_time_with_a_rate_of_nothing(target, corpus, net, tmp_path, seconds):
    config = replace(CONFIG, minutes=1 / 60, evaluate_every=10_000)
    seen = []
    fit = fitting(target, corpus, net, tmp_path, config)
    fit.run(seen.append)
    assert 1 <= seen[-1].seconds < 1.1
    assert fit.step == seen[-1].step > 12
    rates = [line["rate"] for line in read_log(tmp_path / "log.jsonl")]
    assert rates[-1] < 0.1 * max(rates)


def test_a_killed_fit_by_the_clock_goes_on_with_the_time_it_has_left(target, corpus, net, tmp_path, seconds):
    config = replace(CONFIG, minutes=1 / 60, evaluate_every=4)

    def kill(progress):
        if progress.seconds > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting(target, corpus, net, tmp_path, config).run(kill)
    seen = []
    fitting(target, corpus, net, tmp_path, config).run(seen.append)
    assert seen[0].step > 4
    assert 0.3 < seen[0].seconds < 0.6
    assert 1 <= seen[-1].seconds < 1.1


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


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"learning_rate": 0.0}, {"soft": 1.5}, {"loss": "mse"}, {"minutes": 0.0}, {"ema": 1.0}],
)
def test_settings_outside_their_range_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(CONFIG, **change)


def test_a_loss_that_is_no_number_ends_the_fit(target, corpus, net, tmp_path):
    with torch.no_grad():
        net.fc.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="not a number at step 1"):
        fitting(target, corpus, net, tmp_path).run()


def test_the_average_is_what_is_kept(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=4, ema=0.5)
    plain = replace(config, ema=0.0)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    path = []
    fit = fitting(target, corpus, net, tmp_path / "plain", plain)
    fit.run(lambda _: path.append(weights(net).clone()))
    net.load_state_dict(start)
    mean = weights(net).clone()
    for step, now in enumerate(path):
        mean = mean.lerp(now, 1 - min(0.5, (step + 1) / (step + 10)))
    fitting(target, corpus, net, tmp_path / "mean", config).run()
    torch.testing.assert_close(weights(net), mean)
