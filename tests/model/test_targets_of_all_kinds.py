"""Models of other families: their windows, masks and layers are found by running them, not by their names or flags."""

import warnings

import pytest
import torch
from tiny_families import VOCAB, build
from torch import nn
from transformers.models.llama import modeling_llama

import ddtree
import tiny
from ddtree.bench.near_ties import verdict
from ddtree.errors import UnsupportedModelError
from ddtree.model.target import Target
from ddtree.sampling.params import SamplingParams
from scripted import Scripted

OPTIONS = {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 24, "ignore_eos": True}


def own_text(model, prompt):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=OPTIONS["max_tokens"],
        repetition_penalty=OPTIONS["repetition_penalty"],
    )
    return out[0, len(prompt) :].tolist()


def drafted_text(model, prompt, expected):
    """The text with drafts that hold the expected one among wrong siblings."""
    drafter = Scripted([prompt + expected], reach=14, vocab=VOCAB)
    with ddtree.load(model, drafter=drafter) as loaded:
        result = loaded.generate(prompt, method="tree", budget=28, **OPTIONS)
    assert result.stats.tau > 2
    return list(result.token_ids)


@pytest.mark.parametrize("length", [6, 30])
@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe"])
def test_a_window_that_lives_in_the_models_own_mask_alone_is_obeyed(family, length):
    tiny_model = build(family)
    assert tiny_model.window_felt > 0.1
    prompt = torch.randint(2, VOCAB - 4, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = own_text(tiny_model.model, prompt)
    assert drafted_text(tiny_model.model, prompt, expected) == expected
    with ddtree.load(tiny_model.model, "none") as plain:
        assert plain.generate(prompt, **OPTIONS).token_ids == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bert", {}), ("biogpt", {}), ("dbrx", {}), ("granitemoehybrid", {"start": {"layer_types": ["attention"] * 32}}),
     ("modernbert-decoder", {}), ("gemma4_text", {"use_bidirectional_attention": "vision"})],
)  # fmt: skip
def test_families_qualify_by_what_they_do_and_not_by_their_flags(family, changes):
    model = build(family, **changes).model
    prompt = list(range(3, 33))
    expected = own_text(model, prompt)
    assert drafted_text(model, prompt, expected) == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [("doge", {}, "mask of its own"), ("moshi", {}, "window in its cache alone"),
     ("gpt_neo", {}, "attention interface"),
     ("minimax", {"start": {"layer_types": ["full_attention"] * 32}}, "cannot take a draft tree")],
)  # fmt: skip
def test_families_that_cannot_take_a_tree_are_decoded_plainly(family, changes, message):
    model = build(family, **changes).model
    with pytest.raises(UnsupportedModelError, match=message):
        Target(model)
    with ddtree.load(model) as loaded:
        assert not loaded.target.verifies_trees
        assert loaded.generate([5, 6, 7, 8], **OPTIONS).token_ids == own_text(model, [5, 6, 7, 8])


class Replaced(modeling_llama.LlamaAttention):
    """Attention of remote code, which does not ask transformers for its function."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        return self.o_proj(hidden_states.repeat(1, 1, 2)[..., : self.o_proj.in_features]), None


class Leaking(modeling_llama.LlamaAttention):
    """Attention that adds a little of all tokens beside a token, siblings too."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **rest):
        own, weights = super().forward(hidden_states, position_embeddings, attention_mask, **rest)
        return own + 0.01 * hidden_states.mean(dim=1, keepdim=True), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "message"), [(Replaced, "attention interface"), (Leaking, "other logits for a draft tree")]
)
def test_a_replaced_attention_of_a_known_family_is_noticed(kind, message, dtype):
    model = tiny.model()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = kind(model.config, index)
    with pytest.raises(UnsupportedModelError, match=message):
        Target(model.to(dtype))


def test_custom_generate_tries_a_model_once_and_again_when_a_part_was_replaced():
    model, passes = tiny.model(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    ids = torch.tensor([[3, 4, 5, 3, 4]])
    options = {"custom_generate": ddtree.custom_generate, "drafter": "lookup", "max_new_tokens": 1}
    counts = []
    for _ in range(2):
        passes.clear()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        counts.append(len(passes))
    assert counts[1] == 1 < counts[0]
    model.model.layers[1].self_attn = Leaking(model.config, 1)
    with pytest.raises(UnsupportedModelError, match="other logits for a draft tree"):
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)


def test_an_exception_while_a_family_is_tried_means_plain_decoding(monkeypatch):
    model = tiny.model()
    monkeypatch.setattr(Target, "_probe", lambda self: torch.zeros(2).view(3))
    with pytest.raises(UnsupportedModelError, match=r"cannot take a draft tree .shape"):
        Target(model)
    assert not model.model.layers[0]._forward_hooks
    with ddtree.load(model) as loaded:
        assert loaded.generate([3, 4, 5], max_tokens=2).token_ids


def test_afmoe_runs_in_bfloat16():
    with ddtree.load(build("afmoe").model.to(torch.bfloat16), "lookup") as loaded:
        assert len(loaded.generate([5, 6, 7, 5, 6], **OPTIONS).token_ids) == OPTIONS["max_tokens"]


def test_quantized_activations_are_told_once_and_their_flips_are_near_ties(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = tiny.model()
        linear = {
            name for name, part in own.model.named_modules(prefix="model") if isinstance(part, nn.Linear)
        }
        model = torch.ao.quantization.quantize_dynamic(own, linear, dtype=torch.qint8)
    target = Target(model)
    assert target.noise > 0 and target.vocab_size == model.config.vocab_size
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "LlamaForCausalLM quantizes its activatio"
    ]
    assert Target(tiny.model()).noise == 0
    text = [3, 4, 5, 6, 7, 8]
    greedy = SamplingParams(temperature=0)
    logits = model(torch.tensor([text])).logits[0, -1].detach()
    best, second = logits.topk(2).indices.tolist()
    target.noise = float(logits[best] - logits[second]) + 1
    assert verdict(target, text, [best], [second], greedy)["kind"] == "near-tie"
