"""What a measurement was made on, in words."""

from __future__ import annotations

import os
import platform
from datetime import date
from typing import Any

import torch
import transformers


def describe(target: Any, drafter: Any = None) -> dict[str, Any]:
    """Device, cores, threads, libraries, dtype, models and today's date, as plain JSON values.

    Args:
        target: a `Target`.
        drafter: what drafts for it, or None.
    """
    config = target.config
    found = {
        "device": device_name(target.device),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": f"{config.model_type}, {target.num_layers} layers of {target.hidden_size}, "
        f"{target.vocab_size} tokens",
        "drafter": "none" if drafter is None else drafter.name,
        "date": date.today().isoformat(),
    }
    if target.device.type == "cuda":
        found["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
    return found


def device_name(device: torch.device) -> str:
    """The name of a processor or an accelerator, as its maker writes it where that can be found."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return _cpu_name()
    return f"{device.type} of {_cpu_name()}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            fields = (line.partition(":") for line in lines)
            named = next(value.strip() for key, _, value in fields if key.strip() == "model name")
    except (OSError, StopIteration):
        named = platform.processor()
    return named or platform.machine()
