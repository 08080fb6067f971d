"""`ddtree calibrate`: measures what rounds cost here, and how often drafts are accepted, and keeps it for `auto`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.cli.options import add_model_options, load_model
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.policy.latency import LatencyModel

_LEARNT_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N",
                       help="sequences decoded together (default: 1 2 4 8)")  # fmt: skip
    group.add_argument("--contexts", type=int, nargs="+", metavar="N",
                       help="tokens of prompt and answer (default: 32 256 768 2048)")  # fmt: skip
    group.add_argument("--widths", type=int, nargs="+", metavar="N",
                       help="nodes checked in one pass, the root included (default: from 1 to where a pass costs four "
                       "times the root's)")  # fmt: skip
    group.add_argument("--turns", type=int, default=7, metavar="N",
                       help="measurements of each point, of which the median counts (default: 7)")  # fmt: skip
    group.add_argument("--learn", action="store_true",
                       help="also answer prompts, to learn how often nodes are accepted")  # fmt: skip
    group.add_argument("--prompts", default="small", metavar="SET",
                       help="those prompts: small or a file of {id, task, turns} a line (default: small)")  # fmt: skip
    group.add_argument(
        "--per-task", type=int, default=2, metavar="N", help="so many of each task (default: 2)"
    )
    group.add_argument("--into", metavar="FOLDER",
                       help="keep what was learnt in this drafter's folder too, for its other users")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write the measurements to this file too, as JSON")


def run(args: argparse.Namespace) -> int:
    from ddtree.policy import Policy, measure, store

    if args.into and not (args.learn and Path(args.into).is_dir()):
        raise ConfigError(f"--into {args.into}: name a drafter's folder, and add --learn")
    model = load_model(args)
    target, drafter = model.target, model.engine.drafter
    line = _Line()
    try:
        measured = measure.calibrate(
            target,
            drafter,
            rows=args.rows,
            contexts=args.contexts or measure.CONTEXTS,
            widths=args.widths,
            turns=args.turns,
            progress=line.update,
        )
    finally:
        line.close()
    print(report(measured))
    key = store.key(target, drafter)
    print(f"\nsaved for this pair, device, dtype and number of threads: {store.save(key, measured)}")
    if args.out:
        store.write(Path(args.out), {"key": key, "model": measured.as_dict()})
        print(f"written to {args.out}")
    if args.learn:
        _learn(model, Policy(measured), args)
    return 0


def _learn(model: Any, policy: Any, args: argparse.Namespace) -> None:
    """Answer prompts with each arm, greedily and at temperature 1, and keep the acceptance seen."""
    from ddtree.bench import prompts
    from ddtree.policy import memory, store
    from ddtree.policy.arms import OFF, arms_for
    from ddtree.progress import ProgressLine
    from ddtree.sampling import SamplingParams

    engine = model.engine
    engine.policy = policy
    arms = [arm for arm in arms_for("auto", engine.members) if arm != OFF]
    chosen = prompts.read([args.prompts], args.per_task)
    line = ProgressLine("learning", 2 * len(arms) * len(chosen), "answers")
    done = 0
    for prompt in chosen:
        ids = model.encode(prompt.turns[0], chat=getattr(model.tokenizer, "chat_template", None) is not None)
        for temperature in (0.0, 1.0):
            for arm in arms:
                line.update(done)
                params = SamplingParams(temperature=temperature, seed=0, max_tokens=_LEARNT_TOKENS)
                engine.add(ids, params, method=arm.method, budget="auto", members=arm.members)
                while not engine.idle:
                    engine.step()
                done += 1
    line.update(done)
    line.close()
    wanted = store.key(model.target, engine.drafter)
    files = [memory.cached(wanted), *([Path(args.into) / memory.FILE] if args.into else [])]
    for file in files:
        memory.save(file, policy.acceptance)
        print(f"acceptance kept in {file}")


def report(model: LatencyModel) -> str:
    """The machine, a table for each number of rows, and the error on points held out of the fit."""
    from ddtree.policy.heldout import held_out

    machine = ", ".join(f"{name} {value}" for name, value in model.machine.items())
    parts = [f"measured on: {machine}"]
    parts += [_table(model, rows) for rows in sorted({point.rows for point in model.points})]
    parts.append(
        "Verification and drafting in milliseconds, as fitted; drafting is by all drafters, at the first context. The "
        "ceiling is that of a round in which every node is accepted, or a path of 16."
    )
    held = held_out(model.points)
    if held is None:
        parts.append("Too few node counts and contexts to hold some out of the fit and predict them.")
    else:
        widths = ", ".join(map(str, held.widths)) or "none"
        contexts = ", ".join(f"{context:g}" for context in held.contexts) or "none"
        parts.append(
            f"Fitted without node counts {widths} and without contexts {contexts}, {len(held.errors)} points in all, "
            f"it predicts them with a median error of {held.median:.1%} (largest {held.worst:.1%})."
        )
    return "\n\n".join(parts)


def _table(model: LatencyModel, rows: int) -> str:
    from ddtree.tree import MAX_DEPTH

    points = [point for point in model.points if point.rows == rows]
    contexts = sorted({point.context for point in points})
    drafters = [name for name in model.draft_points if "+" not in name]
    head = ["nodes a row", *(f"{context:g}" for context in contexts), "draft", "tokens/s ceiling"]
    lines = [head]
    for width in sorted({point.width for point in points}):
        verify = [model.verify(width, rows, context) for context in contexts]
        draft = model.draft(drafters, width, rows, contexts[0]) if width > 1 else 0.0
        ceiling = rows * min(width, MAX_DEPTH + 1) / (verify[0] + draft + model.overhead())
        cells = [f"{1000 * seconds:.1f}" for seconds in [*verify, draft]]
        lines.append([str(width), *cells, f"{ceiling:.0f}"])
    sizes = [max(len(line[place]) for line in lines) for place in range(len(head))]
    table = ["  ".join(cell.rjust(size) for cell, size in zip(line, sizes, strict=True)) for line in lines]
    title = "1 sequence" if rows == 1 else f"{rows} sequences"
    return "\n".join([f"{title}, by tokens of prompt and answer so far", *table])


class _Line:
    """The progress line, begun when it is known how much there is to do."""

    def __init__(self) -> None:
        from ddtree.progress import ProgressLine

        self._make = ProgressLine
        self._line: ProgressLine | None = None

    def update(self, done: int, total: int) -> None:
        if self._line is None:
            self._line = self._make("measuring", total, "turns")
            self._line.update(0)
        self._line.update(done)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
