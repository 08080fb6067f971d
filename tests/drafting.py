"""Helpers for tests of drafters: networks whose slots differ, tensors of published heads, and trees as dicts."""

import dataclasses

import torch

import tiny
import wellformed
from ddtree.drafters.dflash.network import DFlashNet

HIDDEN, RANK, GRU = 32, 6, 12  # sizes of published heads' tensors


def varied_network(block_size=6, seed=0, **changes):
    """A random network for the tiny models, whose slots and depths really differ."""
    plain = tiny.network(tiny.model(), block_size=block_size)
    torch.manual_seed(seed)
    net = DFlashNet(dataclasses.replace(plain.config, **changes)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.ndim == 1))
    return net


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
