"""What `auto` does to an engine: other nodes, other arms, never other tokens."""

import json
from itertools import cycle

import pytest
import torch

import reference
import tiny
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Lookup
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.policy import OFF, Arm, Choice, Request
from ddtree.policy.controller import Policy
from ddtree.policy.latency import LatencyTable, Sample
from ddtree.sampling.params import SamplingParams
from ddtree.tree import DraftTree
from scripted import Scripted

LENGTH = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5, max_tokens=LENGTH)
AUTO = {"method": "auto", "budget": "auto"}


def latency(per_node=0.0001, root=0.02, names=("scripted", "lookup")):
    points = [
        Sample(w, r, c, root + per_node * w * r)
        for w in (1, 2, 9, 33, 65)
        for r in (1, 4)
        for c in (0.0, 512.0)
    ]
    drafts = {name: [Sample(w, 1, 0.0, 0.002) for w in (2, 33)] for name in names}
    return LatencyTable(points, drafts, machine={})


class Turning(Policy):
    """Takes another arm each round."""

    def __init__(self):
        super().__init__(latency())
        scripted, lookup = Arm("tree", ("scripted",)), Arm("tree", ("lookup",))
        self.arms = cycle([Arm("tree", ("scripted", "lookup")), lookup, OFF, scripted])

    def plan(self, requests, contexts, fresh=()):
        choices, arm = super().plan(requests, contexts, fresh), next(self.arms)
        self._round.choices = [Choice(arm, choice.budget or 8) for choice in choices]
        return self._round.choices


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def prompts():
    return [tiny.prompt(n, seed=n) for n in (13, 4, 29)]


@pytest.fixture(scope="module")
def greedy(model, prompts):
    return [prompt + reference.decode(model, prompt, GREEDY, LENGTH) for prompt in prompts]


@pytest.fixture(scope="module")
def sampled(model, prompts):
    return [prompt + reference.decode(model, prompt, SAMPLED, LENGTH) for prompt in prompts]


@pytest.fixture
def steady(monkeypatch):
    """Rounds cost what the table says, whatever else this machine is busy with."""
    monkeypatch.setattr(Policy, "_time", lambda *_: None)


def engine_with(model, policy, *drafters):
    engine = Engine(Target(model), Merged(drafters) if len(drafters) > 1 else drafters[0], max_rows=8)
    engine.policy = policy
    return engine


def answer(engine, *prompts, params=GREEDY, **options):
    """Answer prompts together; return their sequences."""
    sequences = [engine.add(prompt, params, **options) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return sequences


def arms_of(engine):
    (group,) = engine.policy.state()["groups"]
    return group["arms"]


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("policy", "method"),
    [(Turning, "auto"), *((lambda: Policy(latency()), method) for method in ("auto", "tree", "chain"))],
    ids=["another arm each round", "auto", "tree", "chain"],
)
def test_switches_in_mid_answer_change_no_token(model, prompts, greedy, sampled, sampling, policy, method):
    texts, params = (sampled, SAMPLED) if sampling else (greedy, GREEDY)
    engine = engine_with(model, policy(), Scripted(texts, reach=4), Lookup(vocab_size=48))
    sequences = answer(engine, *prompts, params=params, method=method, budget="auto")
    assert [sequence.tokens for sequence in sequences] == texts
    for sequence in sequences:
        assert sum(sequence.stats.arms.values()) == sequence.stats.rounds


def test_a_good_drafter_is_kept_and_a_useless_one_left(steady, model, prompts, greedy):
    (sequence,) = answer(engine_with(model, Policy(latency()), Scripted(greedy, reach=4)), prompts[0], **AUTO)
    assert sequence.stats.arms.get("off", 0) == 0 and sequence.stats.tau > 3
    useless = engine_with(model, Policy(latency()), Scripted([], reach=4))
    assert sum(sequence.stats.arms["off"] for sequence in answer(useless, *[prompts[0]] * 3, **AUTO)) > 40


