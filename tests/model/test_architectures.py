"""Where a text ends: the context that a config gives, learned tables, and angles that go on or do not."""

import pytest
import torch
import transformers as hf

import ddtree
import tiny
from ddtree.errors import ConfigError
from ddtree.model.architectures import context_limit, extrapolates

LENGTH = 64
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 9.0, 12.0],
    "factor": 8.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def rotary(rope, length=LENGTH, family="llama"):
    return tiny.model(family, rope_parameters=rope, max_position_embeddings=length)


@pytest.mark.parametrize(
    ("rope", "length", "expected"),
    [
        (YARN, LENGTH, 4 * LENGTH),
        (YARN, 2 * LENGTH, 2 * LENGTH),
        (LINEAR, LENGTH, 4 * LENGTH),
        (DEFAULT, LENGTH, LENGTH),
    ],
)
def test_scaled_angles_stretch_a_context_that_the_config_left_as_it_was(rope, length, expected):
    model = rotary(rope, length)
    assert context_limit(model, None) == expected
    assert context_limit(model, 5 * LENGTH) == 5 * LENGTH


@pytest.mark.parametrize("rope", [YARN, LINEAR])
def test_a_prompt_longer_than_the_original_context_is_answered(rope):
    model = rotary(rope)
    ids = torch.tensor([tiny.prompt(LENGTH + 20)])
    expected = model.generate(ids, do_sample=False, max_new_tokens=20, repetition_penalty=1.3)[
        0, -20:
    ].tolist()
    with ddtree.load(model) as loaded:
        result = loaded.generate(ids[0].tolist(), temperature=0, max_tokens=20, repetition_penalty=1.3)
    assert list(result.token_ids) == expected


def test_a_factor_of_one_kind_of_layer_is_in_the_configs_length_already():
    """As Gemma 3 has it: 131,072 tokens, of which the full layers' angles are an eighth."""
    for ropes in ((LINEAR, DEFAULT), (LINEAR, LINEAR)):
        kinds = dict(zip(("full_attention", "sliding_attention"), ropes, strict=True))
        assert (
            context_limit(tiny.model("gemma3", rope_parameters=kinds, max_position_embeddings=LENGTH), None)
            == LENGTH
        )


def test_longrope_of_one_kind_of_layer_ends_with_its_short_factors():
    ropes = {"full_attention": LONG, "sliding_attention": DEFAULT}
    model = tiny.model("gemma3", rope_parameters=ropes)
    assert context_limit(model, None) == 32
    assert not extrapolates(model.config)
    with pytest.raises(ConfigError, match="max_context=33 is more than 32, the model's own limit"):
        context_limit(model, 33)


def prophetnet():
    return hf.ProphetNetForCausalLM(
        hf.ProphetNetConfig(
            vocab_size=tiny.VOCAB, hidden_size=32, decoder_ffn_dim=48, num_decoder_layers=2, pad_token_id=0,
            num_decoder_attention_heads=4, max_position_embeddings=LENGTH, is_encoder_decoder=False,
        )
    )  # fmt: skip


def mpt():
    return hf.MptForCausalLM(
        hf.MptConfig(vocab_size=tiny.VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=LENGTH)
    )


def whisper():
    return hf.WhisperForCausalLM(
        hf.WhisperConfig(
            vocab_size=tiny.VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_target_positions=LENGTH, pad_token_id=0, is_encoder_decoder=False,
        )
    )  # fmt: skip


def roberta():
    return hf.RobertaForCausalLM(
        hf.RobertaConfig(
            vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH, is_decoder=True, pad_token_id=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", [mpt, whisper, roberta, prophetnet])
def test_texts_end_with_the_context_as_length(make):
    model = make().eval()
    with ddtree.load(model, drafter="none") as loaded:
        result = loaded.generate(tiny.prompt(LENGTH - 8), temperature=0, max_tokens=30, ignore_eos=True)
        room = loaded.target.max_context - LENGTH + 8
    assert (result.finish_reason, len(result.token_ids)) == ("length", room)
    assert 7 <= room <= 8


def test_pictures_of_a_wrapper_do_not_bound_its_text():
    model = rotary(DEFAULT)
    model.vision = torch.nn.Module()
    model.vision.position_embeddings = torch.nn.Embedding(5, 32, padding_idx=0)
    assert context_limit(model, None) == LENGTH
