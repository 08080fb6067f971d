"""DFlash checkpoints: every published layout reads the same, and everything that does not fit is refused by name."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.config_formats import default_layer_ids, parse
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.drafters.loading import load_drafter
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target

MASK = tiny.VOCAB - 1
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model("qwen3", eos_token_id=2))


@pytest.fixture(scope="module")
def network():
    return tiny.network(tiny.model("qwen3"))


@pytest.fixture
def folder(tmp_path, network):
    return checkpoint.write(tmp_path / "drafter", network)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def change(folder, **keys):
    """Change keys of config.json; a value of ... removes one; `dflash_config` keys are given as dflash__name."""
    raw = config_of(folder)
    for key, value in keys.items():
        table, name = (raw["dflash_config"], key[8:]) if key.startswith("dflash__") else (raw, key)
        if value is ...:
            table.pop(name, None)
        else:
            table[name] = value
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def change_tensors(folder, changes):
    """Add or change tensors of the weights; a value of ... removes one."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, path)
    return folder


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}: ")
    assert "\n" not in message
    return message.removeprefix(f"{folder}: ")


def same_network(left, right):
    assert left.config == right.config
    for name, tensor in left.state_dict().items():
        assert torch.equal(tensor, right.state_dict()[name])


# Layouts


def test_what_is_written_is_read_back(tmp_path, network):
    ids = torch.tensor([5, 9, 1])
    checkpoint.write(tmp_path, network, draft_ids=ids, coupling=(0.4, 1.2))
    read = checkpoint.read(tmp_path)
    same_network(read.network(), network)
    assert torch.equal(read.draft_ids, ids)
    assert read.layout.coupling == (0.4, 1.2)
    assert (read.head, read.embedding, read.mask_embedding) == (None, None, None)
    assert read.layout.name == "z-lab"


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (6, None), "causal": (True, False)},
        {"windows": (6, 6)},
        {"causal": (True, True)},
        {"sample_from_anchor": True, "input_embedding_scale": 2.5, "attention_bias": True},
        {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "rope_theta": 1234.5},
    ],
)
def test_every_convention_survives_writing_and_reading(tmp_path, network, changes):
    net = DFlashNet(dataclasses.replace(network.config, **changes))
    same_network(checkpoint.read(checkpoint.write(tmp_path, net)).network(), net)


def test_weights_are_written_in_the_dtype_asked_for(tmp_path, network):
    checkpoint.write(tmp_path, network, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert config_of(tmp_path)["dtype"] == "bfloat16"


@pytest.mark.parametrize("changes", [{"windows": (6, 7)}, {"causal": (True, False)}])
def test_attention_that_the_layout_cannot_express_is_not_written(tmp_path, network, changes):
    net = DFlashNet(dataclasses.replace(network.config, **changes))
    with pytest.raises(ConfigError, match=r"one sliding window for all layers.*change windows and causal"):
        checkpoint.write(tmp_path, net)


def test_a_written_config_has_the_published_keys(folder):
    raw = config_of(folder)
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert (raw["model_type"], raw["block_size"], raw["num_target_layers"]) == ("qwen3", 8, 2)
    assert raw["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    assert (raw["rope_theta"], raw["rope_scaling"], raw["tie_word_embeddings"]) == (1e6, None, False)


def test_both_placements_of_the_drafters_keys_read_the_same(folder):
    before = checkpoint.read(folder).config
    change(folder, block_size=..., num_target_layers=..., dflash__block_size=8, dflash__num_target_layers=2)
    assert checkpoint.read(folder).config == before
    own = config_of(folder)["dflash_config"]
    change(folder, dflash_config=..., **own)
    assert checkpoint.read(folder).config == before


def test_both_spellings_of_rope_theta_read_the_same(folder):
    """Rapid-MLX#1007, dflash-mlx PR#49."""
    before = checkpoint.read(folder).config
    change(
        folder, rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    assert checkpoint.read(folder).config == before


def test_missing_layer_ids_follow_the_published_formula(folder, network):
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(24, 5) == (1, 6, 11, 16, 21)
    assert default_layer_ids(32, 5) == (1, 8, 15, 22, 29)
    assert default_layer_ids(30, 1) == (15,)
    change(folder, dflash__target_layer_ids=..., num_target_layers=9)
    assert checkpoint.read(folder).config.target_layer_ids == (1, 6)
    change(folder, num_target_layers=3)
    assert "2 feature layers do not fit a target of 3 layers: name them in target_layer_ids" in refusal(
        folder
    )


def speculators(raw):
    """The same drafter's config.json as speculators writes it."""
    backbone = copy.deepcopy(raw)
    own = backbone.pop("dflash_config")
    for key in ("architectures", "block_size", "num_target_layers", "rope_theta"):
        backbone.pop(key)
    backbone["rope_parameters"] = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "t", "architectures": []}},
        "transformer_layer_config": backbone,
        "block_size": raw["block_size"],
        "draft_vocab_size": raw["vocab_size"],
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "projector_type": "dflash",
        "shift_label": False,
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
    }