@pytest.mark.parametrize(
    ("per_node", "least", "most"), [(1e-6, 6.0, 8.0), (0.004, 1.0, 5.0), (1.0, 0.0, 0.2)]
)
def test_dearer_nodes_are_fewer(steady, model, prompts, greedy, per_node, least, most):
    engine = engine_with(model, Policy(latency(per_node)), Scripted(greedy, reach=4))
    (sequence,) = answer(engine, prompts[0], method="tree", budget="auto")
    assert least <= sequence.stats.nodes / sequence.stats.rounds <= most


def test_rows_that_leave_nothing_open_keep_their_budget(model, prompts, greedy):
    def fixed(**options):
        engine = engine_with(model, Policy(latency()), Scripted(greedy, reach=4))
        sequence = engine.add(prompts[0], GREEDY, method="tree", budget=6)
        answer(engine, prompts[1], prompts[1], **options)
        return sequence.stats.nodes, sequence.stats.arms, sequence.tokens

    assert fixed(**AUTO) == fixed(method="tree", budget=6)


def test_only_named_members_draft(model, prompts, greedy):
    engine = engine_with(model, None, Scripted(greedy, reach=4), Lookup(vocab_size=48))
    sequence = engine.add(prompts[0], GREEDY, members=("lookup",))
    (both,) = answer(engine, prompts[0])
    assert sequence.tokens == both.tokens == greedy[0]
    assert sequence.stats.drafter == "lookup" and set(sequence.stats.arms) == {"tree@lookup"}
    assert both.stats.tau > sequence.stats.tau


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "all"}, r"budget='all' is outside 0\.\.1024"),
        ({"members": ("dflash",)}, "unknown drafter 'dflash' in members: this engine's are lookup"),
    ],
)
def test_what_cannot_be_decided_is_named(model, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        engine_with(model, None, Lookup(vocab_size=48)).add(prompts[0], GREEDY, **options)


def test_auto_without_a_drafter_is_plain_decoding(model, prompts, greedy):
    (sequence,) = answer(Engine(Target(model)), prompts[0], **AUTO)
    assert sequence.tokens == greedy[0] and set(sequence.stats.arms) == {"off"}


def test_its_state_is_plain_json(model, prompts, greedy):
    engine = engine_with(model, Policy(latency()), Scripted(greedy, reach=4), Lookup(vocab_size=48))
    answer(engine, *prompts, **AUTO)
    groups = json.loads(json.dumps(engine.policy.state()))["groups"]
    assert {group["rows"] for group in groups} <= {1, 2, 4} and all(not group["sampled"] for group in groups)
    assert sum(group["rounds"] for group in groups) > 0


def chain(*logprobs):
    """A batch of paths; each row is given by its nodes' log-probabilities, root included."""
    rows, nodes = len(logprobs), len(logprobs[0])
    tokens = torch.arange(5, 5 + rows * nodes).reshape(rows, nodes)
    depths = torch.arange(nodes).expand(rows, nodes)
    return DraftTree(tokens, (depths - 1).clamp(min=0), depths, torch.tensor(logprobs), [nodes] * rows)


def test_the_batch_shares_one_budget_and_takes_what_pays():
    request = Request("tree", "auto", ("lookup",), sampled=False)
    policy = Policy(latency(per_node=0.002))
    sure, unsure = torch.log(torch.tensor([[1.0, 0.95, 0.9, 0.85], [1.0, 0.02, 0.01, 0.005]])).tolist()
    for rows, sizes in [((sure, unsure), [4, 4]), ((unsure, unsure), [1, 1])]:
        policy.plan([request, request], [10, 10])
        assert policy.cut(chain(*rows)).sizes == sizes


def test_answers_too_short_to_draft_for_do_not_speak_against_the_drafter(model, prompts, greedy):
    """A service that mixes yes-or-no questions with long answers keeps its drafter."""
    engine = engine_with(model, Policy(latency()), Scripted(greedy, reach=3))
    for _ in range(40):
        answer(engine, prompts[0], params=SamplingParams(temperature=0.0, max_tokens=2), **AUTO)
    assert arms_of(engine)["tree@scripted"]["tokens_per_second"] is None
    assert engine.policy.latency.draft(("scripted",), 8) == pytest.approx(
        0.002 * engine.policy.latency.verify(8) / latency().verify(8)
    ), "and it was not timed"


def test_arms_of_a_fixed_budget_are_compared_with_all_of_it(steady, model, prompts, greedy):
    policy = Policy(latency(per_node=0.002))
    engine = engine_with(model, policy, Scripted(greedy, reach=3), Lookup(vocab_size=tiny.VOCAB))
    for _ in range(3):
        answer(engine, prompts[0], method="auto", budget=40)
    # The n-grams proposed 40 nodes in half of the compared rounds, and nothing in the others. Free choice would take
    # a few of them, each of which costs a tenth of a round.
    assert arms_of(engine)["tree@lookup"]["nodes"] >= 20


def test_a_drafter_that_catches_up_is_not_timed():
    """What it takes in after a pause, or after a prompt, says nothing of its rounds."""
    policy, tree = Policy(latency()), chain([0.0, -0.1])
    both, lookup = Arm("tree", ("scripted", "lookup")), Arm("tree", ("lookup",))

    def play(arm, draft, fresh=False):
        policy.plan([Request("auto", "auto", ("scripted", "lookup"))], [10], [fresh])
        policy._round.choices = [Choice(arm, 1)]
        policy.cut(tree)
        seconds = {"draft": draft, "build": 0.0, "verify": 0.02, "walk": 0.0001, "commit": 0.0001}
        policy.learn(tree, [[0, 1]], [[6, 7]], seconds)

    settled = 0.0041  # the two as predicted, and a little
    for _ in range(8):
        play(lookup, settled)
        play(both, 0.05)
        play(both, settled, fresh=True)
    assert policy.latency.draft(both.members, 1) == pytest.approx(0.004, rel=0.05)
    # But what it was slowed down by may be over, and catching up makes nothing faster.
    for _ in range(30):
        play(both, 0.05)
    assert policy.latency.draft(both.members, 1) > 0.04
    for _ in range(30):
        play(lookup, settled)
        play(both, settled)
    assert policy.latency.draft(both.members, 1) < 0.008


def test_a_drafter_that_proposes_nothing_makes_one_token_a_round(steady, model, prompts, greedy):
    silent = Scripted([])
    silent.name = "silent"
    policy = Policy(latency(names=("scripted", "silent")))
    engine = engine_with(model, policy, Scripted(greedy, reach=4), silent)
    answer(engine, prompts[0], **AUTO)
    arms = arms_of(engine)
    assert arms["tree@silent"]["tokens_per_round"] < 1.2 and arms["tree@scripted"]["tokens_per_round"] > 2


def test_requests_of_other_depths_have_figures_of_their_own(model, prompts, greedy):
    engine = engine_with(model, Policy(latency()), Scripted(greedy, reach=3))
    for depth in (1, 3):
        answer(engine, prompts[0], **AUTO, depth=depth)
    assert [group["depth"] for group in engine.policy.state()["groups"]] == [1, 3]


def test_kinds_of_requests_without_number_are_not_remembered_for_ever():
    policy, often = Policy(latency()), Request("auto", "auto", ("lookup",))
    for rows in range(10):
        for number in range(32):
            kind = Request("tree", "auto", ("lookup",), number // 2 + 1, number % 2 == 0)
            policy.plan([often], [10])
            policy.plan([kind] * 2**rows, [10] * 2**rows)
    groups = policy.state()["groups"]
    assert len(groups) == 256
    assert any(group["method"] == "auto" for group in groups)
