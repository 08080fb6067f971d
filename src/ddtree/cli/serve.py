"""`ddtree serve`: an OpenAI-compatible endpoint on one model, with a dashboard at `/`."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.cli import options
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.server.config import HttpSettings, ServerLimits

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree serve`."""
    options.add_model_options(parser, positional=True)
    options.add_drafting_options(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--engine", choices=("ddtree", "vllm"), default="ddtree",
                       help="vllm: its server with draft trees in it; options of its own go last, after -- "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--drafting", choices=("on", "off"), default="on",
                       help="off: plain vLLM (default: %(default)s)")  # fmt: skip
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", default="127.0.0.1",
                       help="address to listen on, 0.0.0.0 for all (default: this machine alone)")  # fmt: skip
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument("--name", help="of the model, for clients (default: the target's)")
    group.add_argument("--generation-config", choices=("model", "ddtree"), default="model",
                       help="where fields of sampling come from that a request leaves out: the model's "
                       "generation_config.json, or temperature 1 and no filters (default: model)")  # fmt: skip
    group.add_argument("--grace", type=float, default=30.0, metavar="SECONDS",
                       help="how long running answers may go on after SIGTERM or Ctrl-C (default: 30)")  # fmt: skip
    group.add_argument("--access-log", action="store_true", help="write a line for each request")
    _add_limits(parser.add_argument_group("limits"))
    _add_security(parser.add_argument_group("security"))


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-rows", type=int, default=8, metavar="N",
                       help="answers made at once; more wait (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-waiting", type=int, default=64, metavar="N",
                       help="answers that may wait; more are refused with 429 (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-tokens", type=int, default=options.MAX_TOKENS, metavar="N",
                       help="tokens of a chat's answer whose request says nothing (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-n", type=int, default=8, metavar="N",
                       help="answers to one request (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-body", type=_size, default=4 * 2**20, metavar="SIZE",
                       help="longest request, as 4M (default: 4M)")  # fmt: skip
    group.add_argument("--max-connections", type=int, default=512, metavar="N",
                       help="connections at once; more are turned away (default: %(default)s)")  # fmt: skip
    group.add_argument("--request-timeout", type=float, default=0.0, metavar="SECONDS",
                       help="end answers that take longer; 0: never (default: 0)")  # fmt: skip
    group.add_argument("--kv-memory", type=_size, metavar="SIZE",
                       help="memory for keys and values of running answers, as 2G; others wait for it "
                       "(default: what there is)")  # fmt: skip
    group.add_argument("--prefix-memory", type=_size, default=512 * 2**20, metavar="SIZE",
                       help="memory for what chats leave to their next turn; 0 for none (default: 512M)")  # fmt: skip
    group.add_argument("--prefill-chunk", type=int, default=512, metavar="N",
                       help="prompt tokens that running answers wait for at a time (default: %(default)s)")  # fmt: skip


def _add_security(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", action="append", default=[], metavar="KEY",
                       help="requests must carry one of these; repeatable. Other users of this machine may see it: "
                       "--api-key-file hides it")  # fmt: skip
    group.add_argument("--api-key-file", action="append", default=[], type=Path, metavar="FILE",
                       help="keys, one a line; repeatable")  # fmt: skip
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN",
                       help="pages from there may call this server, as https://example.com; repeatable")  # fmt: skip
    group.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
                       help="a name that this server goes by besides localhost, where it listens to this machine alone "
                       "and needs no key; repeatable")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0. Raises ConfigError and the errors of `load`."""
    if args.engine == "vllm":
        return _on_vllm(args)
    if args.passthrough:
        raise ConfigError(
            f"{args.passthrough[0]} after -- is for --engine vllm: give it before, or drop the --"
        )
    if args.drafting == "off":
        raise ConfigError("--drafting off is for --engine vllm: give --method off")
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ddtree serve needs {error.name}: pip install 'ddtree[serve]'") from error
    from ddtree.server.app import create_app
    from ddtree.server.config import DraftSettings
    from ddtree.server.engine_thread import EngineThread
    from ddtree.server.run import HttpServer, bind, url

    logging.basicConfig(level=logging.WARNING, format="ddtree: %(levelname)s: %(message)s")
    drafting = DraftSettings(method=args.method, depth=args.depth, budget=args.budget)
    limits, settings = _limits(args), _settings(args)
    # What is wrong with the address is told before a model is loaded.
    bound = bind(args.host, args.port)
    if not settings.api_keys and settings.hosts is None:
        print(f"ddtree: warning: {args.host} can be reached from other machines and no --api-key is set: anyone there "
              "may use this server", file=sys.stderr)  # fmt: skip
    with bound, options.load_model(
        args, max_rows=args.max_rows, cache_bytes=args.kv_memory, prefix_bytes=args.prefix_memory,
        prefill_chunk=args.prefill_chunk,
    ) as model:  # fmt: skip
        worker = EngineThread(model, name=args.name or _name(args.target), drafting=drafting, limits=limits)
        server = HttpServer(
            create_app(worker, settings), worker, grace=args.grace, access_log=args.access_log
        )
        worker.start()
        print(
            f"ddtree: {worker.name} at {url(bound)}/v1, dashboard at {url(bound)}/ (Ctrl-C stops)",
            flush=True,
        )
        server.serve_on(bound)
    return 0


def _on_vllm(args: argparse.Namespace) -> int:
    from ddtree.integrations.vllm.launch import serve

    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    return serve(args, defaults.parse_args([]), _api_keys(args), args.passthrough)


def _limits(args: argparse.Namespace) -> ServerLimits:
    from ddtree.server.config import ServerLimits

    if not 0 <= args.grace <= 86400:
        raise ConfigError(f"--grace {args.grace:g} is outside 0..86400")
    return ServerLimits(**{field.name: getattr(args, field.name) for field in fields(ServerLimits)})


def _settings(args: argparse.Namespace) -> HttpSettings:
    from ddtree.server.config import HttpSettings
    from ddtree.server.run import LOOPBACK

    keys = _api_keys(args)
    for origin in args.cors_origin:
        if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise ConfigError(
                f"--cors-origin {origin!r} is no origin: write it as https://example.com, without a path"
            )
    # Without a key, a page of another site whose name leads to this machine could ask as well as a local one.
    local = (args.host in LOOPBACK or args.host.startswith("127.")) and not keys
    return HttpSettings(
        api_keys=tuple(keys),
        cors_origins=tuple(args.cors_origin),
        hosts=(*LOOPBACK, args.host, *args.allowed_host) if local else None,
        model_sampling=args.generation_config == "model",
    )


def _api_keys(args: argparse.Namespace) -> list[str]:
    keys = [*args.api_key, *(key for file in args.api_key_file for key in _keys(file))]
    if any(not key.strip() or not key.isascii() for key in keys):
        raise ConfigError("an API key is empty or not ASCII: give letters and digits")
    return keys


def _keys(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {file} cannot be read: name a text file with a key a line"
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key: write one a line")
    return keys


def _name(target: str) -> str:
    """Return the name of a target for clients: a folder's last part, others as they are."""
    folder = Path(target).expanduser()
    return folder.resolve().name if folder.is_dir() else target


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
