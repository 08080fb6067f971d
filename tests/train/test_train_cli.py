"""`ddtree train` from a target folder to a drafter folder."""

import argparse
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree.cli import main
from ddtree.drafters.dflash.checkpoint import read
from ddtree.drafters.dflash.head_checkpoint import read_head
from ddtree.drafters.ngram_table import NgramTable
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.cli import add_arguments, run
from ddtree.train.data import Corpus, read_shard, shard_indices, shard_path, write_shard
from ddtree.train.jobs import build_heads

EOS = 5


@pytest.fixture
def target(chat_target):
    return chat_target


@pytest.fixture(scope="module")
def answers(chat_target, tmp_path_factory):
    """A work folder after the step `synthesize`."""
    work = tmp_path_factory.mktemp("answers")
    run(arguments(chat_target, work, "synthesize"))
    return work


@pytest.fixture
def work(answers, tmp_path):
    """A copy of it."""
    return shutil.copytree(answers, tmp_path / "work")


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


def test_heads_are_trained_beside_the_drafter_and_exported_with_it(target, work, tmp_path, capsys):
    out = tmp_path / "out"
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


def test_features_are_stored_where_they_are_asked_for(target, work):
    answers = work / "answers"
    run(arguments(target, work, "fit", "--features=online", "--traces=0"))
    assert not list(answers.glob("*.npy"))
    run(arguments(target, work, "features"))
    assert len(list(answers.glob("feats*.npy"))) == len(shard_indices(answers))
    online = _weights(work)
    shutil.rmtree(work / "fit")
    run(arguments(target, work, "fit", "--features=cached", "--traces=0"))
    # Features on the disk have sixteen bits, and here the target has thirty-two.
    ours, theirs = (load(data)["fc.weight"].float() for data in (online, _weights(work)))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


def _weights(work):
    return (work / "dflash" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("specs", "message"),
    [(["gru"], "gru"), (["markov:rank=x"], "rank=x is not NAME"), (["domino", "domino"], "at most once")],
)
def test_heads_that_are_none_are_named(specs, message):
    with pytest.raises(ConfigError, match=message):
        build_heads(specs, 32, 16, seed=0)


def test_the_step_heads_wants_some_named(target, work):
    with pytest.raises(ConfigError, match="name the heads"):
        run(arguments(target, work, "heads"))


def test_finished_steps_are_not_done_again(target, work):
    def times():
        folder = work / "answers"
        return {i: shard_path(folder, i).stat().st_mtime_ns for i in shard_indices(folder)}

    made = times()
    run(arguments(target, work, "synthesize"))
    assert times() == made
    run(arguments(target, work, "fit"))
    state = (work / "fit" / "fit.pt").stat().st_mtime_ns
    run(arguments(target, work, "fit"))
    assert (work / "fit" / "fit.pt").stat().st_mtime_ns == state


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


def changed(target, folder, change):
    """A copy of a target whose tensors, or whose tokenizer config, a function changes."""
    shutil.copytree(target, folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    change(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def other_weights(model, tokenizer):
    model.model.norm.weight.data += 0.5


def another_embedding_of_one_token(model, tokenizer):
    model.model.embed_tokens.weight.data[-1] *= 2


def another_normalizer(model, tokenizer):
    tokenizer.backend_tokenizer.normalizer = Lowercase()


def other_template(model, tokenizer):
    tokenizer.chat_template += " "


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_weights, "weights"),
        (another_embedding_of_one_token, "weights"),
        (another_normalizer, "tokenizer"),
        (other_template, "chat template"),
    ],
)
def test_a_work_folder_of_another_target_is_refused_with_both_names(target, work, tmp_path, change, what):
    other = changed(target, tmp_path / "other", change)
    with pytest.raises(
        ConfigError, match=rf"training of {target}, not of {other} \({what}\).*--work.*--fresh"
    ):
        run(arguments(other, work, "fit"))
    assert shard_indices(work / "answers")
    run(arguments(other, work, "synthesize", "--fresh"))
    assert json.loads((work / "target.json").read_text())["name"] == str(other)


def test_a_template_with_todays_date_stays_at_the_day_on_which_the_folder_was_begun(
    target, tmp_path, monkeypatch
):
    def dated(model, tokenizer):
        # A day in letters that the tiny vocabulary has, whatever the day is.
        day = "{{ 'bos' if strftime_now('%Y') == '2020' else '' }}"
        tokenizer.chat_template = day.replace("bos", tokenizer.decode([7])) + tokenizer.chat_template

    folder, work = changed(target, tmp_path / "dated", dated), tmp_path / "work"
    run(arguments(folder, work, "synthesize", "--tokens=100"))
    note = json.loads((work / "target.json").read_text())
    today = read_shard(shard_path(work / "answers", 0))[0]
    (work / "target.json").write_text(json.dumps(note | {"began": "2020-05-01T10:00:00+00:00"}))
    shutil.rmtree(work / "answers")
    run(arguments(folder, work, "synthesize", "--tokens=100"))
    assert read_shard(shard_path(work / "answers", 0))[0] == [7, *today]


def test_a_synthesis_is_not_taken_up_with_another_template(target, work):
    prefix, conversations = read_shard(shard_path(work / "answers", 0))
    write_shard(shard_path(work / "answers", 0), [9, *prefix], conversations)
    with pytest.raises(ConfigError, match="another chat template, or on a day"):
        run(arguments(target, work, "synthesize", "--tokens=100000"))


def test_what_changes_no_text_makes_no_other_target_but_a_dtype_does(target, work):
    config = json.loads((target / "config.json").read_text())
    other = shutil.copytree(target, work.parent / "same")
    (other / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    run(arguments(other, work, "features"))
    with pytest.raises(ConfigError, match="dtype"):
        run(arguments(other, work, "features", "--dtype=bfloat16"))


def test_fresh_goes_with_a_step_that_trains(target, work):
    for step in ("fit", "export"):
        with pytest.raises(
            ConfigError, match=f"--fresh begins a training anew, and {step} needs what is there"
        ):
            run(arguments(target, work, step, "--fresh"))
    with pytest.raises(ConfigError, match="cannot be read"):
        run(arguments(target, work, "synthesize", "--fresh", f"--prompts={work / 'nowhere'}"))
    assert shard_indices(work / "answers")


def test_a_folder_without_a_note_is_taken_to_be_of_the_target(target, work, caplog):
    (work / "target.json").unlink()
    run(arguments(target, work, "synthesize"))
    assert "does not say of which target" in caplog.text and (work / "target.json").exists()


def test_shards_of_several_days_are_not_mixed(work):
    prefix, conversations = read_shard(shard_path(work / "answers", 0))
    write_shard(shard_path(work / "answers", 90), [9, *prefix], conversations)
    with pytest.raises(CheckpointError, match=r"shard00090\.npz begins with another chat template"):
        Corpus(work / "answers")


def test_a_damaged_note_of_the_work_folder_is_named(target, work):
    (work / "target.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"target\.json is damaged .*--fresh"):
        run(arguments(target, work, "fit"))


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
