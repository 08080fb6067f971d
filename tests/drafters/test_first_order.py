"""Drafting with first-order heads: the tables against scoring every path one by one, and their edges."""

import heapq
import math

import pytest
import torch

import tiny
import wellformed
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import first_order as tables
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.heads import Markov, TreeFlash
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.sampling.noise import couple
from ddtree.sampling.sampler import Noise
from ddtree.stats import Clock

KEPT = torch.tensor([t for t in range(tiny.VOCAB) if t % 3])
EVERY = 10_000  # predecessors: all there are
COUPLING = (0.8, 1.2)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model().requires_grad_(False))


def head_of(kind, size, scale=1.0, confidence=None):
    torch.manual_seed(3)
    made = Markov(size, rank=6, confidence=confidence) if kind == "markov" else TreeFlash(32, 16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=scale * (0.7 if kind == "markov" else 0.4))
    return made


def backbone_of(target, reduced=False, block_size=6):
    net = tiny.network(target.model, block_size=block_size)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
    return Backbone(net, target, draft_ids=KEPT if reduced else None)


def started(drafter, lengths):
    for row, length in enumerate(lengths):
        drafter.add_row()
        generator = torch.Generator().manual_seed(length)
        drafter.observe(row, tiny.prompt(length, length), torch.randn(length, 64, generator=generator))
    return drafter


def request(length, **changes):
    return DraftRow([*tiny.prompt(length, length), 7 + length], **{"budget": 12, "depth": 5, **changes})


def draft(drafter, rows):
    return drafter.draft(rows, Clock())


def paths(tree):
    """{path of tokens: log-probability} of the nodes of a tree of one row."""
    return dict(zip(wellformed.paths(tree)[1:], tree.logprobs[0, 1 : tree.sizes[0]].tolist(), strict=True))


@torch.no_grad()
def best_paths(drafter, row, coupling=(0.0, 1.0)):
    """The likeliest prefixes, found by a heap on scores of whole paths by the head's own forward."""
    backbone = drafter.backbone
    states = backbone.states([row.tokens[-1]], row.depth)

    def children(path):
        depth = len(path) + 1
        previous = torch.tensor([[row.tokens[-1], *path]])
        own = drafter.head(backbone, states[:, :depth], previous)[0, -1].log_softmax(-1)
        if row.noise is not None:
            noise = drafter.noise(row, depth)[-1]
            own = couple(own, noise, coupling[0] * row.temperature, coupling[1])
        return zip(backbone.tokens(torch.arange(len(own))).tolist(), own.tolist(), strict=True)

    found, heap = {}, [(-score, (token,)) for token, score in children(())]
    heapq.heapify(heap)
    while heap and len(found) < row.budget:
        cost, path = heapq.heappop(heap)
        found[path] = -cost
        if len(path) < row.depth:
            for token, score in children(path):
                heapq.heappush(heap, (cost - score, (*path, token)))
    return found


def same(left, right):
    assert set(left) == set(right)
    for path, score in left.items():
        assert score == pytest.approx(right[path], abs=1e-4)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["markov", "treeflash"])
@pytest.mark.parametrize("budget", [1, 2, 7, 40])
def test_the_tree_is_the_best_of_all_paths_scored_one_by_one(target, kind, reduced, budget):
    backbone = backbone_of(target, reduced)
    drafter = started(FirstOrder(backbone, head_of(kind, backbone.size), predecessors=EVERY), [9])
    row = request(9, budget=budget)
    tree = draft(drafter, [row])
    wellformed.check(tree, [row])
    same(paths(tree), best_paths(drafter, row))
    plain = paths(draft(DFlash(backbone), [row]))
    assert budget < 7 or set(plain) != set(paths(tree))


@pytest.mark.parametrize("kind", ["markov", "treeflash"])
def test_under_noise_it_is_the_best_of_all_coupled_paths(target, kind):
    backbone = backbone_of(target, reduced=True)
    head = head_of(kind, backbone.size)
    drafter = started(FirstOrder(backbone, head, coupling=COUPLING, predecessors=EVERY), [9])
    greedy = request(9, budget=20)
    rows = [request(9, budget=20, noise=Noise(s, tiny.VOCAB), temperature=0.7) for s in range(3)]
    for row in rows:
        same(paths(draft(drafter, [row])), best_paths(drafter, row, coupling=COUPLING))
    same(paths(draft(drafter, [greedy])), best_paths(drafter, greedy))


def test_rows_of_a_batch_have_the_trees_they_have_alone(target, monkeypatch):
    options = {"coupling": COUPLING, "predecessors": EVERY}
    backbone = backbone_of(target)
    drafter = started(FirstOrder(backbone, head_of("treeflash", 48), **options), [9, 4, 17, 6])
    rows = [
        request(9, budget=20),
        request(4, budget=3, depth=2, noise=Noise(1, tiny.VOCAB), temperature=1.0),
        request(17, budget=5, chain=True),
        request(6, budget=9, depth=0),
    ]
    together = draft(drafter, rows)
    wellformed.check(together, rows)
    assert together.sizes[3] == 1 and together.sizes[2] == 6
    for place, row in enumerate(rows):
        alone = started(FirstOrder(backbone_of(target), drafter.head, **options), [len(row.tokens) - 1])
        alone.backbone.network.load_state_dict(backbone.network.state_dict())
        same(paths(together.row(place)), paths(draft(alone, [row])))
    monkeypatch.setattr(tables, "_AT_ONCE", 100)
    again = draft(drafter, rows)
    for place in range(4):
        same(paths(together.row(place)), paths(again.row(place)))


