"""Drafters with heads: their trees against every path scored one by one, chains, rows, noise, and their edges."""

import math

import pytest
import torch

import tiny
import wellformed
from ddtree.drafters.dflash import DFlash, first_order
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.heads import DominoHead, Markov, TreeFlash
from ddtree.errors import ConfigError
from ddtree.sampling.noise import PLAIN, Noise, couple
from drafting import BLOCK, COUPLING, DEPTH, best_prefixes, draft, opened, request, scored, varied_network

REDUCED = torch.tensor([t for t in range(tiny.VOCAB) if t % 3])
# Settings with which nothing is left out: all predecessors guessed, all candidates corrected, all prefixes kept.
WIDE = {
    "markov": {"predecessors": 10_000},
    "treeflash": {"predecessors": 10_000},
    "domino": {"width": 64, "candidates": 64},
}
every_kind = pytest.mark.parametrize("kind", WIDE)


def backbone_of(target, draft_ids=None, **changes):
    """A backbone of random weights, whose slots really differ."""
    return Backbone(varied_network(BLOCK, seed=1, **changes), target, draft_ids=draft_ids)


def head_of(kind, size=tiny.VOCAB, strength=1.0, **options):
    """A head whose correction turns the marginals' order over, depending on the path."""
    torch.manual_seed(3)
    if kind == "domino":
        made = DominoHead(32, size, gru_hidden=12, rank=8, **options)
        with torch.no_grad():
            made.outer.normal_(std=2 * strength)
            for weight in made.prefix_gru.parameters():
                weight.mul_(3)
        return made
    made = Markov(size, rank=6, **options) if kind == "markov" else TreeFlash(32, 16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=strength * (0.7 if kind == "markov" else 0.4))
    return made


def drafter_of(kind, target, *rows, backbone=None, head=None, **settings):
    """A drafter that has seen the rows' contexts, of a row of 11 tokens by default."""
    backbone = backbone or backbone_of(target)
    made = Domino if kind == "domino" else FirstOrder
    drafter = made(backbone, head or head_of(kind, backbone.size), **settings)
    return opened(drafter, *(rows or [request()]))


class Oracle:
    """Children of any prefix of the first row, scored by the head's whole-path form over the whole draft vocabulary."""

    def __init__(self, drafter, row):
        self.drafter, self.row = drafter, row
        self.states = drafter.backbone.states([row.tokens[-1]], row.depth)

    @torch.inference_mode()
    def children(self, path):
        backbone = self.drafter.backbone
        previous = [self.row.tokens[-1], *path]
        count = len(previous)
        logits = self.drafter.head(backbone, self.states[:, :count], torch.tensor([previous]))[0, -1]
        logq = logits.log_softmax(-1)
        if self.row.noise is not None and self.drafter.coupling != PLAIN:
            beta, kappa = self.drafter.coupling
            gumbel = self.row.noise.gumbel(len(self.row.tokens) - 1 + count)
            gumbel = gumbel if backbone.draft_ids is None else gumbel[backbone.draft_ids]
            logq = couple(logq, gumbel, beta * self.row.temperature, kappa)
        tokens = backbone.tokens(torch.arange(backbone.size)).tolist()
        return dict(zip(tokens, logq.tolist(), strict=True))

    def best(self, beta=0.0):
        return best_prefixes(self.children, self.row.budget, self.row.depth, beta)


def check_best(drafter, row, beta=0.0):
    found, expected = scored(draft(drafter, row)), Oracle(drafter, row).best(beta)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-4)
    return found


# Every kind


@every_kind
@pytest.mark.parametrize("draft_ids", [None, REDUCED])
@pytest.mark.parametrize("budget", [1, 2, 7, 40])
def test_the_tree_is_the_best_of_all_paths_scored_one_by_one(target, kind, draft_ids, budget):
    drafter = drafter_of(kind, target, backbone=backbone_of(target, draft_ids), **WIDE[kind])
    row = request(budget=budget)
    tree = check_best(drafter, row)
    assert budget < 7 or list(tree) != list(scored(draft(DFlash(drafter.backbone), row)))
    assert budget < 40 or max(map(len, tree)) > 2


@every_kind
def test_drafters_that_sample_from_the_anchor_draft_one_deeper(target, kind):
    drafter = drafter_of(kind, target, backbone=backbone_of(target, sample_from_anchor=True), **WIDE[kind])
    assert drafter.max_depth == BLOCK
    check_best(drafter, request(budget=40, depth=BLOCK))


