"""The Domino drafter: its trees against every path scored one by one, its chain, rows, alignments and noise."""

import dataclasses
import heapq

import pytest
import torch

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import heads as domino
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise, couple
from ddtree.sampling.sampler import SamplingParams
from ddtree.stats import Clock
from wellformed import check, paths

BLOCK = 5
REDUCED = torch.arange(1, tiny.VOCAB, 3)
COUPLING = (0.7, 1.3)


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model("qwen3", tie_word_embeddings=False))


def backbone(target, **options):
    net = tiny.network(tiny.model(), block_size=BLOCK)
    anchored = options.pop("sample_from_anchor", False)
    torch.manual_seed(1)
    net = DFlashNet(dataclasses.replace(net.config, sample_from_anchor=anchored)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.ndim == 1))
    return Backbone(net, target, **options)


def head(size=tiny.VOCAB, pure_prefix=1, strength=2.0):
    """A head whose correction turns the marginals' order over, depending on the path."""
    torch.manual_seed(2)
    built = domino.Domino(32, size, gru_hidden=12, rank=8, pure_prefix=pure_prefix)
    with torch.no_grad():
        built.outer.normal_(std=strength)
        for weight in built.prefix_gru.parameters():
            weight.mul_(3)
    return built


def started(target, lengths=(11,), *, own_head=None, options=None, **settings):
    """A drafter with a row of each length."""
    own = backbone(target, **(options or {}))
    drafter = Domino(own, own_head or head(own.size), **settings)
    for row, length in enumerate(lengths):
        drafter.add_row()
        drafter.observe(row, tiny.prompt(length, length), features(length))
    return drafter


def features(count):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def request(length=11, **changes):
    options = {"budget": 12, "depth": BLOCK - 1, **changes}
    return DraftRow([*tiny.prompt(length, length), (7 * length + 3) % 40], **options)


def draft(drafter, rows):
    tree = drafter.draft(rows, Clock())
    if not getattr(drafter, "beta", 0.0):
        check(tree, rows)
    return tree


class Reference:
    """Children of any prefix, scored by the head's whole-path form over the whole draft vocabulary."""

    def __init__(self, drafter, row, depth, place=0):
        self.drafter, self.row, self.depth = drafter, row, depth
        bonus = [0] * place + [row.tokens[-1]]
        self.states = drafter.backbone.states(bonus, depth)[place : place + 1]

    @torch.inference_mode()
    def children(self, path):
        trunk = self.drafter.backbone
        previous = [self.row.tokens[-1], *path]
        count = len(previous)
        logits = self.drafter.head(trunk, self.states[:, :count], torch.tensor([previous]))[0, -1]
        logq = logits.log_softmax(-1)
        if self.row.noise is not None and self.drafter.coupling != (0.0, 1.0):
            beta, kappa = self.drafter.coupling
            gumbel = self.row.noise.gumbel(len(self.row.tokens) - 1 + count)
            gumbel = gumbel if trunk.draft_ids is None else gumbel[trunk.draft_ids]
            logq = couple(logq, gumbel, beta * self.row.temperature, kappa)
        return trunk.tokens(torch.arange(trunk.size)).tolist(), logq.tolist()

    def best(self, budget, beta=0.0):
        """The best prefixes by log-probability + beta * depth, with their log-probabilities, by a heap."""
        heap, found = [(0.0, 0.0, ())], []
        while heap and len(found) <= budget:
            _, score, path = heapq.heappop(heap)
            found.append((path, score))
            if len(path) < self.depth:
                for token, logprob in zip(*self.children(path), strict=True):
                    child = (*path, token)
                    heapq.heappush(heap, (-(score + logprob + beta * len(child)), score + logprob, child))
        return found[1:]


def check_best(drafter, row, beta=0.0):
    tree = draft(drafter, [row])
    wanted = Reference(drafter, row, row.depth).best(row.budget, beta)
    assert paths(tree)[1:] == [path for path, _ in wanted]
    torch.testing.assert_close(
        tree.logprobs[0, 1:], torch.tensor([score for _, score in wanted]), rtol=0, atol=2e-5
    )
    return tree


WIDE = {"width": 64, "candidates": 64}


