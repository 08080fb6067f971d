"""`ddtree calibrate`: measures the time of rounds on this machine, and acceptance if asked, and keeps it for `auto`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.cli.options import add_model_options, load_model
from ddtree.errors import ConfigError
from ddtree.storage import write_json

if TYPE_CHECKING:
    from ddtree.bench.tables import Table
    from ddtree.policy.latency import LatencyTable

_ANSWER_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree calibrate`."""
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
    group.add_argument("--per-task", type=int, default=2, metavar="N",
                       help="so many of each task (default: 2)")  # fmt: skip
    group.add_argument("--into", metavar="FOLDER",
                       help="keep what was learnt in this drafter's folder too, for its other users")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write the measurements to this file too, as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print and save; return 0. Raises the errors of `load`, and ConfigError for what cannot be measured."""
    from tqdm import tqdm

    from ddtree.policy import cache, calibration
    from ddtree.policy.controller import Policy

    if args.into and not (args.learn and Path(args.into).is_dir()):
        raise ConfigError(f"--into {args.into}: name a drafter's folder, and add --learn")
    model = load_model(args)
    if args.into and not _holds_drafter(Path(args.into), model.drafter_folder):
        raise ConfigError(f"--into {args.into} holds no drafter: name the folder of one")
    prompts = _prompts(model, args) if args.learn else []
    target, drafter = model.target, model.engine.drafter
    bars: list[tqdm] = []  # none before the first measurement, so that a mistake in the options is one line

    def progress(done: int, total: int) -> None:
        bars[:] = bars or [tqdm(desc="measuring", total=total, unit="turn")]
        bars[0].update(done - bars[0].n)

    contexts = args.contexts or calibration.CONTEXTS
    grid = {"rows": args.rows, "contexts": contexts, "widths": args.widths, "turns": args.turns}
    try:
        measured = calibration.thorough(target, drafter, **grid, progress=progress)
    finally:
        for bar in bars:
            bar.close()
    print(report(measured))
    key = cache.key(target, drafter)
    if args.out:
        write_json(Path(args.out), {"key": key, "model": measured.as_dict()})
        print(f"\nwritten to {args.out}")
    print(f"\nsaved for this pair, device, dtype and number of threads: {cache.save(key, measured)}")
    if prompts:
        _learn(model, Policy(measured), prompts, args.into)
    return 0


def _holds_drafter(folder: Path, loaded: Path | None) -> bool:
    return (folder / "config.json").is_file() or (loaded is not None and folder.resolve() == loaded.resolve())


def _prompts(model: Any, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the prompts that leave room for an answer. Raises ConfigError when none does."""
    from ddtree.bench import prompt_sets

    chat = getattr(model.tokenizer, "chat_template", None) is not None
    chosen = prompt_sets.read([args.prompts], args.per_task)
    every = [model.encode(prompt.turns[0], chat=chat) for prompt in chosen]
    fitting = [ids for ids in every if len(ids) + _ANSWER_TOKENS <= model.target.max_context]
    if not fitting:
        raise ConfigError(
            f"no prompt of {args.prompts} leaves room for {_ANSWER_TOKENS} tokens in the context of "
            f"{model.target.max_context}: name shorter ones with --prompts"
        )
    return fitting


def _learn(model: Any, policy: Any, prompts: list[list[int]], into: str | None) -> None:
    """Answer prompts with each arm, greedily and at temperature 1, and keep the acceptance seen until the end."""
    from tqdm import tqdm

    from ddtree.policy import OFF, Request, cache
    from ddtree.sampling.params import SamplingParams

    engine = model.engine
    engine.policy = policy
    arms = [arm for arm in Request("auto", "auto", engine.members).arms() if arm != OFF]
    answers = [(ids, temperature, arm) for ids in prompts for temperature in (0.0, 1.0) for arm in arms]
    try:
        for ids, temperature, arm in tqdm(answers, "learning", unit="answer"):
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=_ANSWER_TOKENS)
            engine.add(ids, params, method=arm.method, budget="auto", members=arm.members)
            while not engine.idle:
                engine.step()
    finally:
        wanted = cache.key(model.target, engine.drafter)
        for file in (cache.acceptance_file(wanted), *([Path(into) / cache.ACCEPTANCE_FILE] if into else [])):
            cache.save_acceptance(file, policy.acceptance)
            print(f"acceptance kept in {file}")


def report(table: LatencyTable) -> str:
    """Return the machine and a table of the measurements for each number of rows."""
    machine = ", ".join(f"{name} {value}" for name, value in table.machine.items())
    parts = [f"measured on: {machine}"]
    parts += [_table(table, rows).text() for rows in sorted({point.rows for point in table.points})]
    parts.append(
        "Verification and drafting in milliseconds; drafting is by all drafters, at the first context. The ceiling is "
        "that of a round in which every node is accepted, or a path of 16."
    )
    return "\n\n".join(parts)


def _table(model: LatencyTable, rows: int) -> Table:
    """Return the times of one number of rows, by nodes and context."""
    from ddtree.bench.tables import Table
    from ddtree.tree import MAX_DEPTH

    points = [point for point in model.points if point.rows == rows]
    contexts = sorted({point.context for point in points})
    drafters = list(model.draft_points)
    lines = []
    for width in sorted({point.width for point in points}):
        verify = [model.verify(width - 1, rows, context) for context in contexts]
        draft = model.draft(drafters, width - 1, rows, contexts[0]) if width > 1 else 0.0
        ceiling = rows * min(width, MAX_DEPTH + 1) / (verify[0] + draft + model.overhead())
        lines.append(
            [str(width), *(f"{1000 * seconds:.1f}" for seconds in [*verify, draft]), f"{ceiling:.0f}"]
        )
    title = f"{rows} {'sequence' if rows == 1 else 'sequences'}, by tokens of prompt and answer so far"
    header = ["nodes a row", *(f"{context:g}" for context in contexts), "draft", "tokens/s ceiling"]
    return Table(title, header, lines)