@every_kind
@pytest.mark.parametrize("coupling", [PLAIN, COUPLING])
def test_under_the_noise_it_is_the_best_of_all_coupled_paths(target, kind, coupling):
    backbone = backbone_of(target, REDUCED)
    drafter = drafter_of(kind, target, backbone=backbone, coupling=coupling, **WIDE[kind])
    greedy = check_best(drafter, request(budget=20))
    for seed in range(3):
        row = request(budget=20, noise=Noise(seed, tiny.VOCAB), temperature=0.7)
        assert (check_best(drafter, row) == greedy) == (coupling == PLAIN)


@every_kind
@pytest.mark.parametrize("coupling", [PLAIN, COUPLING])
@pytest.mark.parametrize("few", [False, True])
def test_an_untrained_head_drafts_as_dflash(target, kind, coupling, few):
    backbone = backbone_of(target, REDUCED)
    size = backbone.size
    head = {"markov": Markov(size), "treeflash": TreeFlash(32), "domino": DominoHead(32, size)}[kind]
    settings = {}
    if few and kind != "domino":
        settings["predecessors"] = 3
    drafter = drafter_of(kind, target, backbone=backbone, head=head, coupling=coupling, **settings)
    plain = DFlash(backbone, coupling=coupling)
    for budget in (1, 6, 12):
        for noise in (None, Noise(5, tiny.VOCAB)):
            row = request(budget=budget, noise=noise, temperature=1.0)
            assert scored(draft(drafter, row)) == pytest.approx(scored(draft(plain, row)), abs=1e-4)


@every_kind
def test_a_chain_takes_the_likeliest_token_after_its_own_path(target, kind):
    row = request(19, chain=True)
    drafter = drafter_of(kind, target, row, **WIDE[kind])
    chain = list(scored(draft(drafter, row)))
    oracle, greedy = Oracle(drafter, row), ()
    for _ in range(DEPTH):
        children = oracle.children(greedy)
        greedy = (*greedy, max(children, key=children.get))
    assert chain == [greedy[: depth + 1] for depth in range(DEPTH)]
    assert chain != list(scored(draft(DFlash(drafter.backbone), row)))
    for budget, depth, length in ((3, DEPTH, 3), (9, 2, 2), (1024, 3, 3)):
        short = draft(drafter, request(19, chain=True, budget=budget, depth=depth))
        assert list(scored(short)) == chain[:length]


