"""Where a text ends: the context that a config gives, learned tables, and angles that go on or do not."""

import pytest
import torch
from tiny_families import build

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


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("mpt", "max_seq_len"),
        ("whisper", "max_target_positions"),
        ("roberta", "max_position_embeddings"),
        ("prophetnet", "max_position_embeddings"),
    ],
)
def test_texts_end_with_the_context_as_length(family, field):
    model = build(family, **{field: LENGTH}).model
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


@pytest.mark.parametrize("value", [[[1]], "2", [3, None]])
def test_end_tokens_that_are_no_ids_are_refused_by_name(value):
    model = tiny.model()
    model.generation_config.eos_token_id = value
    with pytest.raises(ConfigError, match="is no token id and no list of them"):
        ddtree.load(model, "none")
