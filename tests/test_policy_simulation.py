"""The policy against every fixed budget, in simulated rounds of known cost: published GPU curves and a small CPU."""

from functools import cache

import numpy as np
import pytest
import torch

from ddtree.policy import Request
from ddtree.policy.controller import Policy
from ddtree.policy.latency import LatencyTable, Sample
from ddtree.tree import DraftTree, best_first, following, walk

# Milliseconds by nodes: drafting, then verification at a context.
A800_1K = (6.5, {1: 35.0, 128: 35.0, 256: 41.4, 512: 63.2, 1024: 106.8})  # CaDDTree, arXiv 2606.01813
A800_8K = (6.5, {1: 47.9, 64: 52.3, 128: 57.0, 256: 73.6, 512: 117.0, 1024: 203.8})
# DDTree's budget curve of Qwen3-8B on MATH-500 (arXiv 2604.12989): tau over speedup is a round's time in plain steps.
H200 = (6.5, {1: 25.0, 256: 29.3, 512: 29.6, 1024: 33.8})
CPU = (6.0, {1: 22.0, 2: 24.0, 5: 25.0, 9: 28.0, 17: 33.0, 33: 44.0, 65: 64.0, 129: 110.0})
# Cores without bfloat16 arithmetic: every node costs.
DEAR = (6.0, {1: 57.0, 2: 66.0, 3: 93.0, 5: 136.0, 9: 208.0, 17: 366.0})
CURVES = {"A800 at 1k": A800_1K, "A800 at 8k": A800_8K, "H200": H200, "CPU": CPU}
# The same with a drafter that costs nothing.
FREE = {f"{name}, free": (0.01, verify) for name, (_, verify) in {"CPU": CPU, "dear": DEAR}.items()}
ALL = {**CURVES, **FREE, "dear": DEAR}
# How sharp the drafter is, and how its probabilities must be raised to a power to be true: 1 is calibrated.
PROFILES = {
    "strong": (4.0, 1.0),
    "middling": (2.0, 1.0),
    "weak": (1.0, 1.0),
    "boastful": (2.5, 0.6),
    "shy": (1.2, 1.8),
    "braggart": (3.0, 0.35),
}
ROUNDS, WARM_UP = 260, 40
BUDGETS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
REQUEST = Request("tree", "auto", ("drafter",), sampled=False)


@cache
def rounds(profile):
    """Trees of 1,024 nodes, an answer of each, and the expected tokens of their first 0..1,024 nodes."""
    sharpness, truth = PROFILES[profile]
    random = np.random.default_rng(7)
    drawn = []
    for _ in range(ROUNDS):
        noise = random.normal(size=(12, 200)) * sharpness * random.uniform(0.5, 1.5)
        own = torch.tensor(np.sort(noise)[:, ::-1].copy()).float().log_softmax(-1)
        true = (own.double() * truth).softmax(-1).numpy()
        tokens = torch.arange(200).expand(1, 12, 200).contiguous()
        tree = best_first([0], tokens, own[None], [1024], [12])
        chances = [1.0]
        columns = zip(
            *(column[0].tolist() for column in (tree.tokens, tree.parents, tree.depths)), strict=True
        )
        for token, parent, depth in list(columns)[1:]:
            chances.append(chances[parent] * true[depth - 1, token])
        answer = [int(random.choice(200, p=row / row.sum())) for row in true]
        drawn.append((tree, answer, np.cumsum(chances)))
    return drawn


def seconds(curve, nodes):
    """Of a round that verifies so many nodes besides the root; drafting is spared with none."""
    draft, verify = ALL[curve]
    return (
        np.interp(nodes + 1, list(verify), list(verify.values())) + (draft if nodes else 0.0) + 1.0
    ) / 1000


def fixed(curve, profile, budget, warm_up=WARM_UP):
    """Expected tokens per second of a fixed budget."""
    expected = [tokens[budget] for _, _, tokens in rounds(profile)[warm_up:]]
    return float(np.mean(expected) / seconds(curve, budget))


def chosen(curve, profile, measured=None, warm_up=WARM_UP):
    """Expected tokens per second of the policy; it believes at first that passes cost as on the curve `measured`."""
    draft, verify = ALL[measured or curve]
    points = [Sample(nodes, 1, 0.0, ms / 1000) for nodes, ms in verify.items()]
    model = LatencyTable(points, {"drafter": [Sample(17, 1, 0.0, draft / 1000)]}, machine={})
    policy, draft = Policy(model), ALL[curve][0]
    tokens = spent = 0.0
    for number, (tree, answer, expected) in enumerate(rounds(profile)):
        choice = policy.plan([REQUEST], [0])[0]
        tree = tree.truncate([choice.budget]) if choice.budget else DraftTree.root([0])
        tree = policy.cut(tree)
        paths, _ = walk(tree, [[]], following([answer]))
        path, nodes = paths[0], tree.sizes[0] - 1
        time = seconds(curve, nodes) + (draft / 1000 if choice.budget and not nodes else 0.0)
        parts = {
            "draft": draft / 1000 if choice.budget else 0.0,
            "build": 0.0,
            "walk": 0.0005,
            "commit": 0.0005,
        }
        parts["verify"] = (
            seconds(curve, nodes) - parts["draft"] - 0.001 if nodes else seconds(curve, 0) - 0.001
        )
        policy.learn(tree, [path], [answer[: len(path)]], parts)
        if number >= warm_up:
            tokens, spent = tokens + expected[nodes], spent + time
    return tokens / spent


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("profile", PROFILES)
def test_throughput_is_98_percent_of_the_best_fixed_budgets(curve, profile):
    """Where drafting is worth less than a tenth, telling it from plain decoding takes more rounds: either will do."""
    best = max(fixed(curve, profile, budget) for budget in BUDGETS)
    plain = fixed(curve, profile, 0)
    assert chosen(curve, profile) >= 0.98 * (best if best > 1.1 * plain else plain)


@pytest.mark.parametrize("curve", FREE)
@pytest.mark.parametrize("profile", ["braggart", "boastful", "shy"])
def test_a_free_drafter_is_used_well_from_the_first_round_on(curve, profile):
    """One that promises more than it keeps, or less, and of which nothing is known."""
    best = max(fixed(curve, profile, budget, warm_up=0) for budget in BUDGETS)
    assert chosen(curve, profile, warm_up=0) >= 0.98 * best


@pytest.mark.parametrize(
    ("curve", "measured", "profile"),
    [
        ("dear", "H200", "strong"),
        ("dear", "H200", "middling"),
        ("dear", "CPU", "strong"),
        ("dear", "CPU", "middling"),
        ("CPU", "H200", "middling"),
        ("CPU", "dear", "strong"),
    ],
)
def test_a_wrong_first_measurement_is_made_good(curve, measured, profile):
    """As when it was taken while other work filled the machine."""
    best = max(fixed(curve, profile, budget) for budget in BUDGETS)
    assert chosen(curve, profile, measured, warm_up=120) >= 0.75 * best
