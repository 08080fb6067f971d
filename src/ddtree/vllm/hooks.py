"""What the plugin overrides, calls or takes apart in vLLM: its signatures as they were in the tested releases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """A function, method or class of vLLM.

    Attributes:
        module: where it is defined or looked up.
        name: in the module, with dots.
        parameters: names of its parameters in order; None where it must only be there.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        return f"{self.module}.{self.name}"


def _hook(place: str, parameters: str | None = None) -> Hook:
    module, name = place.split(":")
    return Hook(f"vllm.{module}", name, None if parameters is None else tuple(parameters.split()))


HOOKS = (
    _hook("entrypoints.launchers.cli_args:make_arg_parser", "parser"),
    _hook("entrypoints.launchers.cli_args:validate_parsed_serve_args", "args"),
    _hook("entrypoints.launchers.api_server.entry:run_server", "args uvicorn_kwargs"),
    _hook("v1.engine.async_llm:AsyncLLM.collective_rpc", "self method timeout args kwargs"),
    _hook("v1.sample.logits_processor.interface:LogitsProcessor.validate_params", "cls sampling_params"),
)
