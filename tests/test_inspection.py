"""What a checkpoint is and whether a pair fits, told from files."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_families import build

import talker
import tiny
from ddtree.drafters import loading
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.head_checkpoint import write_head
from ddtree.drafters.dflash.heads import Markov
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError, UnsupportedModelError
from ddtree.inspection import inspect, is_drafter
from ddtree.model.target import Target


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    tiny.model().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def network(tmp_path):
    return str(checkpoint.write(tmp_path / "drafter", tiny.network(tiny.model()), coupling=(0.8, 1.2)))


def facts(part):
    return dict(part.facts)


def test_a_target_is_described(tmp_path):
    report = inspect(str(talker.save(tmp_path)))
    assert report.drafter is None and report.incompatibilities is None
    found = facts(report.target)
    assert found["model"].startswith("LlamaForCausalLM")
    assert found["layers"] == "2 full attention; hidden size 32, vocabulary 260"
    assert found["context"] == "512 tokens"
    assert found["weights"].startswith("float32")
    assert found["tokenizer"] == "260 tokens, with chat template"
    assert found["draft trees"] == "can be verified"


def test_what_is_told_is_what_loading_finds(target):
    report, loaded = inspect(target).target, Target(tiny.model())
    for name in ("vocab_size", "hidden_size", "num_layers", "eos_ids"):
        assert getattr(report, name) == getattr(loaded, name)


def test_weights_are_not_loaded(target, monkeypatch):
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", None)
    assert inspect(target).target.embed.weight.device == torch.device("meta")


def test_a_drafter_is_described(network):
    report = inspect(network)
    assert report.target is None and report.incompatibilities is None
    found = facts(report.drafter)
    assert found["kind"] == "DFlash, z-lab's layout"
    assert found["block"] == "8 slots, drafts up to 7 tokens ahead"
    assert found["features"] == "outputs of target layers 0, 1 of 2"
    assert found["vocabulary"] == "all 48 tokens; mask token 47; head of the target"
    assert found["noise"] == "coupling beta 0.8, kappa 1.2"


def test_a_pair_that_fits_is_said_to_from_either_side(target, network):
    for report in (inspect(target, drafter=network), inspect(network, target=target)):
        assert report.incompatibilities == []
        assert str(report).endswith(f"{network} fits {target}")


def test_a_pair_that_does_not_fit_lists_every_reason(tmp_path, network):
    tiny.model(vocab_size=64, num_hidden_layers=3).save_pretrained(tmp_path / "other")
    report = inspect(network, target=str(tmp_path / "other"))
    assert report.incompatibilities == [
        "it was made for a target of 2 layers, this one has 3",
        "vocabulary of 48 tokens is not the target's 64",
    ]
    assert "does not fit" in str(report) and "  - vocabulary of 48" in str(report)


def test_an_exported_folder_has_a_network_and_a_table(tmp_path, target):
    checkpoint.write(tmp_path / "both" / loading.NETWORK, tiny.network(tiny.model()))
    build_table([tiny.prompt(50)], tmp_path / "both" / loading.TABLE)
    report = inspect(str(tmp_path / "both"), target=target)
    assert report.incompatibilities == [] and "contexts of up to" in facts(report.drafter)["n-grams"]


def test_a_table_of_another_vocabulary_does_not_fit(tmp_path, target):
    build_table([[90, 91, 92, 93] * 5], tmp_path / loading.TABLE)
    report = inspect(str(tmp_path), target=target)
    assert report.incompatibilities == ["the n-gram table holds token id 93, and the target has 48 tokens"]


def test_a_draft_model_is_checked_by_its_vocabulary(tmp_path, target):
    other = str(talker.save(tmp_path / "other"))
    assert inspect(target, drafter=f"draft:{target}").incompatibilities == []
    (reason,) = inspect(target, drafter=f"draft:{other}").incompatibilities
    assert "260 tokens and the target 48" in reason


def test_lookup_fits_every_target_with_trees(target):
    assert inspect(target, drafter="lookup").incompatibilities == []


def test_a_recurrent_target_takes_no_drafter(tmp_path):
    build("mamba").model.save_pretrained(tmp_path)
    report = inspect(str(tmp_path))
    assert "decoded autoregressively" in facts(report.target)["draft trees"]
    assert any(
        "cannot be verified" in reason
        for reason in inspect(str(tmp_path), drafter="lookup").incompatibilities
    )


def test_names_are_told_apart(tmp_path, target, network):
    assert [is_drafter(name) for name in (target, network, "demo", "some/model")] == [
        False,
        True,
        False,
        False,
    ]
    assert is_drafter("lookup") and is_drafter("draft:demo") and is_drafter("demo/dflash")


def test_two_drafters_or_three_parts_are_refused(network, target):
    with pytest.raises(ConfigError, match="is a drafter: name the target it is for"):
        inspect("lookup", target=network)
    with pytest.raises(ConfigError, match="a target and its drafter, not three"):
        inspect(network, target=target, drafter="lookup")


def test_damage_is_named(tmp_path, target, network):
    with pytest.raises(CheckpointError, match="/no/such/thing does not exist"):
        inspect("/no/such/thing")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        inspect(str(tmp_path))
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        inspect(target)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        inspect(target)
    hf.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        inspect(str(tmp_path / "t5"))
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        inspect(network)


def spoil(folder, change):
    path = f"{folder}/model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


KEY = "model.layers.0.self_attn.v_proj.weight"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sound_weights_of_every_family_are_found_whole(tmp_path, family):
    tiny.model(family).save_pretrained(tmp_path)
    assert facts(inspect(str(tmp_path)).target)["weights"].startswith("float32")


def test_tied_weights_that_are_stored_once_are_whole(tmp_path):
    tiny.model(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    inspect(str(tmp_path))


def test_weights_in_shards_and_of_older_kinds_are_whole(tmp_path):
    model = tiny.model()
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    inspect(str(tmp_path / "shards"))
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    inspect(str(tmp_path / "old"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_missing_tensor_is_named(tmp_path, family):
    tiny.model(family).save_pretrained(tmp_path)
    spoil(tmp_path, lambda tensors: tensors.pop(KEY))
    with pytest.raises(
        CheckpointError, match=rf"is incomplete: 1 tensors are missing \({KEY}, ...\): download"
    ):
        inspect(str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_tensor_of_another_shape_is_named(tmp_path, family):
    tiny.model(family).save_pretrained(tmp_path)
    spoil(tmp_path, lambda tensors: tensors.update({KEY: tensors[KEY][:5].clone()}))
    with pytest.raises(
        CheckpointError, match=rf"damaged: {KEY} has shape \[5, 32\], and by config.json \[16, 32\]"
    ):
        inspect(str(tmp_path))


def test_joined_experts_that_are_all_missing_are_named(tmp_path):
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    spoil(tmp_path, lambda tensors: [tensors.pop(k) for k in list(tensors) if "layers.1.mlp.experts" in k])
    with pytest.raises(
        CheckpointError, match=r"2 tensors are missing \(model.layers.1.mlp.experts.down_proj, ...\)"
    ):
        inspect(str(tmp_path))


def test_a_missing_shard_and_a_damaged_index_are_named(tmp_path):
    tiny.model().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        CheckpointError, match=f"{shard.name} is missing, and model.safetensors.index.json names it"
    ):
        inspect(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is damaged \(KeyError\)"):
        inspect(str(tmp_path))


def test_a_head_is_described_with_its_backbone(tmp_path, target):
    checkpoint.write(tmp_path / "dflash", tiny.network(tiny.model()))
    folder = str(write_head(tmp_path / "markov", Markov(tiny.VOCAB, rank=4), coupling=(0.7, 1.1)))
    assert is_drafter(folder)
    report = inspect(target, drafter=folder)
    found = facts(report.drafter)
    assert found["head"] == "markov, 0.00 M parameters (size 48, rank 4)"
    assert found["network"] == "2 layers, hidden size 32" and found["noise"] == "coupling beta 0.7, kappa 1.1"
    write_head(tmp_path / "markov", Markov(9, rank=4))
    with pytest.raises(CheckpointError, match="does not fit its backbone"):
        inspect(folder)
