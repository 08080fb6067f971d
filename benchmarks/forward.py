"""Time of one forward by the number of tokens verified, in several ways, and of a prompt.

    python benchmarks/forward.py --contexts 256 2048 7000 --dtypes bfloat16 float32

The ways take turns: the weights as they are, packed copies of them, and llama.cpp where its package is installed and a
file of the same weights is named. A tree of random shape is verified, not committed, so that each turn does the same.
Medians and least times are shown, and whether logits and features of packed weights have the bits of plain ones.
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 makes a machine compute as one without AVX-512.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from ddtree.model.pretrained import load_causal_lm
from ddtree.model.target import Target
from ddtree.tree import DraftTree

Way = Callable[[int], object]
"""Verifies a tree of so many nodes."""


def tree(nodes: int) -> DraftTree:
    """A tree of random tokens and shape, the same each time, at most 16 deep."""
    chance = random.Random(nodes)
    parents, depths = [0], [0]
    for node in range(1, nodes):
        parent = chance.choice([at for at in range(node) if depths[at] < 16])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = [chance.randrange(1000, 10_000) for _ in range(nodes)]
    columns = (torch.tensor([column]) for column in (tokens, parents, depths))
    return DraftTree(*columns, torch.zeros(1, nodes), [nodes])


def text(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(1000, 10_000) for _ in range(length)]


def memory() -> float:
    """Most memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prefilled(target: Target, length: int) -> tuple[Way, float]:
    """Return a way to verify after a prompt of random tokens, and the seconds that the prompt took."""
    cache = target.new_cache()
    row, began = cache.add_row(), time.perf_counter()
    for _ in target.prefill(cache, row, text(length)):
        pass
    spent = time.perf_counter() - began
    return lambda nodes: target.verify(cache, tree(nodes)), spent


def llama_cpp(path: str, length: int) -> tuple[Way, float]:
    """Return the same for llama.cpp, whose forwards are chains: their time is that of a tree of as many nodes."""
    import llama_cpp

    model = llama_cpp.Llama(
        path,
        n_ctx=length + 128,
        n_batch=512,
        n_threads=torch.get_num_threads(),
        logits_all=True,
        verbose=False,
    )
    began = time.perf_counter()
    model.eval(text(length))
    spent = time.perf_counter() - began

    def verify(nodes: int) -> None:
        model.n_tokens = length
        model._ctx.kv_cache_seq_rm(0, length, -1)
        model.eval(text(nodes))

    return verify, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 7000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 7000], help="lengths of prompts to time"
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--gguf", help="a file of the same weights, for llama.cpp")
    args = parser.parse_args()

    print(
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    )
    for dtype in args.dtypes:
        model, tokenizer = load_causal_lm(args.target, "cpu", dtype)
        layers = tuple(range(0, model.config.num_hidden_layers, 10))
        plain, before = Target(model, tokenizer, layers), memory()
        began = time.perf_counter()
        packed = Target(model, tokenizer, layers, pack=True)
        seconds, copies = time.perf_counter() - began, packed.packed_bytes / 2**20
        print(f"\n{dtype}: packed copies of {copies:.0f} MiB, made and tried in {seconds:.1f} s; "
              f"most memory {before:.0f} MiB before and {memory():.0f} MiB after")  # fmt: skip
        targets = {"plain": plain, "packed": packed}
        for context in args.contexts:
            ways = {name: prefilled(target, context)[0] for name, target in targets.items()}
            if args.gguf:
                ways["llama.cpp"] = llama_cpp(args.gguf, context)[0]
            spent = defaultdict(list)
            for _ in range(args.turns):
                for nodes in args.nodes:
                    for name, way in ways.items():
                        began = time.perf_counter()
                        way(nodes)
                        spent[name, nodes].append(1000 * (time.perf_counter() - began))
            print(f"\n{dtype}, context {context}: ms of a forward, median (least)")
            for name in ways:
                cells = (spent[name, nodes] for nodes in args.nodes)
                print(f"{name:10}", *(f"{statistics.median(own):7.1f} ({min(own):5.1f})" for own in cells))
            same = [
                all(
                    torch.equal(a, b)
                    for a, b in zip(
                        vars(ways["plain"](n)).values(), vars(ways["packed"](n)).values(), strict=True
                    )
                )
                for n in args.nodes
            ]
            print(f"{'same bits':10}", *(f"{'yes' if equal else 'no':>15}" for equal in same))
        for length in args.prompts:
            rates = defaultdict(list)
            for _ in range(3):
                for name, target in targets.items():
                    rates[name].append(length / prefilled(target, length)[1])
                if args.gguf:
                    rates["llama.cpp"].append(length / llama_cpp(args.gguf, length)[1])
            shown = ", ".join(f"{name} {statistics.median(own):.0f}" for name, own in rates.items())
            print(f"\n{dtype}, prompt of {length}: tokens/s {shown}")


if __name__ == "__main__":
    main()
