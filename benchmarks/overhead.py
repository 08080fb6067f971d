"""Time of a round outside the two model forwards, on a real pair.

    python benchmarks/overhead.py --budgets 16 32 64 --temperatures 0 1

The forwards of the target and of the drafter's network are timed from inside; what is left of a round (drafting's
top-k, tree building, mask, sampling, walk, commit, bookkeeping) is overhead. Budgets and temperatures alternate, turn
by turn, and medians over rounds are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

from watch import Watch

import ddtree
from ddtree.sampling.params import SamplingParams

PROMPTS = (
    "Explain how a suspension bridge carries its load.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "Give me a plan for a week of simple vegetarian dinners.",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()

    model = ddtree.load(args.target, drafter=args.drafter)
    engine = model.engine
    drafters = getattr(engine.drafter, "drafters", [engine.drafter])
    timer = Watch()
    timer.watch(engine.target, "run")
    for drafter in drafters:
        if hasattr(drafter, "backbone"):
            # What a drafter's pass consists of: features to context, the block, norm and head.
            timer.watch(drafter.backbone.network, "context", "inject", "block", "logits")
            timer.watch(drafter.backbone, "norm", "_head")
    rounds: dict[tuple[int, float], list[tuple[float, float]]] = defaultdict(list)
    parts: dict[tuple[int, float], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for turn in range(args.turns):
        for budget in args.budgets:
            for temperature in args.temperatures:
                ids = model.encode([{"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}])
                params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.max_tokens)
                sequence = engine.add(ids, params, budget=budget)
                engine.step()
                while not engine.idle:
                    before, inside = time.perf_counter(), timer.seconds
                    engine.step()
                    whole = time.perf_counter() - before
                    rounds[budget, temperature].append((whole, whole - (timer.seconds - inside)))
                for part, seconds in sequence.stats.seconds.items():
                    parts[budget, temperature][part] += seconds
    print(f"{'B':>4} {'T':>4} {'rounds':>6} {'round ms':>9} {'outside ms':>10} {'share':>6}   time by part")
    for (budget, temperature), times in sorted(rounds.items()):
        whole = statistics.median(t for t, _ in times)
        outside = statistics.median(o for _, o in times)
        split = parts[budget, temperature]
        total = sum(split.values()) - split["prefill"]
        shares = "  ".join(
            f"{p} {split[p] / total:.1%}" for p in ("draft", "build", "verify", "walk", "commit")
        )
        print(
            f"{budget:>4} {temperature:>4g} {len(times):>6} {whole * 1e3:>9.1f} {outside * 1e3:>10.2f} "
            f"{outside / whole:>6.1%}   {shares}"
        )


if __name__ == "__main__":
    main()
