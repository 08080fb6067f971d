"""Plain decoding by a model's own means: the text of its own `generate`, or a refusal by name."""

import functools
import types

import pytest
import torch
import transformers as hf
from tiny_families import build
from torch import nn

import ddtree
import tiny
from ddtree.errors import UnsupportedModelError
from ddtree.model.autoregressive import AutoregressiveTarget

PROMPTS = [tiny.prompt(20), tiny.prompt(6)]


def soften(model):
    """Give a model the learned prompt of a wrapper, as PEFT does it."""
    prompt = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    own = model.prepare_inputs_for_generation

    def prepare(ids, *args, is_first_iteration=False, **kwargs):
        inputs = own(ids, *args, is_first_iteration=is_first_iteration, **kwargs)
        inputs.pop("position_ids", None)
        if is_first_iteration:
            embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([prompt, embedded], dim=1)
        return inputs

    model.prepare_inputs_for_generation = prepare
    return model


class Wrapped(nn.Module):
    """PEFT's wrapper of a model: its inputs are the model's own for as long as `generate` runs."""

    class active_peft_config:
        is_prompt_learning = True

    def __init__(self):
        super().__init__()
        self.base_model = soften(tiny.model())
        self._prepare = vars(self.base_model).pop("prepare_inputs_for_generation")

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def generate(self, *args, **kwargs):
        self.base_model.prepare_inputs_for_generation = self._prepare
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:
            del self.base_model.prepare_inputs_for_generation


MODELS = {
    "positions in a hybrid": lambda: build("bamba").model,
    "positions after the padding": lambda: build("roberta", pad_token_id=1).model,
    "the whole text each step": lambda: build("cpmant").model,
    "soft prompts": lambda: soften(tiny.model()),
    "soft prompts of a wrapper": Wrapped,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def theirs(model, prompt, **options):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=30,
        repetition_penalty=1.3,
        **options,
    )
    return found[0, -30:].tolist()


@pytest.mark.parametrize("drafter", ["auto", "none"])
def test_plain_text_is_that_of_the_models_own_generate(model, drafter):
    with ddtree.load(model, drafter=drafter) as loaded:
        results = loaded.generate(
            PROMPTS, temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3
        )
    assert [list(result.token_ids) for result in results] == [theirs(model, prompt) for prompt in PROMPTS]


def test_custom_generate_gives_the_text_of_generate(model):
    for prompt in PROMPTS:
        assert theirs(model, prompt, custom_generate=ddtree.custom_generate) == theirs(model, prompt)


def test_soft_prompts_take_no_named_drafter():
    for model in (soften(tiny.model()), Wrapped()):
        with pytest.raises(UnsupportedModelError, match=r'soft prompts.*use drafter="none"'):
            ddtree.load(model, drafter="lookup")
    with pytest.raises(UnsupportedModelError, match="soft prompts"):
        theirs(soften(tiny.model()), PROMPTS[0], custom_generate=ddtree.custom_generate, drafter="lookup")


@pytest.mark.parametrize("drafter", ["none", "auto", "lookup"])
def test_an_adapter_that_starts_within_the_text_is_refused_by_name(drafter):
    model = tiny.model()
    model.peft_config = {"other": types.SimpleNamespace(r=8)}
    with ddtree.load(model, drafter=drafter):
        pass
    model.peft_config["late"] = types.SimpleNamespace(alora_invocation_tokens=[5, 6])
    with pytest.raises(UnsupportedModelError, match=r"aLoRA.*own generate") as refusal:
        ddtree.load(model, drafter=drafter)
    assert "drafter=" not in str(refusal.value)
    with pytest.raises(UnsupportedModelError, match="aLoRA"):
        theirs(model, PROMPTS[0], custom_generate=ddtree.custom_generate)


def test_soft_prompts_take_their_places_of_a_learned_table():
    with ddtree.load(soften(build("gpt2", max_position_embeddings=64).model)) as loaded:
        result = loaded.generate(list(range(3, 23)), temperature=0, max_tokens=60, ignore_eos=True)
    assert result.finish_reason == "length" and len(result.token_ids) == 64 - 5 - 20


def test_what_the_generation_config_says_of_search_is_no_part_of_plain_decoding(model):
    expected = theirs(model, PROMPTS[0])
    before = model.generation_config
    model.generation_config = hf.GenerationConfig(
        num_beams=2, num_return_sequences=2, max_new_tokens=3, use_cache=False, penalty_alpha=0.6, top_k=4,
        bad_words_ids=[[9999]], repetition_penalty=5.0,
    )  # fmt: skip
    try:
        with ddtree.load(model, drafter="none") as loaded:
            options = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.3}
            assert list(loaded.generate(PROMPTS[0], **options).token_ids) == expected
    finally:
        model.generation_config = before


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_offloaded_embeddings_are_given_ids_where_they_run(drafter):
    model = tiny.model()
    expected = theirs(model, PROMPTS[0])
    embedding = model.get_input_embeddings()
    weight = embedding.weight.detach()
    embedding.to("meta")
    embedding._hf_hook = types.SimpleNamespace(execution_device=torch.device("cpu"))
    embedding.forward = functools.partial(nn.functional.embedding, weight=weight)
    with ddtree.load(model, drafter=drafter) as loaded:
        options = {
            "temperature": 0,
            "max_tokens": 30,
            "repetition_penalty": 1.3,
            "method": "tree",
            "budget": 8,
        }
        assert list(loaded.generate(PROMPTS[0], **options).token_ids) == expected


class Forgetful(hf.BloomForCausalLM):
    """A Bloom whose later calls differ from its first ones."""

    calls = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.calls += 1
        output["logits"] = output.logits + self.calls
        return output


class Broken(hf.BloomForCausalLM):
    def forward(self, *args, **kwargs):
        raise ZeroDivisionError("by zero")


def own_bloom(kind):
    """A Bloom whose class is replaced."""
    return kind(build("bloom").model.config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("xlnet").model, "XLNetLMHeadModel gives no cache"),
        (lambda: build("recurrent_gemma").model, "RecurrentGemmaForCausalLM gives no cache"),
        (lambda: own_bloom(Forgetful), "Forgetful gives other logits"),
        (lambda: own_bloom(Broken), r"Broken cannot be decoded.*\(ZeroDivisionError: by zero\)"),
    ],
)
@pytest.mark.parametrize("drafter", ["none", "auto", "lookup"])
def test_what_cannot_be_decoded_plainly_is_refused_by_name_and_not_told_to_be(make, message, drafter):
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        ddtree.load(make(), drafter=drafter)
    assert "drafter=" not in str(refusal.value)


def test_a_model_is_compared_with_its_generate_once():
    model = build("mamba").model
    AutoregressiveTarget(model)
    model.generate = None
    AutoregressiveTarget(model)
