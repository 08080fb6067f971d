"""Saving the state of a fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_state(value: Any, path: Path) -> None:
    """Write in one step: after a kill the file is the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(value, partial)
    os.replace(partial, path)