@pytest.mark.parametrize("kind", ["markov", "treeflash"])
@pytest.mark.parametrize("coupling", [(0.0, 1.0), COUPLING])
@pytest.mark.parametrize("predecessors", [None, 0, 3])
def test_an_untrained_head_drafts_as_dflash(target, kind, coupling, predecessors):
    backbone = backbone_of(target, reduced=True)
    head = Markov(backbone.size) if kind == "markov" else TreeFlash(32)
    drafter = started(FirstOrder(backbone, head, coupling=coupling, predecessors=predecessors), [9])
    plain = DFlash(backbone, coupling=coupling)
    for budget in (1, 15, 64):
        for noise in (None, Noise(5, tiny.VOCAB)):
            row = request(9, budget=budget, noise=noise, temperature=1.0)
            same(paths(draft(drafter, [row])), paths(draft(plain, [row])))


@pytest.mark.parametrize("kind", ["markov", "treeflash"])
def test_a_chain_takes_the_best_child_each_time(target, kind):
    backbone = backbone_of(target)
    drafter = started(FirstOrder(backbone, head_of(kind, 48), predecessors=EVERY), [9])
    row = request(9, budget=5, chain=True)
    tree = draft(drafter, [row])
    states, path = backbone.states([row.tokens[-1]], 5), [row.tokens[-1]]
    for depth in range(1, 6):
        logits = drafter.head(backbone, states[:, :depth], torch.tensor([path]))
        path.append(int(logits[0, -1].argmax()))
    assert tree.tokens[0].tolist() == path and tree.depths[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_chain_ends_at_its_budget_and_depth(target):
    drafter = started(FirstOrder(backbone_of(target), head_of("markov", 48), predecessors=EVERY), [9])
    whole = draft(drafter, [request(9, budget=5, chain=True)]).tokens[0].tolist()
    assert draft(drafter, [request(9, budget=3, chain=True)]).tokens[0].tolist() == whole[:4]
    assert draft(drafter, [request(9, budget=9, chain=True, depth=2)]).tokens[0].tolist() == whole[:3]


def test_few_guesses_still_make_a_whole_tree_and_more_make_it_better(target):
    """Guesses decide what is scored well, never whether there is a tree."""
    backbone = backbone_of(target)
    head = head_of("markov", 48, scale=0.7)
    row = request(9, budget=30)
    scores = best_paths(started(FirstOrder(backbone, head), [9]), row).values()
    best = sum(math.exp(score) for score in scores)
    shares = []
    for predecessors in (0, 30, 60, EVERY):
        drafter = FirstOrder(backbone, head, predecessors=predecessors)
        tree = draft(drafter, [row])
        assert tree.sizes == [31]
        states = backbone.states([row.tokens[-1]], 5)
        true = 0.0
        for path in paths(tree):
            given = torch.tensor([[row.tokens[-1], *path[:-1]]])
            own = head(backbone, states[:, : len(path)], given)[0].log_softmax(-1)
            true += math.exp(float(own.detach()[torch.arange(len(path)), torch.tensor(path)].sum()))
        shares.append(true / best)
    assert shares[0] < shares[1] <= shares[2] + 1e-6 <= shares[3] + 2e-6
    assert shares[3] == pytest.approx(1.0, abs=1e-4)


def test_the_trace_shows_the_heads_view_of_a_path(target):
    backbone = backbone_of(target, reduced=True)
    drafter = started(FirstOrder(backbone, head_of("treeflash", backbone.size), coupling=COUPLING), [9])
    seen = []
    drafter.trace = lambda row, view: seen.append(view(torch.tensor([row.tokens[-1], 4, 5])))
    row = request(9)
    draft(drafter, [row])
    states = backbone.states([row.tokens[-1]], 5)
    expected = drafter.head(backbone, states[:, :3], torch.tensor([[row.tokens[-1], 4, 5]]))[0].log_softmax(
        -1
    )
    torch.testing.assert_close(seen[0], expected)


def test_confidence_scales_the_children_of_a_prefix(target):
    backbone = backbone_of(target)
    head = head_of("markov", 48, confidence=32)
    torch.nn.init.normal_(head.confidence_proj.weight, std=2)
    plain = started(FirstOrder(backbone, head, predecessors=EVERY), [9])
    wary = FirstOrder(backbone, head, predecessors=EVERY, confident=True)
    row = request(9, budget=20)
    states = backbone.states([row.tokens[-1]], 5)
    usual, scaled = paths(draft(plain, [row])), paths(draft(wary, [row]))
    for path in set(usual) & set(scaled):
        given = torch.tensor([[row.tokens[-1], *path[:-1]]])
        chance = head.confidence(backbone, states[:, : len(path)], given).sigmoid().log().sum().detach()
        assert scaled[path] == pytest.approx(usual[path] + float(chance), abs=1e-4)
    assert set(usual) != set(scaled)
    with pytest.raises(ConfigError, match="this treeflash head has no confidence head"):
        FirstOrder(backbone, head_of("treeflash", 48), confident=True)


def test_coupling_out_of_range_is_refused(target):
    with pytest.raises(ConfigError, match="kappa must be"):
        FirstOrder(backbone_of(target), head_of("markov", 48), coupling=(1.0, 0.0))


def test_a_drafter_of_no_budget_gives_roots(target):
    drafter = started(FirstOrder(backbone_of(target), head_of("markov", 48)), [9, 4])
    assert draft(drafter, [request(9, budget=0), request(4, depth=0)]).sizes == [1, 1]
