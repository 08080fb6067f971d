import math
import random

import pytest

import wellformed
from ddtree.drafters import DraftRow, ngram_table
from ddtree.drafters.ngram import Lookup
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError
from ddtree.sampling.noise import Noise
from ddtree.stats import Clock
from drafting import drafted, scored

WEIGHT, WEIGHT_ALONE = 6.0, 2.0


def text(length, vocab=5, seed=0):
    rng = random.Random(seed)
    return [int(rng.random() ** 2 * vocab) for _ in range(length)]


def row(tokens, budget=15, depth=16, **more):
    return DraftRow(list(tokens), budget, depth, **more)


def table_of(tmp_path, sequences, **arguments):
    return build_table(sequences, tmp_path / "table.safetensors", **arguments)


def mixed(own, sequences, context, order=5):
    """Probabilities after a context by the back-off rule, counted from the start."""
    found, mine = [], WEIGHT if sequences else WEIGHT_ALONE
    for k in range(1, min(order, len(context)) + 1):
        counts, own_seen, table_seen = {}, set(), set()
        for sequence, weight in [(own, mine), *((s, 1.0) for s in sequences)]:
            for at in range(k, len(sequence)):
                if sequence[at - k : at] == context[-k:]:
                    counts[sequence[at]] = counts.get(sequence[at], 0.0) + weight
                    (own_seen if sequence is own else table_seen).add(sequence[at])
        found.append((counts, own_seen, table_seen))
    left, scores = 1.0, {}
    for counts, own_seen, table_seen in reversed(found):
        mass, different = sum(counts.values()), max(len(own_seen), len(table_seen))
        share = left / (mass + 4 * different) if counts else 0.0
        left -= share * mass
        for token, count in counts.items():
            scores[token] = scores.get(token, 0.0) + share * count
        if left < 1e-3:
            break
    return scores


def oracle(own, sequences, budget, depth, order=5):
    """The scores of the best nodes, and of all nodes, by complete search."""
    nodes, frontier = {}, {(): 0.0}
    for _ in range(depth):
        frontier = {
            (*path, token): score + math.log(p)
            for path, score in frontier.items()
            for token, p in mixed(own, sequences, [*own, *path], order).items()
        }
        nodes |= frontier
    return sorted(nodes.values(), reverse=True)[:budget], nodes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_table", [False, True])
def test_the_tree_is_the_best_of_a_complete_search(tmp_path, seed, with_table):
    own = text(40, seed=seed)
    sequences = [text(30, seed=100 + seed), text(50, seed=200 + seed)] if with_table else []
    table = table_of(tmp_path, sequences) if with_table else None
    best, nodes = oracle(own, sequences, budget=40, depth=4)
    tree = drafted(Lookup(table), row(own, budget=40, depth=4))
    found = scored(tree)
    # A table's counts are near the true ones.
    tolerance = 0.02 if with_table else 1e-5
    assert found == pytest.approx({path: nodes[path] for path in found}, abs=tolerance)
    assert list(found.values()) == pytest.approx(best, abs=tolerance)


@pytest.mark.parametrize("order", [1, 2, 8])
def test_contexts_are_no_longer_than_the_order(order):
    own = text(60, vocab=3, seed=3)
    best, _ = oracle(own, [], budget=20, depth=3, order=order)
    tree = drafted(Lookup(order=order), row(own, budget=20, depth=3))
    assert list(scored(tree).values()) == pytest.approx(best, abs=1e-5)


def test_nothing_known_leaves_the_root_alone():
    tree = drafted(Lookup(), row(range(50)), row([7]))
    assert tree.sizes == [1, 1]


def test_the_bonus_token_is_context():
    tree = drafted(Lookup(), row([1, 2, 3, 9, 1, 2], budget=1))
    assert wellformed.paths(tree) == [(), (3,)]


@pytest.mark.parametrize("chain", [False, True])
def test_a_copied_span_is_drafted_to_the_depth_limit(chain):
    span = list(range(100, 130))
    drafter = Lookup()
    for depth in (1, 5, 16):
        tree = drafted(drafter, row([*span, 1, 2, *span[:4]], budget=16, depth=depth, chain=chain))
        path = tuple(span[4 : 4 + depth])
        assert path in scored(tree)
        assert scored(tree)[path] > depth * math.log(0.8)


def test_of_equal_counts_the_newest_comes_first():
    tree = drafted(Lookup(), row([1, 2, 1, 3, 1, 4, 1], budget=3, depth=1))
    assert [path[0] for path in scored(tree)] == [4, 3, 2]


def test_growing_a_text_counts_nothing_twice():
    tokens, drafter = text(80, seed=5), Lookup()
    drafter.add_row()
    for stop in (10, 11, 30, 33, 80):
        grown = drafter.draft([row(tokens[:stop])], Clock())
        assert scored(grown) == scored(drafted(Lookup(), row(tokens[:stop])))


