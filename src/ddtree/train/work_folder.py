"""The work folder of `ddtree train`: which target it was made with, and since when.

All that lies in it (answers, features, states of a fit, drafters) is of one target, tokenizer and chat template, so a
folder of another one is refused. A template may write today's date into every text; steps that are taken up on a later
day render it as of the day on which the folder was begun.
"""

from __future__ import annotations

import json
import logging
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters.dflash.heads import KINDS
from ddtree.errors import CheckpointError, ConfigError
from ddtree.policy import cache
from ddtree.storage import write_json
from ddtree.train.export import DRAFTER, EVALUATION, FIT, HEADS, NGRAMS, SUMMARY

_log = logging.getLogger(__name__)
ANSWERS = "answers"
_NOTE = "target.json"
_CONTENTS = (ANSWERS, FIT, HEADS, DRAFTER, *KINDS, NGRAMS, SUMMARY, EVALUATION, _NOTE)
# Parts of a config that neither texts nor features depend on.
_IDLE = cache.IDLE | {"use_cache", "pad_token_id"}
# Parts of the note that decide about the contents, and what to call them.
_PARTS = {
    "target": "model type",
    "target_config": "config",
    "dtype": "dtype",
    "weights": "weights",
    "tokenizer": "tokenizer",
    "chat_template": "chat template",
}


def prepare(folder: Path, name: str, made_with: dict[str, str], fresh: bool = False) -> None:
    """Note in a work folder which target its contents are of.

    Args:
        folder: made where it is missing.
        name: of the target, as the user gives it.
        made_with: what `describe` returns for the target.
        fresh: delete what an earlier training left there.

    Raises:
        ConfigError: the folder's contents are of another target.
        CheckpointError: its note is damaged.
    """
    if fresh:
        for content in _CONTENTS:
            path = folder / content
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    known = _read(folder)
    if known is None:
        if (folder / ANSWERS).exists():
            _log.warning("%s does not say of which target it is: taken to be of %s", folder, name)
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        write_json(folder / _NOTE, {"name": name, "began": began, **made_with})
        return
    different = [what for part, what in _PARTS.items() if known.get(part) != made_with[part]]
    if different:
        raise ConfigError(
            f"{folder} holds the training of {known['name']}, not of {name} ({', '.join(different)}): name another "
            "folder with --work, or begin anew with --fresh"
        )


def began(folder: Path) -> datetime | None:
    """Return when a work folder was begun; None for one without a note."""
    known = _read(folder)
    return None if known is None else datetime.fromisoformat(known["began"])


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / _NOTE
    if not path.exists():
        return None
    try:
        known: dict[str, Any] = json.loads(path.read_bytes())
        datetime.fromisoformat(known["began"])
        return known | {"name": str(known["name"])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): begin anew with --fresh") from error


def describe(model: Any, tokenizer: Any) -> dict[str, str]:
    """Return what tells a transformers model, its tokenizer and its chat template from others."""
    config = model.config.get_text_config()
    return {
        "target": config.model_type,
        "dtype": str(model.dtype),
        "target_config": cache.digest({k: v for k, v in config.to_diff_dict().items() if k not in _IDLE}),
        "weights": cache.digest([_checksum(name, weight) for name, weight in model.named_parameters()]),
        "tokenizer": cache.digest(_words(tokenizer)),
        "chat_template": cache.digest(getattr(tokenizer, "chat_template", None)),
    }


def _words(tokenizer: Any) -> Any:
    """Return all that a tokenizer is made of; of one in Python its vocabulary."""
    if fast := getattr(tokenizer, "backend_tokenizer", None):
        return fast.to_str()
    return [] if tokenizer is None else sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])


def _checksum(name: str, weight: Tensor) -> list[Any]:
    """Return a weight's name, shape and the sum of its absolute values."""
    try:
        total = float(torch.linalg.vector_norm(weight.detach(), ord=1, dtype=torch.float64))
    except (RuntimeError, TypeError, NotImplementedError):  # quantized weights
        total = 0.0
    return [name, *weight.shape, f"{total:.7e}"]