def test_speculators_layout_counts_feature_layers_from_one(folder, network):
    """vllm PR#42704: one layer off is silent."""
    (folder / "config.json").write_text(json.dumps(speculators(config_of(folder))))
    read = checkpoint.read(folder)
    assert read.layout.name == "speculators"
    assert read.config == dataclasses.replace(network.config, num_target_layers=None)


def test_speculators_draft_vocabulary_is_read_from_offsets(folder):
    raw = {**speculators(config_of(folder)), "draft_vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(raw))
    head = torch.randn(4, 32)

    tensors = {
        "d2t": torch.tensor([3, 3, 10, 40]),
        "t2d": torch.zeros(tiny.VOCAB, dtype=torch.bool),
        "lm_head.weight": head,
        "embed_tokens.weight": torch.zeros(tiny.VOCAB, 32),
        "verifier_norm.weight": torch.ones(32),
    }
    read = checkpoint.read(change_tensors(folder, tensors))
    assert read.draft_ids.tolist() == [3, 4, 12, 43]
    assert torch.equal(read.head, head)
    assert read.embedding.shape == (tiny.VOCAB, 32)


def test_speculators_sliding_layers_are_causal_unless_it_says_otherwise(folder):
    change(folder, **SLIDING)
    raw = speculators(config_of(folder))
    assert parse(raw).config.causal == (True, False)
    assert parse({**raw, "sliding_window_non_causal": True}).config.causal == ()
    assert parse(raw).config.windows == (6, None)


def test_causality_is_decided_in_the_published_order(folder):
    change(folder, **SLIDING)
    raw = config_of(folder)
    assert parse(raw).config.causal == (True, False)
    inner = {**raw, "dflash_config": {**raw["dflash_config"], "causal": False}}
    assert parse(inner).config.causal == ()
    assert parse({**inner, "is_causal": True}).config.causal == (True, True)
    forced = {**raw, "layer_types": ["full_attention"] * 2}
    forced["dflash_config"] = {**raw["dflash_config"], "use_swa": True, "swa_window_size": 9}
    assert parse(forced).config.windows == (9, 9)
    assert parse(forced).config.causal == ()


def test_other_tensor_names_and_fused_projections_are_understood(folder, network):
    tensors = load_file(folder / "model.safetensors")

    def fuse(place, names):
        return torch.cat([tensors.pop(f"layers.1.{place}.{name}_proj.weight") for name in names])

    tensors["layers.1.self_attn.qkv_proj.weight"] = fuse("self_attn", "qkv")
    tensors["layers.1.mlp.gate_up_proj.weight"] = fuse("mlp", ("gate", "up"))
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    renamed = {f"model.{name.replace('layers.0.', 'midlayer.')}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    same_network(checkpoint.read(folder).network(), network)


def test_sharded_and_pickled_weights_are_read(folder, network):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same_network(checkpoint.read(folder).network(), network)
    (folder / "b.safetensors").unlink()
    assert refusal(folder) == "b.safetensors is missing: download it again, or name another drafter"
    (folder / "model.safetensors.index.json").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    same_network(checkpoint.read(folder).network(), network)


def test_pickled_weights_run_no_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is damaged" in refusal(folder)


def test_a_mask_embedding_beside_the_weights_is_read(folder):
    slot = torch.randn(32)
    torch.save(slot, folder / "mask_embedding.pt")
    assert torch.equal(checkpoint.read(folder).mask_embedding, slot)
    torch.save({"embedding": slot, "mask_token_id": MASK}, folder / "mask_embedding.pt")
    assert torch.equal(checkpoint.read(folder).mask_embedding, slot)
    torch.save({"embedding": slot, "mask_token_id": 3}, folder / "mask_embedding.pt")
    assert f"mask_embedding.pt has 32 values for token 3, not 32 for mask token {MASK}" in refusal(folder)
    (folder / "mask_embedding.pt").write_bytes(b"no")
    assert "mask_embedding.pt is damaged" in refusal(folder)


# Loading for a target


def test_a_fitting_drafter_loads(folder, target):
    drafter = load_drafter(folder, target)
    assert (drafter.name, drafter.feature_layers, drafter.max_depth) == ("dflash", (0, 1), 7)
    assert drafter.coupling == (0.0, 1.0)


def test_copies_of_the_targets_weights_are_not_kept(folder, target):
    copies = {"embed_tokens.weight": target.embed.weight, "lm_head.weight": target.head.weight}
    copies = {name: weight.detach().clone() for name, weight in copies.items()}
    drafter = load_drafter(change_tensors(folder, copies), target)
    assert drafter.backbone._embedding is target.embed.weight
    assert drafter.backbone._head is target.head


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_target_layers": 36}, "it was made for a target of 36 layers, this one has 2"),
        ({"vocab_size": 50}, "vocabulary of 50 tokens is not the target's 48"),
        ({"dflash__mask_token_id": 60}, "mask token 60 is outside the target's embedding of 48 rows"),
        ({"dflash__mask_token_id": 2}, "mask token 2 is an end-of-sequence token of the target"),
        ({"dflash__mask_token_id": 0}, "mask token 0 is the target's padding token"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_the_reason(folder, target, changes, reason):
    class Padded:
        pad_token_id = 0

    pair = copy.copy(target)
    pair.tokenizer = Padded()
    with pytest.raises(CheckpointError) as caught:
        load_drafter(change(folder, **changes), pair)
    assert (
        str(caught.value)
        == f"{folder} does not fit the target: {reason}. Name a drafter made for this target"
    )


def test_all_reasons_are_named_at_once(tmp_path, target, network):
    config = dataclasses.replace(
        network.config, hidden_size=16, target_layer_ids=(1, 4), num_target_layers=None, vocab_size=50
    )
    written = checkpoint.write(tmp_path, DFlashNet(config))
    assert checkpoint.incompatibilities(checkpoint.read(written), target) == [
        "hidden size 16 is not the target's 32, its features' and head's",
        "feature layers [4] are beyond the target's layers 0..1",
        "vocabulary of 50 tokens is not the target's 48",
    ]


# Refusals


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({"dflash__projector_type": "domino"}, "Domino drafter ('domino')"),
        ({"dflash__projector_type": "causal_v5"}, "Domino drafter ('causal_v5')"),
        ({"dflash__projector_type": "dspark"}, "DSpark drafter ('dspark')"),
        ({"dflash__markov_rank": 256}, "DSpark drafter (markov_rank=256)"),
        ({"dflash__selector_rank": 64}, "DFlash2 drafter (selector_rank=64)"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 drafter ('DFlash2DraftModel')"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 drafter ('LlamaForCausalLMEagle3')"),
        ({"speculators_model_type": "mtp"}, "MTP drafter ('mtp')"),
    ],
)
def test_successors_of_dflash_are_refused_by_name(folder, changes, head):
    """Domino-Tree: a Domino checkpoint run as DFlash accepts nothing, and nothing fails."""
    assert refusal(change(folder, **changes)) == (
        f"this is a {head}, whose head is not supported: run as plain DFlash it would accept almost nothing; "
        "use a DFlash checkpoint"
    )


@pytest.mark.parametrize(
    ("tensor", "head"),
    [
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("logit_head.embed_proj.0.weight", "Domino"),
        ("markov_head.w1.weight", "DSpark"),
        ("confidence_head.weight", "DSpark"),
        ("candidate_selector.hidden_projection.weight", "DFlash2"),
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
    ],
)
def test_tensors_of_other_heads_are_refused_by_name(folder, tensor, head):
    change_tensors(folder, {tensor: torch.zeros(2, 2)})
    assert refusal(folder).startswith(f"tensor {tensor} belongs to a {head} head, which is not supported")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dflash__projector_type": "novel"}, "projector_type 'novel' is unknown"),
        ({"dflash__shift_label": True}, "shift_label=True is not supported"),
        ({"dflash__attention_sink_bias": True}, "attention_sink_bias=True is not supported"),
        ({"is_neox_style": False}, "is_neox_style=False is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: DFlash layers use silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "RoPE scaling 'llama3' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "RoPE that differs between layers"),
        (
            {"rope_parameters": {"mrope_section": [1, 2, 1]}},
            "multimodal RoPE (mrope_section) is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_theta": ...}, "config.json has no rope_theta, at the top or in rope_parameters: add it"),
        ({"dflash__mask_token_id": ...}, "config.json has no mask_token_id, at the top or in dflash_config"),
        ({"dflash__mask_token_id": -1}, "mask_token_id=-1 must be a whole number from 0 up"),
        ({"block_size": 1}, "block_size=1 must be a whole number from 2 up"),
        ({"block_size": "16"}, "block_size='16' must be a whole number from 2 up"),
        ({"hidden_size": ...}, "config.json has no hidden_size: add it"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is beyond 256: config.json is damaged"),
        ({"dflash__draft_vocabulary": 3}, "draft_vocabulary=3 must name a file"),
        ({"hidden_size": 0}, "hidden_size=0 must be a whole number from 1 up"),
        ({"num_key_value_heads": 3}, "4 attention heads with 3 key heads of size 8 do not fit together"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny' must be a number"),
        ({"target_hidden_size": 64}, "target_hidden_size=64 is not hidden_size=32"),
        ({"dflash__target_layer_ids": []}, "target_layer_ids=[] is not a list of layer numbers from 0 up"),
        ({"dflash__target_layer_ids": [0, -1]}, "target_layer_ids=[0, -1] is not a list of layer numbers"),
        ({"dflash__target_layer_ids": [0, 2]}, "target_layer_ids=[0, 2] names layers beyond the target's 2"),
        (
            {"dflash__target_layer_ids": ..., "num_target_layers": ...},
            "config.json has neither target_layer_ids nor num_target_layers: one of them is needed",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention'] must name full_attention or"),
        (
            {"layer_types": ["linear_attention"] * 2},
            "layer_types=['linear_attention', 'linear_attention'] must",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "the drafter has sliding layers, but its window is None",
        ),
        ({"dflash_config": 3}, "dflash_config=3 must be a table of settings"),
        (
            {"dflash__coupling": {"beta": -1}},
            "coupling {'beta': -1} must have beta from 0 up and kappa above 0",
        ),
        (
            {"draft_vocab_size": 7},
            "draft_vocab_size=7 differs from vocab_size=48, but there is no d2t tensor",
        ),
        ({"dflash__draft_vocabulary": "gone.json"}, "gone.json is missing"),
        (
            {"architectures": ["LlamaForCausalLM"], "dflash_config": ...},
            "this is no DFlash drafter (architectures ['LlamaForCausalLM'])",
        ),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_name(folder, changes, reason):
    assert refusal(change(folder, **changes)).startswith(reason)


JUNK = [None, True, 0, -1, 1.5, 10**30, "x", [], [None], [[1]], {}, {"a": 1}]


def test_no_value_of_any_key_ends_in_another_error(folder):
    change(folder, **SLIDING)
    raw = config_of(folder)
    own = dict.fromkeys([*raw["dflash_config"], "coupling", "draft_vocabulary", "projector_type", "causal"])
    top = dict.fromkeys([*raw, "rope_parameters", "draft_vocab_size", "is_causal", "max_window_layers"])
    cases = [{**raw, key: junk} for key in top for junk in JUNK]
    cases += [{**raw, "dflash_config": {**raw["dflash_config"], key: junk}} for key in own for junk in JUNK]
    cases += [{**speculators(raw), key: junk} for key in speculators(raw) for junk in JUNK]
    refused = 0
    for case in cases:
        try:
            parse(case)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 200 < refused < len(cases)


LAYER = [name for name in tiny.network(tiny.model("qwen3")).state_dict() if name.startswith("layers.1.")]
BYTES = torch.ones(32, dtype=torch.int8)
OUTSIDE = "the draft vocabulary names tokens twice or outside 0..47"


@pytest.mark.parametrize(
    ("changes", "tensors", "reason"),
    [
        (
            {},
            {"extra.weight": torch.zeros(1), "norm.weight": ..., "layers.0.mlp.up_proj.weight": ...},
            "unknown tensors extra.weight and missing tensors layers.0.mlp.up_proj.weight, norm.weight",
        ),
        (
            {},
            dict.fromkeys(LAYER, ...),
            f"missing tensors {', '.join(sorted(LAYER)[:4])} and {len(LAYER) - 4} more",
        ),
        (
            {"num_target_layers": 6, "dflash__target_layer_ids": [0, 1, 4]},
            {},
            "fc.weight is [32, 64], but 3 feature layers of hidden size 32 need [32, 96]: config.json and",
        ),
        ({"intermediate_size": 40}, {}, "tensor layers.0.mlp.gate_proj.weight is [48, 32], not [40, 32]"),
        (
            {},
            {"norm.weight": BYTES},
            "tensor norm.weight is torch.int8: quantized drafters are not supported",
        ),
        (
            {},
            {"lm_head.weight": torch.zeros(9, 32)},
            "tensor lm_head.weight is [9, 32], not [48, 32] as config",
        ),
        ({"draft_vocab_size": 3}, {"d2t": torch.tensor([0, 0, 46])}, OUTSIDE),
        ({"draft_vocab_size": 3}, {"d2t": torch.tensor([0, -1, 0])}, OUTSIDE),
        ({"draft_vocab_size": 3}, {"d2t": torch.tensor([-1, 0, 0])}, OUTSIDE),
        (
            {"draft_vocab_size": 4},
            {"d2t": torch.tensor([0, 0, 0])},
            "d2t has 3 entries, not draft_vocab_size=4",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(folder, changes, tensors, reason):
    assert refusal(change_tensors(change(folder, **changes), tensors)).startswith(reason)


def test_a_damaged_vocabulary_file_is_refused(folder):
    change(folder, dflash__draft_vocabulary="draft_vocabulary.json")
    (folder / "draft_vocabulary.json").write_text('["a"]')
    assert refusal(folder).startswith("draft_vocabulary.json is damaged (no list of token ids)")


def test_missing_and_damaged_files_are_refused_by_name(folder, tmp_path):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert refusal(folder).startswith("model.safetensors is damaged (")
    weights.unlink()
    assert refusal(folder).startswith("it has no weights (model.safetensors or pytorch_model.bin)")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert refusal(folder).startswith("model.safetensors.index.json is damaged (no weight_map)")
    (folder / "config.json").write_text("{")
    assert refusal(folder).startswith("config.json is damaged (")
    (folder / "config.json").write_text("[]")
    assert refusal(folder).startswith("config.json is damaged (no table of settings)")
    (folder / "config.json").unlink()
    assert refusal(folder) == "config.json is missing: download it again, or name another drafter"


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    for name in (tmp_path / "nowhere", "./nowhere", "nowhere"):
        with pytest.raises(
            CheckpointError, match="nowhere does not exist: name the drafter's folder, or a Hugging"
        ):
            checkpoint.read(name)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file is a file: name the drafter's folder"):
        checkpoint.read(file)


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch):
    import huggingface_hub

    def fails(*_, **__):
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("some/drafter")
    assert str(caught.value) == (
        "some/drafter is no local folder, and the Hugging Face hub does not give it (no route to the hub): name the "
        "drafter's folder"
    )


def test_a_hub_id_is_downloaded(monkeypatch, folder, network):
    import huggingface_hub

    asked = []

    def gives(name, allow_patterns):
        asked.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gives)
    same_network(checkpoint.read("some/drafter").network(), network)
    assert asked == ["some/drafter"]
