"""Loading causal LMs: devices, dtypes, and every broken checkpoint named."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import talker
import tiny
from ddtree.drafters.dflash import checkpoint
from ddtree.errors import CheckpointError, ConfigError, UnsupportedModelError
from ddtree.model import pretrained


@pytest.fixture
def folder(tmp_path):
    return talker.save(tmp_path / "model")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your internet connection.")

    for kind in (hf.AutoConfig, hf.AutoTokenizer, hf.AutoModelForCausalLM):
        own = kind.from_pretrained

        def guarded(place, *args, _own=own, **kwargs):
            return _own(place, *args, **kwargs) if Path(place).is_absolute() else refuse()

        monkeypatch.setattr(kind, "from_pretrained", guarded)


def test_model_and_tokenizer_come_in_the_checkpoints_dtype_or_the_one_asked_for(folder):
    model, tokenizer = pretrained.load_causal_lm(folder, "cpu")
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.decode(tokenizer.encode("é")) == "<s>é"
    for dtype in ("bfloat16", torch.bfloat16):
        assert pretrained.load_causal_lm(folder, "cpu", dtype)[0].dtype == torch.bfloat16


def test_a_folder_without_tokenizer_files_gives_none(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    assert pretrained.load_causal_lm(tmp_path, "cpu")[1] is None


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False, raising=False)
    assert pretrained.choose_device() == torch.device("cpu")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    assert pretrained.choose_device() == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pretrained.choose_device() == torch.device("cuda")


@pytest.mark.parametrize("name", ["cuda:99", "mps", "xpu"])
def test_a_device_that_is_not_there_is_named(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False, raising=False)
    with pytest.raises(ConfigError, match=f"device '{name}' is not available here: choose cpu"):
        pretrained.choose_device(name)


def test_unknown_devices_and_dtypes_are_named():
    with pytest.raises(ConfigError, match="unknown device 'toaster'"):
        pretrained.choose_device("toaster")
    for dtype in ("float8", torch.int8):
        with pytest.raises(ConfigError, match=r"unknown dtype .*: choose auto, float32, bfloat16, float16"):
            pretrained.choose_dtype(dtype)


def weights(folder, change):
    path = folder / "model.safetensors"
    if isinstance(change, bytes):
        path.write_bytes(change)
        return
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


KEY = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded .*JSON.*download it again"),
        (lambda f: (f / "config.json").write_text("{}"), "cannot be loaded .*model_type"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded .*model.safetensors"),
        (lambda f: weights(f, b"garbage"), "cannot be loaded .*header"),
        (lambda f: weights(f, (f / "model.safetensors").read_bytes()[:-99]), "cannot be loaded .*incomplete"),
        (lambda f: weights(f, lambda t: t.pop(KEY)), f"is incomplete: 1 tensors are missing .{KEY}"),
        (lambda f: weights(f, lambda t: t.update({KEY: t[KEY][:5].clone()})), "cannot be loaded .*mismatch"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer of .* cannot be loaded"),
    ],
    ids=["no config", "bad json", "no type", "no weights", "garbage", "cut", "missing", "shape", "tokenizer"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_in_one_line(folder, spoil, message):
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        pretrained.load_causal_lm(folder, "cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ('{"base_model_name_or_path": "some/base"}', "some/base"),
        ("{}", "a model that its adapter_config.json"),
    ],
)
def test_an_adapter_is_called_one_and_its_model_named(tmp_path, config, base):
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"is an adapter, of {base}.*merge"):
        pretrained.load_causal_lm(tmp_path, "cpu")


def test_remote_code_is_not_called_a_damaged_download(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "something_new"}))
    with pytest.raises(CheckpointError, match="runs no code of checkpoints; load it with transformers"):
        pretrained.load_causal_lm(folder, "cpu")


def test_a_missing_package_is_to_be_installed(folder, monkeypatch):
    def missing(*_, **__):
        raise ImportError("compressed-tensors is not installed, please `pip install compressed-tensors`")

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(CheckpointError, match="install what is missing") as caught:
        pretrained.load_causal_lm(folder, "cpu")
    assert "download" not in str(caught.value)


def test_paths_that_are_no_folder_are_named(folder):
    with pytest.raises(CheckpointError, match="/no/where/at/all does not exist: name a checkpoint's folder"):
        pretrained.load_causal_lm("/no/where/at/all")
    with pytest.raises(CheckpointError, match=r"config\.json is a file: name a checkpoint's folder"):
        pretrained.load_causal_lm(folder / "config.json")


def test_a_hub_id_that_cannot_be_reached_gives_one_line():
    with pytest.raises(CheckpointError) as caught:
        pretrained.load_causal_lm("some/model")
    assert str(caught.value) == (
        "some/model is no local folder, and the Hugging Face hub does not give it (We couldn't connect to "
        "'https://huggingface.co'): check the name and the connection, or name a local folder"
    )


def test_models_of_other_kinds_are_refused_by_name(tmp_path):
    hf.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"is no causal language model \(t5\): name one"):
        pretrained.read_config(tmp_path / "t5")
    hf.ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedModelError, match=r"is no causal language model \(vit\)"):
        pretrained.read_config(tmp_path / "vit")


def test_a_drafter_given_as_target_is_told_apart(tmp_path):
    checkpoint.write(tmp_path, tiny.network(tiny.model()))
    with pytest.raises(CheckpointError, match=f'is a DFlash drafter, not a target: .* drafter="{tmp_path}"'):
        pretrained.load_causal_lm(tmp_path)


def test_code_in_a_checkpoint_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        pretrained.load_causal_lm(folder)
