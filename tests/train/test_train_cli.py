"""`ddtree train` from a target folder to a drafter folder."""

import argparse
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import tiny
from ddtree.cli import main
from ddtree.drafters.dflash.checkpoint import read
from ddtree.drafters.dflash.head_checkpoint import read_head
from ddtree.drafters.ngram_table import NgramTable
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.cli import add_arguments, run
from ddtree.train.data import shard_indices, shard_path
from ddtree.train.synthesize import Template

EOS = 5
CHAT = (
    "{% for m in messages %}<s> w7 {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}w9 w10{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    words = {"<s>": 1, "<e>": EOS, "<mask>": 46, "<unused>": 47} | {
        f"w{i}": i for i in range(tiny.VOCAB) if i not in (1, EOS, 46, 47)
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", bos_token="<s>")
    wrapped.chat_template = CHAT
    wrapped.save_pretrained(folder)
    model = tiny.model(num_hidden_layers=4, eos_token_id=EOS, initializer_range=0.15)
    model.save_pretrained(folder)
    return folder


def arguments(target, work, *more):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = [
        "--tokens=300", "--rows=12", "--max-answer=30", "--steps=6", "--draft-vocabulary=16", "--block=4",
        "--budgets", "4", "8",
    ]  # fmt: skip
    return parser.parse_args([*more, f"--target={target}", f"--work={work}", *options])


def test_all_steps_make_a_drafter_that_reads_back(target, tmp_path, capsys):
    work, out = tmp_path / "work", tmp_path / "out"
    assert run(arguments(target, work, "all", f"--out={out}")) == 0
    checkpoint = read(out / "dflash")
    assert checkpoint.config.block_size == 4
    assert len(checkpoint.draft_ids) == 16
    assert EOS in checkpoint.draft_ids
    summary = json.loads((work / "summary.json").read_text())
    beta, kappa = checkpoint.layout.coupling
    assert summary["recipe"]["coupling_beta"] == round(beta, 4)
    assert kappa > 0
    fitted = torch.load(work / "fit" / "dflash.pt", weights_only=True)
    for name, tensor in checkpoint.network().state_dict().items():
        assert torch.equal(tensor, fitted[name].to(torch.bfloat16))
    assert NgramTable.load(out / "ngrams.safetensors").max_order == 5
    card = (out / "dflash" / "README.md").read_text()
    assert f"{summary['data']['answer_tokens']:,} tokens of answers by the target; user turns sampled" in card
    assert re.search(r"\| held-out \| 1 \| [01] \| dflash \+ n-grams \|", card)
    assert re.search("held-out, T=[01], dflash: chain", capsys.readouterr().out)


def test_heads_are_trained_beside_the_drafter_and_exported_with_it(target, tmp_path, capsys):
    work, out = tmp_path / "work", tmp_path / "out"
    run(arguments(target, work, "synthesize"))
    run(arguments(target, work, "fit", "--prefix-share=0.5", "--features=online", "--traces=0"))
    backbone = _weights(work)
    heads = [
        "--heads",
        "markov:rank=4,confidence=32",
        "treeflash:intermediate_size=8",
        "domino",
        "--head-steps=3",
    ]
    for step in ("heads", "evaluate", "export"):
        run(arguments(target, work, step, f"--out={out}", *heads))
    assert _weights(work) == backbone
    said = capsys.readouterr().out
    for kind in ("markov", "treeflash", "domino"):
        head, found, _ = read_head(out / kind)
        assert head.kind == kind
        assert found == (out / "dflash").resolve()
        assert f"{kind}: chain" in said
    assert read_head(out / "markov")[0].config()["rank"] == 4
    assert "d2sd: chain" in said
    assert "| treeflash | 0.0 M | kl |" in (out / "dflash" / "README.md").read_text()
    assert run(arguments(target, work, "plot")) == 0
    assert {path.name for path in work.glob("*.png")} == {"fit.png", "heads.png"}
    summary = json.loads((work / "heads" / "summary.json").read_text())
    assert summary["heads"]["domino"]["loss"] == "ce"
    assert summary["heads"]["markov"]["loss"] == "kl"


def test_features_are_stored_where_they_are_asked_for(target, tmp_path):
    answers = tmp_path / "answers"
    run(arguments(target, tmp_path, "synthesize"))
    run(arguments(target, tmp_path, "fit", "--features=online", "--traces=0"))
    assert not list(answers.glob("*.npy"))
    run(arguments(target, tmp_path, "features"))
    assert len(list(answers.glob("feats*.npy"))) == len(shard_indices(answers))
    online = _weights(tmp_path)
    shutil.rmtree(tmp_path / "fit")
    run(arguments(target, tmp_path, "fit", "--features=cached", "--traces=0"))
    # Features on the disk have sixteen bits, and here the target has thirty-two.
    ours, theirs = (load(data)["fc.weight"].float() for data in (online, _weights(tmp_path)))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


def _weights(work):
    return (work / "dflash" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("heads", "message"),
    [([], "name the heads"), (["gru"], "gru"), (["markov:rank=x"], "rank=x is not NAME")],
)
def test_heads_that_are_none_are_named(target, tmp_path, heads, message):
    work = tmp_path / "work"
    run(arguments(target, work, "synthesize"))
    run(arguments(target, work, "fit", "--steps=1"))
    with pytest.raises(ConfigError, match=message):
        run(arguments(target, work, "heads", *(["--heads", *heads] if heads else [])))


def test_finished_steps_are_not_done_again(target, tmp_path):
    def times():
        folder = tmp_path / "answers"
        return {i: shard_path(folder, i).stat().st_mtime_ns for i in shard_indices(folder)}

    run(arguments(target, tmp_path, "synthesize"))
    made = times()
    run(arguments(target, tmp_path, "synthesize"))
    assert times() == made
    run(arguments(target, tmp_path, "fit"))
    state = (tmp_path / "fit" / "fit.pt").stat().st_mtime_ns
    run(arguments(target, tmp_path, "fit"))
    assert (tmp_path / "fit" / "fit.pt").stat().st_mtime_ns == state


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("plot", "run `ddtree train fit` first"),
        ("fit", "run `ddtree train synthesize` first"),
        ("export", "run `ddtree train fit` first"),
    ],
)
def test_a_step_without_the_one_before_says_which(target, tmp_path, step, message):
    with pytest.raises(CheckpointError, match=message):
        run(arguments(target, tmp_path, step))


def test_a_target_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist: name a checkpoint's folder"):
        run(arguments(tmp_path / "nowhere", tmp_path, "synthesize"))


def test_a_damaged_target_is_one_line(target, tmp_path, capsys):
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"garbage")
    assert main(["train", "synthesize", "--target", str(folder), "--work", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ddtree: error: {folder} cannot be loaded (") and error.count("\n") == 1


def test_a_device_that_is_not_there_is_named(target, tmp_path):
    with pytest.raises(ConfigError, match="unknown device 'toaster'"):
        run(arguments(target, tmp_path, "synthesize", "--device=toaster"))


def test_a_template_is_cut_around_the_users_text(target):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    assert Template.of(tokenizer) == Template(prefix=[1, 7], middle=[EOS, 9, 10])