@pytest.mark.parametrize("beta", [0.0, -0.4])
@pytest.mark.parametrize("pure_prefix", [0, 1, 2])
@pytest.mark.parametrize("anchored", [False, True])
def test_wide_trees_are_the_best_of_all_paths(target, anchored, pure_prefix, beta):
    drafter = started(
        target,
        own_head=head(pure_prefix=pure_prefix),
        options={"sample_from_anchor": anchored},
        beta=beta,
        **WIDE,
    )
    depth = BLOCK if anchored else BLOCK - 1
    assert drafter.max_depth == depth
    tree = check_best(drafter, request(budget=40, depth=depth), beta)
    assert tree.depths.max() > 2


@pytest.mark.parametrize("draft_ids", [None, REDUCED])
@pytest.mark.parametrize("coupling", [(0.0, 1.0), COUPLING])
def test_wide_trees_are_the_best_under_the_noise(target, coupling, draft_ids):
    drafter = started(target, options={"draft_ids": draft_ids}, coupling=coupling, **WIDE)
    row = request(budget=25, noise=Noise(3, tiny.VOCAB), temperature=0.8)
    tree = check_best(drafter, row)
    plain = draft(drafter, [dataclasses.replace(row, noise=None, temperature=0.0)])
    assert (paths(tree) == paths(plain)) == (coupling == (0.0, 1.0))


def test_the_heads_correction_changes_the_tree(target):
    drafter = started(target, **WIDE)
    plain = DFlash(drafter.backbone)
    row = request(budget=25)
    assert paths(draft(drafter, [row])) != paths(draft(plain, [row]))


def test_an_untrained_head_gives_dflashs_tree(target):
    drafter = started(target, own_head=domino.Domino(32, tiny.VOCAB))
    plain = DFlash(drafter.backbone)
    for budget in (1, 6, 12):
        row = request(budget=budget)
        ours, theirs = draft(drafter, [row]), draft(plain, [row])
        assert paths(ours) == paths(theirs)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


def test_a_chain_takes_the_likeliest_token_after_its_own_path(target):
    drafter = started(target)
    chain = draft(drafter, [request(chain=True)])
    reference, greedy = Reference(drafter, request(), BLOCK - 1), []
    for _ in range(BLOCK - 1):
        tokens, logprobs = reference.children(greedy)
        greedy.append(tokens[logprobs.index(max(logprobs))])
    assert paths(chain)[-1] == tuple(greedy)
    marginal = draft(DFlash(drafter.backbone), [request(chain=True)])
    assert paths(marginal)[-1] != paths(chain)[-1]


def test_a_chain_is_the_tree_of_width_1(target):
    """Of one prefix a level, expanded alone: the tree holds the chain, and its siblings as leaves."""
    chain = draft(started(target), [request(chain=True)])
    narrow = paths(draft(started(target, width=1), [request(budget=1024)]))
    deepest = max(narrow, key=len)
    assert set(paths(chain)) <= set(narrow)
    assert {path[:-1] for path in narrow[1:]} == set(paths(chain)[:-1])
    assert len(deepest) == BLOCK - 1
    assert len(narrow) == 1 + (BLOCK - 1) * tiny.VOCAB


@pytest.mark.parametrize("budget", [1, 3, 1024])
def test_chains_keep_to_budget_and_depth(target, budget):
    tree = draft(started(target), [request(chain=True, budget=budget, depth=3)])
    assert tree.sizes == [min(budget, 3) + 1]


@pytest.mark.parametrize("coupling", [(0.0, 1.0), COUPLING])
def test_ragged_rows_draft_as_each_alone(target, coupling):
    """Lengths, budgets, depths, chains, temperatures all differ; some rows want nothing."""
    lengths = (11, 4, 19, 7, 15)
    changes = [
        {"budget": 12},
        {"budget": 5, "depth": 2, "noise": Noise(4, tiny.VOCAB), "temperature": 1.0},
        {"chain": True},
        {"budget": 0},
        {"depth": 0, "noise": Noise(5, tiny.VOCAB), "temperature": 0.6},
    ]
    rows = [request(length, **own) for length, own in zip(lengths, changes, strict=True)]
    together = draft(started(target, lengths, coupling=coupling), rows)
    assert together.sizes == [13, 6, 5, 1, 1]
    for index, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        alone = draft(started(target, (length,), coupling=coupling), [row])
        assert paths(together, index) == paths(alone)
        torch.testing.assert_close(together.row(index).logprobs, alone.logprobs, rtol=0, atol=1e-4)


