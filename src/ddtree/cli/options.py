"""Options that several commands share, and what they become."""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.api import Model

MAX_TOKENS = 512
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add target, drafter and device; the target is an argument without a name when it is `positional`."""
    group = parser.add_argument_group("model")
    name: dict[str, Any] = {"nargs": "?", "metavar": "TARGET"} if positional else {"metavar": "NAME"}
    group.add_argument("target" if positional else "--target", default="demo", **name,
                       help="demo, a checkpoint's folder, or a Hugging Face hub id (default: demo)")  # fmt: skip
    group.add_argument("--drafter", action="append", metavar="NAME",
                       help="auto, none, lookup, demo, draft:MODEL, or a drafter's folder or hub id; given several "
                       "times, they are merged into one tree (default: auto)")  # fmt: skip
    group.add_argument("--device", help="cuda, mps or cpu (default: the first of these there is)")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's own")
    group.add_argument("--max-context", type=int, metavar="N", help="most tokens of prompt and answer")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--pack-weights", action=argparse.BooleanOptionalAction, default=True,
                       help="keep copies of 16-bit weights in the layout of a CPU's matrix kernels (default: yes, if "
                       "there is memory)")  # fmt: skip
    group.add_argument("--compile", action="store_true",
                       help="run the target through torch.compile: minutes to start, slower on CPUs")  # fmt: skip


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """Add method, budget and depth of drafting."""
    group = parser.add_argument_group("drafting (changes the time, never the text)")
    group.add_argument("--method", choices=("auto", "off", "chain", "tree"), default="auto",
                       help="default: auto, whichever is fastest")  # fmt: skip
    group.add_argument("--budget", type=budget, default="auto", metavar="N",
                       help="most drafted tokens checked in one forward pass, or auto: as many as pay on this machine "
                       "(default: auto)")  # fmt: skip
    group.add_argument("--depth", type=int, default=16, metavar="N",
                       help="tokens to draft ahead (default: 16)")  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the parameters of sampling and the ends of an answer."""
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-tokens", type=int, default=MAX_TOKENS, metavar="N",
                       help="most tokens of an answer (default: %(default)s)")  # fmt: skip
    group.add_argument("-t", "--temperature", type=float, metavar="T",
                       help="0 always takes the likeliest token (default: 0, or 1 when --top-k, --top-p, --min-p or "
                       "--seed is given)")  # fmt: skip
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--logit-bias", action="append", metavar="ID=X",
                       help="add X to the logit of token ID; repeatable, once for each token")  # fmt: skip
    group.add_argument("--bad-word", action="append", dest="bad_words", metavar="TEXT",
                       help="text that the answer may not contain as these tokens; repeatable")  # fmt: skip
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--stop-token", action="append", type=int, dest="stop_token_ids", metavar="ID",
                       help="repeatable")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    group.add_argument("--seed", type=int, metavar="N", help="default: a fresh one, told by --json")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add --raw and --system."""
    group = parser.add_argument_group("prompt")
    group.add_argument("--raw", action="store_true",
                       help="take the prompt as it is, without the chat template")  # fmt: skip
    group.add_argument("--system", metavar="TEXT", help="system message before the prompt")


def load_model(args: argparse.Namespace, **more: Any) -> Model:
    """Load the model that the options name, with `more` arguments of `ddtree.load`, whose errors it raises."""
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads {args.threads} is outside 1..1024")
    import torch

    from ddtree.api import load

    quiet_transformers(args.debug)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    drafters = args.drafter or ["auto"]
    drafter = drafters[0] if len(drafters) == 1 else drafters
    chosen = {
        name: getattr(args, name) for name in ("device", "dtype", "max_context", "pack_weights", "compile")
    }
    return load(args.target, drafter, **chosen, **more)


def quiet_transformers(debug: bool) -> None:
    """Turn off transformers' progress bars and, unless debugging, its warnings."""
    from transformers.utils import logging

    if not debug:
        logging.set_verbosity_error()
    logging.disable_progress_bar()


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Model.generate` that the options give; options and parameters have the same names."""
    from ddtree.sampling.params import SamplingParams

    names = [*(field.name for field in fields(SamplingParams)), "method", "budget", "depth"]
    chosen = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if args.logit_bias:
        chosen["logit_bias"] = _biases(args.logit_bias)
    if args.temperature is None:
        chosen["temperature"] = 1.0 if {"top_k", "top_p", "min_p", "seed"} & set(chosen) else 0.0
    return chosen


def is_chat(args: argparse.Namespace, model: Model) -> bool:
    """Return whether text goes through the chat template: where there is one, unless --raw. Raises ConfigError."""
    templated = getattr(model.tokenizer, "chat_template", None) is not None
    if args.system and (args.raw or not templated):
        raise ConfigError("--system needs a chat template: the target has none, or --raw turned it off")
    return templated and not args.raw


def replace_unencodable_output() -> None:
    """Show a replacement for characters of the model that the terminal's encoding lacks, in place of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def json_line(value: Any) -> str:
    """Return JSON in one line, with characters that standard output cannot show as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def stats_line(stats: Any) -> str:
    """Return the figures of one answer in one line."""
    arms = stats.arms.most_common(1)
    most = "no drafting" if not arms or arms[0][0] == "off" else f"mostly {arms[0][0]}"
    return (
        f"{stats.output_tokens} tokens in {stats.total:.2f} s ({stats.tokens_per_second:.1f} tokens/s), the first "
        f"after {stats.ttft:.2f} s; {stats.rounds} rounds, {stats.tau:.2f} tokens a round; {most}"
    )


def _biases(texts: list[str]) -> dict[str, float]:
    """Parse --logit-bias ID=X, each token once. Raises ConfigError."""
    biases: dict[str, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        token = token.strip()
        if token in biases:
            raise ConfigError(f"--logit-bias names token {token} twice: give it once")
        try:
            biases[token] = float(value)
        except ValueError as error:
            raise ConfigError(f"--logit-bias {text!r} must be written ID=NUMBER") from error
    return biases


def budget(text: str) -> int | str:
    """Parse a number of nodes, such as 16, or "auto"."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from error
