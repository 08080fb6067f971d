"""`ddtree train`: from a target to a drafter, in four steps that can each be stopped and taken up again."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters import Drafter
from ddtree.drafters.checkpoint import read, write
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash_net import DFlashNet
from ddtree.drafters.lookup import Lookup
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngrams import NgramTable, build_table
from ddtree.errors import ConfigError
from ddtree.pretrained import load_causal_lm
from ddtree.progress import ProgressLine
from ddtree.target import Target
from ddtree.train import export as exporting
from ddtree.train import synthesize as synthesizing
from ddtree.train.coupling import CouplingFit, fit_coupling
from ddtree.train.data import Corpus, Example, draft_vocabulary, make_example, read_shard, teacher_pass
from ddtree.train.evaluate import replay
from ddtree.train.export import DRAFTER, EVALUATION, NGRAMS, SUMMARY, Figure
from ddtree.train.fit import Fit, FitConfig, Progress
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.objective import Vocabulary
from ddtree.train.synthesize import SynthesisConfig

STEPS = ("synthesize", "fit", "evaluate", "export")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ddtree train`."""
    fit = FitConfig()
    parser.add_argument(
        "step", nargs="?", choices=("all", *STEPS), default="all", help="one step, or all of them"
    )
    parser.add_argument("--target", default="demo", help="checkpoint folder or hub id (default: demo)")
    parser.add_argument("--work", type=Path, default=Path("ddtree-train"), help="folder for data and state")
    parser.add_argument("--out", type=Path, help="folder of the finished drafter (default: WORK/export)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cuda, mps or cpu (default: cpu)")
    synthesizing.add_arguments(parser)
    group = parser.add_argument_group("fit")
    group.add_argument("--steps", type=int, default=fit.steps, help="optimizer steps (default: %(default)s)")
    group.add_argument(
        "--conversations", type=int, default=fit.conversations, help="per step (default: %(default)s)"
    )
    group.add_argument(
        "--anchors", type=int, default=fit.anchors, help="per conversation (default: %(default)s)"
    )
    group.add_argument("--learning-rate", type=float, default=fit.learning_rate, help="default: %(default)s")
    group.add_argument(
        "--soft", type=float, default=fit.soft, help="share of the target's distribution in the labels"
    )
    group.add_argument("--draft-layers", type=int, default=2, help="default: %(default)s")
    group.add_argument(
        "--block", type=int, default=8, help="block size, bonus token included (default: %(default)s)"
    )
    group.add_argument("--mask-token", type=int, help="token id of the masked slots (default: an unused one)")
    group.add_argument(
        "--draft-vocabulary", type=int, default=8192, help="tokens; 0 for all (default: %(default)s)"
    )
    group.add_argument(
        "--table-megabytes", type=float, default=4.0, help="n-gram table (default: %(default)s)"
    )
    group.add_argument("--traces", type=int, default=16, help="answers to fit the noise coupling on")
    group = parser.add_argument_group("evaluate")
    group.add_argument("--answers", type=Path, help="a shard to evaluate on beside the held-out answers")
    group.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32], help="default: 8 16 32")
    group.add_argument(
        "--limit", type=int, default=200, help="most conversations of a set (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the step or steps asked for. Errors a user can cause are `DDTreeError`s."""
    target = None if args.step == "export" else Target(*load_causal_lm(args.target, args.device))
    for step in STEPS if args.step == "all" else (args.step,):
        if step == "export":
            out = args.out or args.work / "export"
            exporting.export(args.work, out)
            print(f"the drafter is in {out}")
        else:
            assert target is not None
            {"synthesize": synthesize, "fit": fit, "evaluate": evaluate}[step](args, target)
    return 0


def synthesize(args: argparse.Namespace, target: Target) -> None:
    synthesizer = synthesizing.synthesizer_of(args, target, args.work / "answers")
    line = ProgressLine("synthesize", args.tokens, "answer tokens")
    held = synthesizer.run(line.update)
    line.close()
    print(held)


def fit(args: argparse.Namespace, target: Target) -> None:
    """Fit the drafter and count the n-grams."""
    corpus = Corpus(args.work / "answers")
    layers = feature_layers(target, args.draft_layers)
    corpus.prepare(target, layers)
    weight = head_weight(target)
    ids = None
    if args.draft_vocabulary:
        ids = draft_vocabulary(corpus, args.draft_vocabulary, target.eos_ids)
    mask = mask_token(target, corpus) if args.mask_token is None else args.mask_token
    shape = draft_config(target, layers, args.draft_layers, args.block, mask)
    network = initial_net(target, shape, corpus.example(corpus.train[0]), args.seed).to(target.device)
    config = FitConfig(
        steps=args.steps,
        conversations=args.conversations,
        anchors=args.anchors,
        learning_rate=args.learning_rate,
        soft=args.soft,
        seed=args.seed,
    )
    embedding = target.embed.weight.detach()  # type: ignore[operator]
    fitting = Fit(network, Vocabulary(ids, weight), embedding, corpus, args.work / "fit", config)
    line = ProgressLine("fit", config.steps, "steps")
    looks: list[str] = []
    started = time.monotonic()

    def say(progress: Progress) -> None:
        if progress.held_out:
            looks.append(f"held out {progress.held_out.loss:.3f}, chain {progress.held_out.chain:.2f}")
        line.update(progress.step, ", ".join([f"loss {progress.loss:.3f}", *looks[-1:]]))

    fitting.run(say)
    line.close()
    coupled = couple(target, network, ids, corpus, args.traces)
    coupling = (coupled.beta, coupled.kappa)
    write(args.work / DRAFTER, network, draft_ids=ids, coupling=coupling, dtype=torch.bfloat16)
    build_table(corpus.answers(), args.work / NGRAMS, max_bytes=int(args.table_megabytes * 1e6))
    recipe = {
        **asdict(config),
        "optimizer_steps_done": fitting.step,
        "draft_vocabulary": args.draft_vocabulary,
        "coupling_beta": round(coupled.beta, 4),
        "coupling_kappa": round(coupled.kappa, 4),
    }
    seconds = time.monotonic() - started
    exporting.write_json(args.work / SUMMARY, summary(args, corpus, network, recipe, seconds))


def couple(
    target: Target, network: DFlashNet, ids: torch.Tensor | None, corpus: Corpus, traces: int
) -> CouplingFit:
    """Fit the noise coupling while the drafter decodes held-out user turns at temperature 1."""
    drafter = DFlash(copy.deepcopy(network), target, draft_ids=ids)
    turns = [corpus.conversations[index] for index in corpus.held_out[:traces]]
    return fit_coupling(target, drafter, [corpus.prefix + c.tokens[: c.answer_start].tolist() for c in turns])


def summary(
    args: argparse.Namespace, corpus: Corpus, network: torch.nn.Module, recipe: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """What the card tells of the data and the fit."""
    conversations = corpus.conversations
    return {
        "target": "SmolLM2-135M-Instruct" if args.target == "demo" else args.target,
        "parameters": exporting.parameters(network),
        "data": {
            "conversations": len(conversations),
            "held_out": len(corpus.held_out),
            "answer_tokens": corpus.answer_tokens,
            "greedy_share": sum(c.greedy for c in conversations) / len(conversations),
            "turn_top_p": SynthesisConfig().turn_top_p,
            "max_answer": max(len(c.answer) for c in conversations),
        },
        "recipe": recipe,
        "machine": exporting.machine(),
        "seconds": seconds,
    }


def evaluate(args: argparse.Namespace, target: Target) -> None:
    """Replay the drafter, the table and both together along held-out answers."""
    corpus = Corpus(args.work / "answers")
    layers = feature_layers(target, args.draft_layers)
    corpus.prepare(target, layers)
    sets = {"held-out": [corpus.example(i) for i in corpus.held_out[: args.limit]]}
    if args.answers:
        prefix, conversations = read_shard(args.answers)
        conversations = conversations[: args.limit]
        texts = [prefix + [int(token) for token in c.tokens] for c in conversations]
        features = teacher_pass(target, texts, layers)
        sets[args.answers.stem] = [
            make_example(prefix, c, f) for c, f in zip(conversations, features, strict=True)
        ]
    figures = []
    for name, examples in sets.items():
        for greedy in (True, False):
            chosen = [example for example in examples if example.greedy == greedy]
            if chosen:
                figures += measure(name, chosen, drafters(args.work, target), args.budgets, target.dtype)
    exporting.write_json(args.work / EVALUATION, [asdict(figure) for figure in figures])


def drafters(work: Path, target: Target) -> dict[str, Callable[[], Drafter]]:
    """Makers of what there is to measure: each replay needs a drafter without rows."""
    checkpoint = read(work / DRAFTER)
    table = NgramTable.load(work / NGRAMS)

    def dflash() -> Drafter:
        return DFlash(
            checkpoint.network(), target, draft_ids=checkpoint.draft_ids, coupling=checkpoint.layout.coupling
        )

    def lookup() -> Drafter:
        return Lookup(table, vocab_size=target.vocab_size, device=target.device)

    return {"dflash": dflash, "n-grams": lookup, "dflash + n-grams": lambda: Merged([dflash(), lookup()])}


def measure(
    name: str,
    examples: list[Example],
    makers: dict[str, Callable[[], Drafter]],
    budgets: list[int],
    dtype: torch.dtype,
) -> list[Figure]:
    """Tokens per round of each drafter at each budget, printed as they come."""
    figures = []
    for drafter, make in makers.items():
        tau = {"chain": replay(make(), examples, make().max_depth, chain=True, dtype=dtype).tau}
        for budget in budgets:
            tau[f"B={budget}"] = replay(make(), examples, budget, dtype=dtype).tau
        figures.append(Figure(name, len(examples), drafter, 0 if examples[0].greedy else 1, tau))
        cells = ", ".join(f"{key} {value:.2f}" for key, value in tau.items())
        print(f"{name}, T={figures[-1].temperature}, {drafter}: {cells}", flush=True)
    return figures


def head_weight(target: Target) -> torch.Tensor:
    """The head's matrix. Raises ConfigError for a head with a bias, which the drafter's layout has no place for."""
    if getattr(target.head, "bias", None) is not None:
        raise ConfigError(
            "the target's head has a bias, which a drafter with a reduced vocabulary cannot carry"
        )
    return target.head.weight.detach()  # type: ignore[operator]