@every_kind
def test_a_trace_sees_the_heads_view_of_any_path(target, kind):
    drafter = drafter_of(kind, target, backbone=backbone_of(target, REDUCED), coupling=COUPLING)
    row, views = request(), []
    drafter.trace = lambda traced, view: views.append((traced, view))
    draft(drafter, row)
    [(traced, view)] = views
    assert traced is row
    path = [10, 4, 31]
    found = view(torch.tensor([row.tokens[-1], *path]))
    for count in range(len(path) + 1):
        expected = Oracle(drafter, row).children(path[:count])
        assert found[count].tolist() == pytest.approx(list(expected.values()), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("domino", {"width": 0}, "width must be from 1 to 1024, not 0"),
        ("domino", {"width": 2000}, "width must be from 1 to 1024, not 2000"),
        ("domino", {"candidates": 0}, "candidates must be from 1 to 1024"),
        ("domino", {"beta": 0.1}, "beta=0.1"),
        ("domino", {"beta": float("nan")}, "beta=nan"),
        ("domino", {"coupling": (0.0, 0.0)}, "kappa must be"),
        ("domino", {"head": DominoHead(32, 7)}, "7 draft tokens"),
        ("domino", {"head": DominoHead(16, tiny.VOCAB)}, "hidden size 16"),
        ("markov", {"coupling": (1.0, 0.0)}, "kappa must be"),
        ("treeflash", {"confident": True}, "this treeflash head has no confidence head"),
        ("markov", {"confident": True}, "this markov head has no confidence head"),
    ],
)
def test_settings_out_of_range_are_refused(target, kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        drafter_of(kind, target, **settings)


# Domino


@pytest.mark.parametrize("beta", [0.0, -0.4])
@pytest.mark.parametrize("pure_prefix", [0, 1, 2])
def test_dominos_tree_is_the_best_under_its_penalty_of_depth(target, pure_prefix, beta):
    head = head_of("domino", pure_prefix=pure_prefix)
    drafter = drafter_of("domino", target, head=head, beta=beta, **WIDE["domino"])
    check_best(drafter, request(budget=40), beta)


def test_dominos_chain_is_the_tree_of_width_1(target):
    """Of one prefix a level, expanded alone: the tree holds the chain, and its siblings as leaves."""
    chain = wellformed.paths(draft(drafter_of("domino", target), request(chain=True)))
    narrow = wellformed.paths(draft(drafter_of("domino", target, width=1), request(budget=1024)))
    assert set(chain) <= set(narrow)
    assert {path[:-1] for path in narrow[1:]} == set(chain[:-1])
    assert len(narrow) == 1 + DEPTH * tiny.VOCAB


def test_few_candidates_are_close_to_all(target):
    """Tokens not corrected one by one still count in the normaliser; candidates alone would make all likelier."""
    head, row = head_of("domino", strength=0.2), request(budget=20)
    exact = scored(draft(drafter_of("domino", target, head=head, **WIDE["domino"]), row))
    close = scored(draft(drafter_of("domino", target, head=head, width=64, candidates=12), row))
    off = [abs(exact[path] - score) for path, score in close.items() if path in exact]
    assert len(off) >= 15
    assert max(off) < 0.15 and sum(off) / len(off) < 0.04


def test_a_correction_equal_for_all_tokens_changes_nothing_however_few_are_looked_at(target):
    head = head_of("domino", pure_prefix=0)
    with torch.no_grad():
        head.outer.copy_(head.outer[:1].expand_as(head.outer))
    drafter, row = drafter_of("domino", target, head=head, candidates=6), request(budget=6)
    assert scored(draft(drafter, row)) == pytest.approx(
        scored(draft(DFlash(drafter.backbone), row)), abs=1e-5
    )


# First-order heads


def test_few_guesses_still_make_a_whole_tree_and_more_make_it_better(target):
    """Guesses decide what is scored well, never whether there is a tree."""
    backbone, row = backbone_of(target), request(budget=30)
    head = head_of("markov", strength=0.7)
    oracle = Oracle(drafter_of("markov", target, backbone=backbone, head=head), row)
    best = sum(math.exp(score) for score in oracle.best().values())
    shares = []
    for predecessors in (0, 30, 60, 10_000):
        found = scored(draft(FirstOrder(backbone, head, predecessors=predecessors), row))
        assert len(found) == 30
        true = 0.0
        for path in found:
            true += math.exp(sum(oracle.children(path[:at])[token] for at, token in enumerate(path)))
        shares.append(true / best)
    assert shares[0] < shares[1] <= shares[2] + 1e-6 <= shares[3] + 2e-6
    assert shares[3] == pytest.approx(1.0, abs=1e-4)


def test_confidence_scales_the_children_of_a_prefix(target):
    backbone, row = backbone_of(target), request(9, budget=20)
    head = head_of("markov", confidence=32)
    torch.nn.init.normal_(head.confidence_proj.weight, std=2)
    plain = drafter_of("markov", target, row, backbone=backbone, head=head, **WIDE["markov"])
    wary = FirstOrder(backbone, head, confident=True, **WIDE["markov"])
    usual, scaled = scored(draft(plain, row)), scored(draft(wary, row))
    states = backbone.states([row.tokens[-1]], DEPTH)
    for path in set(usual) & set(scaled):
        given = torch.tensor([[row.tokens[-1], *path[:-1]]])
        chance = head.confidence(backbone, states[:, : len(path)], given).sigmoid().log().sum().detach()
        assert scaled[path] == pytest.approx(usual[path] + float(chance), abs=1e-4)
    assert set(usual) != set(scaled)


@pytest.mark.parametrize("kind", ["markov", "treeflash"])
def test_predecessors_scored_a_few_at_a_time_give_the_same_trees(target, kind, monkeypatch):
    rows = [
        request(11, noise=Noise(4, tiny.VOCAB), temperature=1.0),
        request(4, budget=5),
        request(19, chain=True),
    ]
    drafter = drafter_of(kind, target, *rows, coupling=COUPLING)
    together = draft(drafter, *rows)
    monkeypatch.setattr(
        first_order, "_AT_ONCE", 100
    )  # two of 48 tokens: pieces end within rows and between them
    again = draft(drafter, *rows)
    for index in range(len(rows)):
        assert scored(again, index) == pytest.approx(scored(together, index), abs=1e-4)
