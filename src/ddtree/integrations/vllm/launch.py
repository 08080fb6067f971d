"""`ddtree serve --engine vllm`: vLLM's own OpenAI server with the plugin's worker, or without it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ddtree.errors import ConfigError
from ddtree.integrations.vllm import compat as versions
from ddtree.integrations.vllm import options
from ddtree.integrations.vllm import validate as refusals
from ddtree.model.pretrained import read_config


def serve(
    args: argparse.Namespace, defaults: argparse.Namespace, keys: Sequence[str], further: Sequence[str]
) -> int:
    """Serve until a signal ends it.

    Args:
        args: of `ddtree serve`.
        defaults: the same where nothing was given.
        keys: of which requests must carry one.
        further: options of vLLM's own.

    Raises:
        ConfigError: vLLM is missing or another release than was tested, or an option cannot be had there.
        UnsupportedModelError: trees cannot be verified on the model in vLLM.
        CheckpointError: the model cannot be read.
    """
    if versions.installed() is None:
        raise ConfigError(f"--engine vllm needs vLLM: {versions.REMEDY}")
    drafting = args.drafting == "on"
    line = options.flags(args, defaults, further)
    if drafting:
        refusals.check_model(args.target, read_config(args.target))
    # Before anything of vLLM is imported: it reads some of these once.
    os.environ.update(options.environment(args))
    if drafting:
        versions.check()
    _run(line, list(keys), drafting)
    return 0


def _run(line: list[str], keys: list[str], drafting: bool) -> None:
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
    validate_parsed_serve_args(parsed)
    if drafting:
        refusals.check_engine(vars(parsed))
    uvloop.run(run_server(parsed))
