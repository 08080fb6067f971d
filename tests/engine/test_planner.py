"""How the rows of a round are asked to be drafted for, and what the policy is told of it."""

import pytest
import torch

import tiny
from ddtree.drafters.merged import Merged
from ddtree.engine.planner import Planner
from ddtree.engine.sequence import Sequence
from ddtree.policy import OFF, Arm, Choice, Request
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler
from ddtree.stats import Clock
from scripted import Scripted

TREE = Arm("tree", ("scripted",))


class Context:
    """All that is planned for: a context of 40 tokens."""

    max_context, device = 40, torch.device("cpu")


class Asked(Scripted):
    """Keeps what it was asked, and lags behind for the rows in `lagging_rows`."""

    def __init__(self, lagging_rows=()):
        super().__init__([], reach=6)
        self.lagging_rows, self.rows = list(lagging_rows), []

    def draft(self, rows, clock):
        self.rows = rows
        self.seen = [row.tokens[:-1] for row in rows]
        return super().draft(rows, clock)


class Told:
    """A policy that chooses as it is told and keeps what it is asked and told."""

    def __init__(self, *choices):
        self.choices, self.whole, self.lessons = list(choices), [], []

    def plan(self, requests, contexts, fresh):
        self.planned = (requests, contexts, fresh)
        return self.choices

    def cut(self, tree, proposals, whole):
        self.whole = whole
        return tree

    def learn(self, *lesson):
        self.lessons.append(lesson)


def planner(drafter=None, policy=None):
    made = Planner(Context(), drafter, Clock())
    made.policy = policy
    return made


def sequence(length, request, max_tokens=30, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    sampler = Sampler(params, 48, (), prompt_length=length)
    one = Sequence(tiny.prompt(length), sampler, None, request, 10**6)
    one.extend([7], [torch.zeros(48)])
    return one


def fixed(depth=6, budget=8, method="tree"):
    return Request(method, budget, ("scripted",), depth)


def automatic(depth=6):
    return Request("auto", "auto", ("scripted",), depth)


@pytest.mark.parametrize(
    ("asked", "drafter", "wanted"),
    [
        (("tree", 16, 4, None, False), Scripted([], reach=6), Request("tree", 16, ("scripted",), 4)),
        (("tree", 16, 16, None, True), Scripted([], reach=6), Request("tree", 16, ("scripted",), 6, True)),
        (("tree", 16, 4, ("scripted",), False), Scripted([]), Request("tree", 16, ("scripted",), 4)),
        (("tree", 16, 4, (), False), Scripted([]), Request("off", 0, (), 4)),
        (("chain", 0, 4, None, False), Scripted([]), Request("off", 0, (), 4)),
        (("off", 16, 4, None, False), Scripted([]), Request("off", 0, (), 4)),
        (("auto", "auto", 4, None, False), None, Request("off", 0, (), 0)),
    ],
)
def test_a_request_is_what_can_be_had_of_what_was_asked(asked, drafter, wanted):
    assert planner(drafter).request(*asked) == wanted


def test_without_a_policy_a_tree_of_16_nodes_stands_for_auto():
    assert planner(Scripted([])).request("auto", "auto", 4) == Request("tree", 16, ("scripted",), 4)
    assert planner(Scripted([])).request("chain", "auto", 4) == Request("chain", 16, ("scripted",), 4)
    assert planner(Scripted([]), Told()).request("auto", 16, 4) == Request("auto", 16, ("scripted",), 4)


def test_a_draft_ends_where_the_context_the_answer_or_the_cache_does():
    drafter = Asked()
    rows = [sequence(10, fixed()), sequence(35, fixed()), sequence(10, fixed(depth=5), max_tokens=4)]
    rows += [sequence(38, fixed()), sequence(10, fixed(budget=3, method="chain"), temperature=0.5)]
    plan = planner(drafter).plan(rows, most=7)
    assert [row.depth for row in drafter.rows] == [6, 3, 2, 0, 6]
    assert [row.budget for row in drafter.rows] == [7, 7, 7, 7, 3]
    assert [row.chain for row in drafter.rows] == [False] * 4 + [True]
    assert [row.temperature for row in drafter.rows] == [0.0] * 4 + [0.5]
    assert drafter.rows[0].noise is None and drafter.rows[4].noise is rows[4].sampler.noise
    assert not plan.decided and [str(choice.arm) for choice in plan.choices][-1] == "chain@scripted"


def test_the_drafter_is_not_asked_where_nothing_is_to_be_drafted():
    drafter = Asked()
    plan = planner(drafter).plan([sequence(10, Request("off", 0, ())), sequence(38, fixed())], most=99)
    assert drafter.rows == [] and plan.tree.sizes == [1, 1]
    assert plan.tree.tokens.tolist() == [[7], [7]]


def test_the_policy_is_told_which_drafts_tell_of_the_drafter():
    policy, drafter = (
        Told(Choice(TREE, 4), Choice(TREE, 4), Choice(OFF, 0), Choice(TREE, 4)),
        Asked(lagging_rows=[3]),
    )
    # The second one's draft is cut short by the end of its answer, the last one's text is not processed yet.
    rows = [
        sequence(10, automatic()),
        sequence(10, automatic(), max_tokens=4),
        *(sequence(10, automatic()),) * 2,
    ]
    plan = planner(drafter, policy).plan(rows, most=99)
    assert policy.planned == ([automatic()] * 4, [10] * 4, [True] * 4)
    assert policy.whole == [True, False, True, False] and plan.decided


@pytest.mark.parametrize(
    ("choice", "most", "lagging", "whole"), [(Choice(TREE, 4), 0, [], False), (Choice(OFF, 0), 99, [0], True)]
)
def test_a_round_without_room_or_wish_for_a_draft_says_nothing_of_the_drafter(choice, most, lagging, whole):
    policy, drafter = Told(choice), Asked(lagging)
    planner(drafter, policy).plan([sequence(10, automatic())], most)
    assert policy.whole == [whole] and drafter.rows == []


def test_a_part_that_is_behind_counts_among_several():
    policy = Told(*[Choice(TREE, 4)] * 2)
    merged = Merged([Scripted([[*tiny.prompt(10), 7]] * 2), Asked(lagging_rows=[1])])
    for row in range(2):
        merged.add_row()
        merged.observe(row, tiny.prompt(10), None)
    planner(merged, policy).plan([sequence(10, automatic(4)), sequence(10, automatic(4))], most=99)
    assert policy.whole == [True, False]


def test_the_policy_learns_of_the_rounds_that_it_had_a_say_in_only():
    policy = Told(Choice(TREE, 4))
    made = planner(Asked(), policy)
    for request, lessons in ((fixed(), 0), (automatic(), 1)):
        plan = made.plan([sequence(10, request)], most=99)
        made.learn(plan, [[0]], [[3]], {"draft": 1.0})
        assert len(policy.lessons) == lessons
    assert policy.lessons == [(plan.tree, [[0]], [[3]], {"draft": 1.0})]
