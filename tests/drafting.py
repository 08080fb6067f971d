"""Helpers for tests of drafters: networks whose slots differ, rows and their features, tensors of published heads."""

import dataclasses
import heapq
import math

import torch

import tiny
import wellformed
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.stats import Clock

BLOCK, DEPTH = 6, 5  # slots of a varied network, and the tokens that it drafts
COUPLING = (0.8, 1.2)
HIDDEN, RANK, GRU = 32, 6, 12  # sizes of published heads' tensors


def varied_network(block_size=BLOCK, seed=0, **changes):
    """A random network for the tiny models, whose slots and depths really differ."""
    plain = tiny.network(tiny.model(), block_size=block_size)
    torch.manual_seed(seed)
    net = DFlashNet(dataclasses.replace(plain.config, **changes)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.ndim == 1))
    return net


def features(tokens):
    """Random outputs [tokens, 64] of two layers; those of texts that begin alike do so too."""
    return torch.randn(len(tokens), 64, generator=torch.Generator().manual_seed(sum(tokens[:4])))


def request(length=11, budget=12, depth=DEPTH, **changes):
    """A row of a prompt of a length and a bonus token."""
    return DraftRow([*tiny.prompt(length, length), (7 * length + 3) % 40], budget, depth, **changes)


def observe(drafter, index, row, start=0, chunk=1000):
    """Show a drafter the committed tokens of a row from `start` on."""
    committed = row.tokens[:-1]
    known = features(committed)
    for at in range(start, len(committed), chunk):
        part = slice(at, at + chunk)
        drafter.observe(index, committed[part], known[part] if drafter.feature_layers else None)


def opened(drafter, *rows, first=0, chunk=1000):
    """The drafter with a new row for each of `rows`, from place `first` on."""
    for index, row in enumerate(rows, first):
        drafter.add_row()
        observe(drafter, index, row, chunk=chunk)
    return drafter


def draft(drafter, *rows):
    """The tree for rows that the drafter has."""
    tree = drafter.draft(list(rows), Clock())
    # A penalty of depth orders nodes otherwise.
    wellformed.check(tree, list(rows), in_order=not getattr(drafter, "beta", 0.0))
    return tree


def drafted(drafter, *rows):
    """The tree for rows that are opened for it and dropped again."""
    tree = draft(opened(drafter, *rows), *rows)
    for _ in rows:
        drafter.drop_row(0)
    return tree


def best_prefixes(children, budget, depth, beta=0.0):
    """{path: log-probability} of the best prefixes by log-probability + beta * depth.

    Args:
        children: gives {token: log-probability} of what follows a path.
    """
    heap, found = [(0.0, 0.0, ())], {}
    while heap and len(found) <= budget:
        _, score, path = heapq.heappop(heap)
        found[path] = score
        for token, logprob in children(path).items() if len(path) < depth else ():
            if logprob > -math.inf:
                child = (*path, token)
                heapq.heappush(heap, (-(score + logprob + beta * len(child)), score + logprob, child))
    del found[()]
    return found


@torch.no_grad()
def block_states(net, target, row, given=()):
    """States [B, H] of the block after a row, whose first tokens may be given, by the training forward."""
    context, size = len(row.tokens) - 1, net.config.block_size
    slots = torch.full((1, size), net.config.mask_token_id)
    slots[0, : 1 + len(given)] = torch.tensor([row.tokens[-1], *given])
    return net(
        torch.nn.functional.embedding(slots, target.embed.weight),
        torch.arange(context, context + size)[None],
        net.context(features(row.tokens[:-1])[None]),
        torch.arange(context)[None],
    )[0]


@torch.no_grad()
def marginals(net, target, row, given=(), first_slot=1):
    """Log-probabilities [L, V] of that block."""
    states = block_states(net, target, row, given)[first_slot:]
    return target.head(net.norm(states)).log_softmax(-1)


def scored(tree, index=0):
    """{path of tokens: log-probability} of the nodes of a row besides the root, in their order."""
    paths = wellformed.paths(tree, index)[1:]
    return dict(zip(paths, tree.row(index).logprobs[0, 1:].tolist(), strict=True))


def published_head(kind, size=tiny.VOCAB):
    """Random tensors of a published head for a vocabulary of so many draft tokens."""
    torch.manual_seed(0)
    return {
        "markov": {
            "markov_head.markov_w1.weight": torch.randn(tiny.VOCAB, RANK),
            "markov_head.markov_w2.weight": torch.randn(size, RANK),
            "confidence_head.proj.weight": torch.randn(1, HIDDEN + RANK),
            "confidence_head.proj.bias": torch.randn(1),
        },
        "treeflash": {
            "ar_approximation.norm.weight": torch.rand(HIDDEN),
            "ar_approximation.ug.weight": torch.randn(2 * 24, 2 * HIDDEN),
            "ar_approximation.ug.bias": torch.randn(2 * 24),
            "ar_approximation.d.weight": torch.randn(HIDDEN, 24),
        },
        "domino": {
            "prefix_gru.weight_ih_l0": torch.randn(3 * GRU, HIDDEN),
            "prefix_gru.weight_hh_l0": torch.randn(3 * GRU, GRU),
            "embed_proj.0.weight": torch.randn(RANK, HIDDEN + GRU),
            "embed_proj.2.weight": torch.randn(size, RANK),
        },
    }[kind]
