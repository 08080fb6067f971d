"""Draw the README's picture: the speedup of `auto` over transformers' `generate` by task, from committed raw figures.

python tools/speedup_picture.py     writes docs/images/speedup.png
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddtree.bench.results import read
from ddtree.bench.tables import RunStats, all_stats

DOCS = Path(__file__).resolve().parents[1] / "docs"
RAW = DOCS / "results" / "present-cpu.jsonl"
PICTURE = DOCS / "images" / "speedup.png"
NAMES = {
    "mt_bench": "chat", "translation": "translation", "summarization": "summarization", "qa": "question answering",
    "math_reasoning": "mathematics", "rag": "retrieval", "humaneval": "code", "alpaca": "instructions",
}  # fmt: skip
MEAN = "all (geometric mean)"
COLORS = {"T=0": "#1f6fb2", "T=1": "#e08a2c"}
LABELS = {"T=0": "greedy (T=0)", "T=1": "sampled (T=1)"}
THICKNESS = 0.38


def speedups(stats: RunStats) -> dict[str, float]:
    """Return by task how many times as fast as `hf` decoding with `auto` is, and the geometric mean over tasks."""
    found = {NAMES[task]: stats.ratio("auto", "hf", task) for task in stats.tasks}
    return {
        name: value for name, value in {**found, MEAN: stats.geometric("auto", "hf")}.items() if value > 0
    }


def main() -> None:
    """Draw two bars for each task, 800 pixels wide."""
    figure = Figure(figsize=(8, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    every = {stats.at: stats for stats in all_stats(read(RAW))}
    bars = {at: speedups(stats) for at, stats in every.items()}
    order = sorted(NAMES.values(), key=lambda name: bars["T=0"][name])
    names = [MEAN, *order]
    for at, offset in (("T=0", THICKNESS / 2), ("T=1", -THICKNESS / 2)):
        places = [index - (0.25 if name == MEAN else 0) + offset for index, name in enumerate(names)]
        drawn = axes.barh(
            places, [bars[at][name] for name in names], THICKNESS, color=COLORS[at], label=LABELS[at]
        )
        axes.bar_label(drawn, fmt="%.2f", padding=4, fontsize=11)
    axes.axvline(1, color="#555", linewidth=1.2, linestyle="--", label="transformers' generate")
    plain = every["T=0"].geometric("off", "hf")
    axes.axvline(plain, color="#555", linewidth=1.2, linestyle=":", label="plain decoding in ddtree")
    axes.set_yticks([-0.25, *range(1, len(names))], names, fontsize=12)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_xlim(0, 5.2)
    axes.set_xlabel("times as fast as transformers' generate", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=11, loc="lower right", frameon=False)
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