def test_few_candidates_are_close_to_all(target):
    """What is not corrected one by one still counts in the normaliser; candidates alone would make all likelier."""
    own = head(strength=0.4)
    exact = draft(started(target, own_head=own, **WIDE), [request(budget=20)])
    close = draft(started(target, own_head=own, width=64, candidates=12), [request(budget=20)])
    known = dict(zip(paths(exact), exact.logprobs[0].tolist(), strict=True))
    shared = [
        (known[path], score)
        for path, score in zip(paths(close), close.logprobs[0].tolist(), strict=True)
        if path in known
    ]
    assert len(shared) >= 15
    off = [abs(wanted - score) for wanted, score in shared]
    assert max(off) < 0.15 and sum(off) / len(off) < 0.04


def test_a_correction_equal_for_all_tokens_changes_nothing_however_few_are_looked_at(target):
    own = head(pure_prefix=0)
    with torch.no_grad():
        own.outer.copy_(own.outer[:1].expand_as(own.outer))
    drafter = started(target, own_head=own, candidates=6)
    tree, plain = draft(drafter, [request(budget=6)]), draft(DFlash(drafter.backbone), [request(budget=6)])
    assert paths(tree) == paths(plain)
    torch.testing.assert_close(tree.logprobs, plain.logprobs, rtol=0, atol=1e-5)


def test_nothing_is_left_behind_by_a_draft(target):
    drafter = started(target, (11, 4))
    rows = [request(11), request(4)]
    before = draft(drafter, rows)
    after = draft(drafter, rows)
    assert paths(before, 0) == paths(after, 0) and paths(before, 1) == paths(after, 1)
    drafter.drop_row(0)
    assert paths(draft(drafter, [rows[1]])) == paths(before, 1)


def test_a_trace_sees_the_heads_view_of_any_path(target):
    drafter, row = started(target), request()
    views = []
    drafter.trace = lambda traced, view: views.append((traced, view))
    draft(drafter, [row])
    [(traced, view)] = views
    assert traced is row
    reference, path = Reference(drafter, row, BLOCK - 1), [9, 4, 30]
    found = view(torch.tensor([row.tokens[-1], *path]))
    for count in range(len(path) + 1):
        _, wanted = reference.children(path[:count])
        torch.testing.assert_close(found[count], torch.tensor(wanted), rtol=0, atol=1e-5)


def test_all_rows_without_budget_give_roots(target):
    tree = draft(started(target, (11, 4)), [request(11, budget=0), request(4, depth=0)])
    assert tree.sizes == [1, 1] and tree.tokens.shape == (2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width=0"),
        ({"width": 2000}, "width=2000"),
        ({"candidates": 0}, "candidates=0"),
        ({"beta": 0.1}, "beta=0.1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"coupling": (0.0, 0.0)}, "kappa"),
        ({"own_head": domino.Domino(32, 7)}, "7 draft tokens"),
        ({"own_head": domino.Domino(16, tiny.VOCAB)}, "hidden size 16"),
    ],
)
def test_settings_out_of_range_are_refused(target, settings, message):
    with pytest.raises(ConfigError, match=message):
        started(target, **settings)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("method", ["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_that_of_plain_decoding(temperature, method, coupled):
    model = tiny.model("llama")
    answers = []
    for drafter in (None, tiny.drafter("domino", model, coupled)):
        engine = Engine(Target(model), drafter)
        options = {"method": method, "budget": 15} if drafter else {"method": "off"}
        sequences = [
            engine.add(
                tiny.prompt(6 + 9 * seed, seed),
                SamplingParams(temperature=temperature, seed=seed, max_tokens=40),
                **options,
            )
            for seed in (0, 1)
        ]
        while not engine.idle:
            engine.step()
        engine.target.close()
        answers.append([sequence.output for sequence in sequences])
    assert answers[0] == answers[1]
