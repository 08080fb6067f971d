"""`ddtree serve --engine vllm`: vLLM's own OpenAI server with the plugin's worker, or without it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree.errors import ConfigError
from ddtree.integrations.vllm import validate
from ddtree.integrations.vllm.settings import MIDDLEWARE, DraftingSettings, PluginSettings
from ddtree.model.demo import NAME as DEMO
from ddtree.model.pretrained import locate, read_config

# The plugin sets these itself, here by every name that vLLM has for them; another value would take it out.
_TAKEN = (
    "worker-cls", "speculative-config", "sc", "spec-method", "spec-model", "spec-tokens", "additional-config",
    "logits-processors", "async-scheduling",
)  # fmt: skip
_INSTEAD = {
    "max_waiting": "give -- --max-num-queued-reqs N",
    "max_tokens": "give -- --override-generation-config '{\"max_new_tokens\": N}'",
    "max_n": "vLLM's environment variable VLLM_MAX_N_SEQUENCES bounds it",
    "max_body": "put a proxy in front that bounds it",
    "request_timeout": "put a proxy in front that bounds it",
    "max_connections": "put a proxy in front that bounds them",
    "allowed_host": "put a proxy in front that checks names",
    "prefill_chunk": "give -- --max-num-batched-tokens N",
    "pack_weights": "vLLM's own kernels run the target",
    "compile": "vLLM compiles as its own options say",
}


def serve(
    args: argparse.Namespace, defaults: argparse.Namespace, keys: Sequence[str], further: Sequence[str]
) -> int:
    """Serve until a signal ends it; return the exit code.

    Args:
        args: of `ddtree serve`.
        defaults: its arguments where none were given.
        keys: API keys, of which requests must carry one.
        further: options of vLLM's own.

    Raises:
        ConfigError: vLLM is missing or another release than was tested, or an option does not exist there.
        UnsupportedModelError: trees cannot be verified on the model in vLLM.
        CheckpointError: the model cannot be read.
    """
    if validate.installed() is None:
        raise ConfigError(f"--engine vllm needs vLLM: {validate.REMEDY}")
    settings = settings_of(args) if args.drafting == "on" else None
    line = command_line(args, defaults, further)
    if settings is not None:
        validate.check_model(args.target, read_config(args.target))
    # Before anything of vLLM is imported: it reads some of these once.
    os.environ.update(environment(args))
    if settings is not None:
        validate.check_release()
    _run(line, list(keys), settings)
    return 0


def _run(line: list[str], keys: list[str], settings: PluginSettings | None) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser(prog="ddtree serve --engine vllm --")).parse_args(line)
    if keys:
        # Not among the arguments, which other users of the machine may see.
        parsed.api_key = keys
    if settings is not None:
        add_plugin(parsed, settings)
        validate.check_engine(vars(parsed))
    validate_parsed_serve_args(parsed)
    uvloop.run(run_server(parsed))


def command_line(args: argparse.Namespace, defaults: argparse.Namespace, further: Sequence[str]) -> list[str]:
    """Return vLLM's command line.

    Args:
        args: of `ddtree serve`.
        defaults: its arguments where none were given.
        further: options of vLLM's own, which come last and so win.

    Raises:
        ConfigError: an option has no counterpart in vLLM, or `further` sets what the plugin sets.
    """
    given = {name for name in vars(defaults) if getattr(args, name) != getattr(defaults, name)}
    for name in sorted(given & _INSTEAD.keys()):
        raise ConfigError(f"--{name.replace('_', '-')} is not for --engine vllm: {_INSTEAD[name]}")
    if args.device not in (None, "cpu"):
        raise ConfigError(f"--device {args.device} is not for --engine vllm: its build decides, here the CPU")
    values = {
        "--model": locate(args.target),
        "--served-model-name": args.name or args.target,
        "--host": args.host,
        "--port": args.port,
        "--max-model-len": args.max_context,
        "--max-num-seqs": args.max_rows if "max_rows" in given else None,
        "--kv-cache-memory-bytes": args.kv_memory,
        "--dtype": args.dtype,
        "--shutdown-timeout": int(args.grace),
        "--generation-config": "auto" if args.generation_config == "model" else "vllm",
        "--allowed-origins": json.dumps(args.cors_origin),
    }
    line = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    line += [] if args.access_log else ["--disable-uvicorn-access-log"]
    if args.drafting == "on":
        _check_further(further)
        return [*line, *further]
    for name in ("drafter", "method", "budget", "depth"):
        if name in given:
            raise ConfigError(f"--{name} says how to draft, and --drafting off turns it off: drop one")
    return [*line, *further]


def _check_further(further: Sequence[str]) -> None:
    for option in further:
        # Fields of an option that takes an object may be given one by one, after a dot.
        written = option.partition("=")[0].partition(".")[0]
        if option.startswith("-") and written.lstrip("-").removeprefix("no-").replace("_", "-") in _TAKEN:
            raise ConfigError(f"{written} is set by the plugin: leave it out, or give --drafting off")


def settings_of(args: argparse.Namespace) -> PluginSettings:
    """Return the worker's settings; raise ConfigError for values out of range, or for no drafter at all."""
    names = args.drafter or ["auto"]
    if "auto" in names and len(names) > 1:
        raise ConfigError("--drafter auto chooses by itself: give it alone, or name each drafter")
    if "none" in names:
        raise ConfigError("--drafter none drafts nothing: give --drafting off, which is plain vLLM")
    if names == ["auto"]:
        names = [DEMO if args.target == DEMO else "lookup"]
    room = {} if args.budget == "auto" else {"nodes": max(1, args.budget)}
    return PluginSettings(
        drafter=names[0] if len(names) == 1 else names,
        drafting=DraftingSettings(method=args.method, budget=args.budget, depth=args.depth),
        feature_bytes=args.prefix_memory,
        **room,
    )


def add_plugin(parsed: argparse.Namespace, settings: PluginSettings) -> None:
    """Put the plugin into the parsed arguments of vLLM's server."""
    vars(parsed).update(settings.engine_arguments(), middleware=[*parsed.middleware, MIDDLEWARE])


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that vLLM's processes need and that are not set."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(args.target).expanduser().is_dir() or args.target == DEMO:
        found["HF_HUB_OFFLINE"] = "1"
    if args.threads is not None:
        found |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # vLLM asks for Intel's OpenMP, which its package brings, when it drafts on a CPU.
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if library.exists():
        found |= {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "5"}
    return {name: value for name, value in found.items() if name not in os.environ}
