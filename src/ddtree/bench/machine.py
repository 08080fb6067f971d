"""The machine and the versions that figures belong to, in words."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch
import transformers

import ddtree
from ddtree.policy.machine import device_name


def describe(device: torch.device) -> dict[str, Any]:
    """Plain JSON values: processor, cores this process may use, threads, accelerator, system."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "processor": device_name(torch.device("cpu")),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cpu":
        found["accelerator"] = device_name(device)
    return found


def versions() -> dict[str, str]:
    return {
        "ddtree": ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