def test_another_text_in_the_same_row_is_counted_anew():
    drafter = Lookup()
    drafter.add_row()
    drafter.draft([row(text(60, seed=1))], Clock())
    for tokens in (text(70, seed=2), text(20, seed=3), [1]):
        tree = drafter.draft([row(tokens)], Clock())
        assert scored(tree) == scored(drafted(Lookup(), row(tokens)))


def test_the_tree_of_a_smaller_budget_is_the_beginning_of_a_larger_one():
    drafter, tokens = Lookup(), text(200, vocab=20)
    whole = wellformed.paths(drafted(drafter, row(tokens, budget=200)))
    assert len(whole) == 201
    for budget in (0, 1, 16, 100):
        assert wellformed.paths(drafted(drafter, row(tokens, budget=budget))) == whole[: budget + 1]


def test_a_chain_follows_the_likeliest_child():
    tokens = text(60, seed=8)
    chain = wellformed.paths(drafted(Lookup(), row(tokens, budget=6, chain=True)))
    path = []
    for step in range(6):
        children = mixed(tokens, [], [*tokens, *path])
        path.append(chain[-1][step])
        assert children[path[-1]] == max(children.values())
    assert len(chain) == 7


def test_a_table_is_asked_where_the_text_knows_nothing(tmp_path):
    table = table_of(tmp_path, [[5, 6, 7, 8]])
    tree = drafted(Lookup(table), row([1, 2, 5, 6]))
    assert wellformed.paths(tree) == [(), (7,), (7, 8)]


def test_the_own_text_outweighs_the_table(tmp_path):
    table = table_of(tmp_path, [[1, 2], [1, 2]])
    tree = drafted(Lookup(table), row([1, 3, 1], depth=1))
    assert [path[0] for path in scored(tree)] == [3, 2]


def test_probabilities_of_siblings_do_not_exceed_one(tmp_path):
    table = table_of(tmp_path, [text(300, vocab=30, seed=seed) for seed in range(5)])
    tree = drafted(Lookup(table), row(text(100, vocab=30), budget=1024, depth=3))
    scores = scored(tree)
    for parent, score in [((), 0.0), *scores.items()]:
        children = [scores[path] for path in scores if path[:-1] == parent]
        assert sum(map(math.exp, children)) <= math.exp(score) + 1e-6


def test_a_table_whose_contexts_collide_still_gives_a_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_table, "MULTIPLIER", 1)
    table = table_of(tmp_path, [text(100, vocab=30)])
    assert drafted(Lookup(table), row(text(50, vocab=30))).sizes == [16]


def sampled(tokens, coupling, seed=1, **more):
    wanted = row(tokens, noise=Noise(seed, 50), temperature=1.0, **more)
    return drafted(Lookup(coupling=coupling), wanted)


def test_under_the_noise_candidates_are_ranked_by_their_chance_to_win():
    tokens = text(300, vocab=20, seed=2)
    tree = sampled(tokens, (1.0, 0.5), seed=3, budget=30, depth=2)
    found = scored(tree)
    # A node of depth d is the token at position len(tokens) - 1 + d.
    for prefix in [(), next(iter(found))]:
        noise = Noise(3, 50).gumbel(len(tokens) + len(prefix))
        children = mixed(tokens, [], [*tokens, *prefix])
        by_chance = sorted(children, key=lambda t: -(math.log(children[t]) + float(noise[t])))
        own = [path[-1] for path in found if path[:-1] == prefix]
        assert len(own) > 2
        assert own == by_chance[: len(own)]


def test_a_table_brings_its_own_coupling(tmp_path):
    table = table_of(tmp_path, [text(300, vocab=20)], coupling=(1.0, 2.0))
    wanted = row([0, 1], noise=Noise(1, 50), temperature=1.0)
    own = scored(drafted(Lookup(table), wanted))
    assert own == scored(drafted(Lookup(table, coupling=(1.0, 2.0)), wanted))
    assert own != scored(drafted(Lookup(table, coupling=(0.0, 1.0)), wanted))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 0}, "order must be from 1 to 8, not 0"),
        ({"order": 9}, "order must be from 1 to 8, not 9"),
        ({"weight": 0.0}, r"weight=0\.0 is not a positive"),
        ({"weight": math.nan}, "weight=nan is not a positive"),
        ({"coupling": (-1.0, 1.0)}, "beta must be"),
        ({"coupling": (0.0, 0.0)}, "kappa must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Lookup(**arguments)


def test_a_table_of_another_vocabulary_is_refused(tmp_path):
    table = table_of(tmp_path, [[1, 2, 60]])
    with pytest.raises(CheckpointError, match="token id 60 and the target has 48 tokens"):
        Lookup(table, vocab_size=48)
    Lookup(table, vocab_size=61)
