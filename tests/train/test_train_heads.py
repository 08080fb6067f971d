"""Training heads on a frozen drafter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.heads import KINDS, create
from ddtree.errors import CheckpointError
from ddtree.model.target import Target
from ddtree.train.arguments import Objective, TrainConfig
from ddtree.train.batches import Batches
from ddtree.train.data import Conversation, Corpus, shard_path, write_shard
from ddtree.train.initial import draft_config, feature_layers, initial_net
from ddtree.train.jobs import HeadsJob, TrainingBackbone, build_heads
from ddtree.train.loss import OBJECTIVE
from ddtree.train.trainer import Trainer

IDS = torch.arange(0, tiny.VOCAB, 2)
CONFIG = TrainConfig(
    steps=60, conversations=8, anchors=8, evaluate_every=60, patience=0, learning_rate=1e-2, weight_decay=0.0
)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model(num_hidden_layers=4))


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_answers(folder)
    corpus = Corpus(folder, held_out=0.2)
    corpus.prepare(target, feature_layers(target, 2))
    return corpus


def write_answers(folder):
    """Answers in which each token determines the next, among 24 even ones; the first is drawn at random."""
    folder.mkdir(exist_ok=True)
    draws = np.random.default_rng(0)
    written = []
    for _ in range(60):
        turn, first = draws.integers(2, 40, size=4), draws.integers(0, 24)
        answer = 2 * ((first + 7 * np.arange(14)) % 24)
        written.append(Conversation(np.concatenate([turn, answer]), 4, True))
    write_shard(shard_path(folder, 0), [1, 7], written)


@pytest.fixture
def net(target, corpus):
    config = draft_config(target, feature_layers(target, 2), draft_layers=2, block=4, mask_id=47)
    return initial_net(target, config, corpus.example(corpus.train[0]))


def job_of(target, net, heads, objective=None):
    objectives = {kind: objective or Objective("ce") for kind in heads}
    return HeadsJob(heads, objectives, TrainingBackbone.of(net, target, IDS))


def batch_of(corpus):
    places = [np.array([7, 9, 14]), np.array([8, 10])]
    known = [np.zeros_like(p) for p in places]
    return Batches(corpus, CONFIG, block=4, cached=True).collate(corpus.train[:2], places, known)


def test_the_trunk_is_the_one_that_heads_draft_on(target, net):
    ours = TrainingBackbone.of(net, target, IDS)
    theirs = Backbone(net, target, draft_ids=IDS)
    tokens = torch.arange(12).view(3, 4)
    assert ours.index(tokens).equal(theirs.index(tokens))
    assert ours.embed(tokens).equal(theirs.embed(tokens))
    states = torch.randn(2, 3, 32)
    torch.testing.assert_close(ours.logits(ours.norm(states)), theirs.logits(theirs.norm(states)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", [Objective("ce", soft=0.3), Objective("kl")], ids=["ce", "kl"])
def test_a_heads_gradient_is_autograds(target, corpus, net, kind, objective):
    [(_, head)] = build_heads([kind], 32, len(IDS), seed=0).items()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = batch_of(corpus)
    job = job_of(target, net, {kind: head}, objective)
    sums = job.train(batch, batch.features)[kind]
    ours = torch.cat([p.grad.flatten() for p in head.parameters()])
    head.zero_grad()
    # By hand, one block at a time, from what the drafter gives when drafting.
    backbone = Backbone(net, target, draft_ids=IDS)
    backbone.add_row()
    total = torch.zeros(())
    for row, places in enumerate(([7, 9, 14], [8, 10])):
        example = corpus.example(corpus.train[row])
        for anchor in places:
            backbone.drop_row(0)
            backbone.add_row()
            backbone.observe(0, example.features[:anchor].flatten(1).float())
            text = example.tokens[anchor : anchor + 4]
            states = backbone.states([int(text[0])], 3).clone()
            logq = head(backbone, states, text[None, : len(text) - 1].new_tensor(_padded(text))).log_softmax(
                -1
            )
            for slot, token in enumerate(text[1:].tolist()):
                teacher = (example.hidden[anchor + slot].float() @ target.head.weight[IDS].T).softmax(-1)
                hard, soft = -logq[0, slot, token // 2], -(teacher * logq[0, slot]).sum()
                share = objective.share
                total = total + np.exp(-slot / objective.gamma) * ((1 - share) * hard + share * soft)
    total.backward()
    by_hand = torch.cat([p.grad.flatten() for p in head.parameters()])
    assert float(sums[OBJECTIVE]) == pytest.approx(float(total.detach()), rel=1e-2)
    torch.testing.assert_close(ours, by_hand, rtol=0.05, atol=0.02 * float(by_hand.abs().max()))


def _padded(text):
    """The tokens before three slots."""
    return [[*text.tolist(), 0, 0, 0][:3]]


def test_heads_learn_what_the_drafter_cannot_know(target, corpus, net, tmp_path):
    heads = build_heads(list(KINDS), 32, len(IDS), seed=0)
    frozen = {name: value.clone() for name, value in net.state_dict().items()}
    job = job_of(target, net, heads)
    fit = Trainer(job, corpus, tmp_path, CONFIG, target.device)
    before = fit.evaluate()
    assert len({round(look.tau, 6) for look in before.values()}) == 1  # an untrained head corrects nothing
    after = fit.run()
    for kind in KINDS:
        # The token before a slot determines it; Domino leaves the first to the drafter.
        assert after[kind].tau > before[kind].tau + (0.1 if kind == "domino" else 0.5)
        assert after[kind].loss < 0.7 * before[kind].loss
    assert all(torch.equal(value, frozen[name]) for name, value in net.state_dict().items())


def test_heads_trained_together_are_those_trained_alone(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=4)
    together = build_heads(["markov", "treeflash"], 32, len(IDS), seed=0)
    Trainer(job_of(target, net, together), corpus, tmp_path / "both", config, target.device).run()
    alone = build_heads(["treeflash"], 32, len(IDS), seed=0)
    Trainer(job_of(target, net, alone), corpus, tmp_path / "one", config, target.device).run()
    for ours, theirs in zip(together["treeflash"].parameters(), alone["treeflash"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_killed_heads_taken_up_again_end_the_same(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=6, evaluate_every=2)

    def trained(folder, kill_at=None):
        heads = build_heads(["markov:confidence=32", "domino"], 32, len(IDS), seed=0)

        def report(progress):
            if progress.step == kill_at:
                raise KeyboardInterrupt

        Trainer(job_of(target, net, heads), corpus, tmp_path / folder, config, target.device).run(report)
        return torch.cat([p.detach().flatten() for head in heads.values() for p in head.parameters()])

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("broken", kill_at=5)
    assert torch.equal(trained("broken"), whole)


def test_heads_of_another_drafter_are_not_taken_up(target, corpus, net, tmp_path):
    config = replace(CONFIG, steps=2, evaluate_every=2)

    def fit():
        job = job_of(target, net, build_heads(["markov"], 32, len(IDS), seed=0))
        return Trainer(job, corpus, tmp_path, config, target.device)

    fit().run()
    fit().run()
    with torch.no_grad():
        net.fc.weight *= 1.01
    with pytest.raises(CheckpointError, match="other settings"):
        fit().run()


@pytest.mark.slow
def test_the_confidence_head_learns_the_overlap_with_the_target(target, corpus, net, tmp_path):
    head = create("markov", size=len(IDS), rank=8, confidence=32)
    job = job_of(target, net, {"markov": head})
    Trainer(job, corpus, tmp_path, replace(CONFIG, steps=200, evaluate_every=200), target.device).run()
    indices, anchors = corpus.train[:30], np.arange(7, 15)
    places, known = [anchors] * 30, [np.zeros_like(anchors)] * 30
    batch = Batches(corpus, CONFIG, block=4, cached=True).collate(indices, places, known)
    found = [inputs for _, *inputs in job._parts(batch, batch.features, None)]
    states, previous, _ = (torch.cat(parts) for parts in zip(*found, strict=True))
    trunk = TrainingBackbone.of(net, target, IDS)
    with torch.no_grad():
        own = head(trunk, states, previous).softmax(-1)
        said = head.confidence(trunk, states, previous).sigmoid()
    where = torch.from_numpy(anchors)[:, None] + torch.arange(3)
    hidden = batch.features[:, :, -1].float()[:, where].flatten(0, 1)
    overlap = torch.minimum(own, (hidden @ target.head.weight[IDS].T).softmax(-1)).sum(-1)
    seen = torch.stack([said.flatten(), overlap.flatten()])
    # A target of random weights leaves little to tell from a linear layer: the level, and some of the rest.
    assert torch.corrcoef(seen)[0, 1] > 0.1
    assert float(seen.detach().diff(dim=0).abs().mean()) < 0.12
