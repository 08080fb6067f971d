"""The options of `ddtree serve`, as vLLM's own server takes them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.settings import Drafting, Settings
from ddtree.model.demo import NAME as DEMO
from ddtree.model.pretrained import locate

MIDDLEWARE = "ddtree.integrations.vllm.frontend.Middleware"
# What the plugin sets itself, by every name that vLLM has for it; another value would take it out of the engine.
_TAKEN = (
    "worker-cls", "speculative-config", "sc", "spec-method", "spec-model", "spec-tokens", "additional-config",
    "logits-processors", "async-scheduling",
)  # fmt: skip
_ELSEWHERE = {
    "max_waiting": "give -- --max-num-queued-reqs N",
    "max_tokens": "give -- --override-generation-config '{\"max_new_tokens\": N}'",
    "max_n": "vLLM's environment variable VLLM_MAX_N_SEQUENCES bounds it",
    "max_body": "put a proxy in front that bounds it",
    "request_timeout": "put a proxy in front that bounds it",
    "max_connections": "put a proxy in front that bounds them",
    "allowed_host": "put a proxy in front that checks names",
    "prefill_chunk": "give -- --max-num-batched-tokens N",
}
# Taken over below, or read elsewhere.
_KNOWN = frozenset({
    "target", "drafter", "device", "dtype", "max_context", "threads", "method", "budget", "depth", "engine", "drafting",
    "host", "port", "name", "generation_config", "grace", "access_log", "max_rows", "kv_memory", "prefix_memory",
    "api_key", "api_key_file", "cors_origin",
})  # fmt: skip
_SAME = {
    "host": "--host",
    "port": "--port",
    "max_context": "--max-model-len",
    "kv_memory": "--kv-cache-memory-bytes",
}


def settings_of(args: argparse.Namespace) -> Settings:
    """How the worker shall draft. Raises ConfigError for what is out of range, or no drafter at all."""
    names = args.drafter or ["auto"]
    if "auto" in names and len(names) > 1:
        raise ConfigError("--drafter auto chooses by itself: give it alone, or name each drafter")
    if "none" in names:
        raise ConfigError("--drafter none drafts nothing: give --drafting off, which is plain vLLM")
    if names == ["auto"]:
        names = [DEMO if args.target == DEMO else "lookup"]
    drafting = Drafting(method=args.method, budget=args.budget, depth=args.depth)
    room = {} if args.budget == "auto" else {"nodes": max(1, args.budget)}
    return Settings(
        drafter=names[0] if len(names) == 1 else tuple(names),
        drafting=drafting,
        feature_bytes=args.prefix_memory,
        **room,
    )


def flags(args: argparse.Namespace, defaults: argparse.Namespace, further: Sequence[str]) -> list[str]:
    """vLLM's command line.

    Args:
        args: of `ddtree serve`.
        defaults: the same where nothing was given.
        further: options of vLLM's own, which come last and so win.

    Raises:
        ConfigError: an option has no counterpart in vLLM, or `further` sets what the plugin sets.
    """
    given = {name for name in vars(defaults) if getattr(args, name) != getattr(defaults, name)}
    for name in sorted(given - _KNOWN):
        remedy = _ELSEWHERE.get(name, "leave it out")
        raise ConfigError(f"--{name.replace('_', '-')} is not for --engine vllm: {remedy}")
    if args.device not in (None, "cpu"):
        raise ConfigError(f"--device {args.device} is not for --engine vllm: its build decides, here the CPU")
    found = ["--model", locate(args.target), "--served-model-name", args.name or args.target]
    for name, flag in _SAME.items():
        value = getattr(args, name)
        if value is not None:
            found += [flag, str(value)]
    if "max_rows" in given:
        found += ["--max-num-seqs", str(args.max_rows)]
    found += ["--dtype", args.dtype, "--shutdown-timeout", str(int(args.grace))]
    found += ["--generation-config", "auto" if args.generation_config == "model" else "vllm"]
    found += ["--allowed-origins", json.dumps(args.cors_origin)]
    found += [] if args.access_log else ["--disable-uvicorn-access-log"]
    if args.drafting == "on":
        found += _drafting_flags(settings_of(args), further)
    else:
        for name in ("drafter", "method", "budget", "depth"):
            if name in given:
                raise ConfigError(f"--{name} says how to draft, and --drafting off turns it off: drop one")
    return [*found, *further]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Environment variables that vLLM's processes need, and that are not set."""
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


def _drafting_flags(settings: Settings, further: Sequence[str]) -> list[str]:
    for option in further:
        # Fields of an option that takes an object may be given one by one, after a dot.
        written = option.partition("=")[0].partition(".")[0]
        if option.startswith("-") and written.lstrip("-").removeprefix("no-").replace("_", "-") in _TAKEN:
            raise ConfigError(f"{written} is set by the plugin: leave it out, or give --drafting off")
    found = ["--middleware", MIDDLEWARE]
    for name, value in settings.engine_arguments().items():
        found += _flag(name.replace("_", "-"), value)
    return found


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
