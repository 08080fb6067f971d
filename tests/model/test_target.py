"""The target: prefill, tree verification and features equal plain forwards of transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from tiny_families import build

import tiny
from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.model import architectures, attention
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from ddtree.tree import DraftTree

TOLERANCE = 2e-4


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def ragged_tree():
    return DraftTree(
        tokens=torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 0]]),
        parents=torch.tensor([[0, 0, 0, 2, 3], [0, 0, 1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1, 2, 3], [0, 1, 2, 1, 0]]),
        logprobs=torch.zeros(2, 5),
        sizes=[5, 4],
    )


def path_of(tree, row, node):
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[row, path[-1]]))
    return [int(tree.tokens[row, n]) for n in reversed(path)]


def start(target, prompts, chunk):
    cache = target.new_cache()
    last = []
    for row, prompt in enumerate(prompts):
        cache.add_row()
        last.append([forward for _, forward in target.prefill(cache, row, prompt, chunk)][-1])
    return cache, last


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_prefill_in_chunks_of_any_size_gives_the_plain_logits(family, chunk):
    model = tiny.model(family)
    prompt = tiny.prompt(23)
    _, (forward,) = start(Target(model), [prompt], chunk)
    assert forward.logits.shape == (1, 1, tiny.VOCAB)
    torch.testing.assert_close(forward.logits[0, 0], plain_logits(model, prompt)[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_node_logits_equal_path_logits_in_a_ragged_batch_across_the_window(family):
    model = tiny.model(family)
    target = Target(model)
    prompts = [tiny.prompt(17), tiny.prompt(5, seed=1)]
    cache, _ = start(target, prompts, 6)
    tree = ragged_tree()
    logits = target.verify(cache, tree).logits
    for row, prompt in enumerate(prompts):
        for node in range(tree.sizes[row]):
            plain = plain_logits(model, prompt + path_of(tree, row, node))[-1]
            torch.testing.assert_close(logits[row, node], plain, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_after_a_commit_the_cache_holds_the_accepted_path_only(family):
    model = tiny.model(family)
    target = Target(model)
    prompts = [tiny.prompt(17), tiny.prompt(5, seed=1)]
    cache, _ = start(target, prompts, 512)
    target.verify(cache, ragged_tree())
    cache.commit([[0, 2, 3, 4], [0, 3]])
    assert cache.lengths == [21, 7]
    logits = target.verify(cache, DraftTree.root([9, 12], torch.device("cpu"))).logits
    for row, (prompt, path) in enumerate(zip(prompts, [[3, 5, 6, 7, 9], [8, 11, 12]], strict=True)):
        plain = plain_logits(model, prompt + path)[-1]
        torch.testing.assert_close(logits[row, 0], plain, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_features_are_the_outputs_of_decoder_layers(family):
    model = tiny.model(
        family,
        num_hidden_layers=3,
        **({"layer_types": ["sliding_attention"] * 3} if family == "gemma3" else {}),
    )
    target = Target(model, feature_layers=(2, 0))
    prompt = tiny.prompt(11)
    cache = target.new_cache()
    cache.add_row()
    parts = [forward.features for _, forward in target.prefill(cache, 0, prompt, 4)]
    features = torch.cat(parts, dim=1)[0]
    with torch.inference_mode():
        states = model(
            input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False
        ).hidden_states
        normed = model.get_decoder().norm(features[:, :32])
    torch.testing.assert_close(features[:, 32:], states[1][0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(normed, states[-1][0], atol=TOLERANCE, rtol=0)


def test_the_model_keeps_its_own_attention_outside_our_forwards():
    model = tiny.model("gemma2")
    before = plain_logits(model, tiny.prompt(12))
    target = Target(model, feature_layers=(0,))
    start(target, [tiny.prompt(12)], 512)
    assert model.config._attn_implementation != attention.NAME
    assert torch.equal(before, plain_logits(model, tiny.prompt(12)))
    target.close()
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_layers": (0, 2)}, r"feature layer 2 is outside the target's layers 0\.\.1"),
        *(({"max_context": n}, f"max_context must be at least 2, not {n}") for n in (0, 1, -4)),
    ],
)
def test_what_the_model_does_not_have_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Target(tiny.model(), **options)


def test_hybrid_models_are_decoded_root_by_root_and_take_no_drafts():
    model = build("qwen3_next").model
    target = AutoregressiveTarget(model)
    assert not target.verifies_trees and Target.verifies_trees
    cache, (forward,) = start(target, [tiny.prompt(9)], 4)
    torch.testing.assert_close(
        forward.logits[0, 0], plain_logits(model, tiny.prompt(9))[-1], atol=TOLERANCE, rtol=0
    )
    logits = target.verify(cache, DraftTree.root([7], torch.device("cpu"))).logits
    plain = plain_logits(model, [*tiny.prompt(9), 7])[-1]
    torch.testing.assert_close(logits[0, 0], plain, atol=TOLERANCE, rtol=0)
    with pytest.raises(UnsupportedModelError, match=r"linear_attention layers.*: only roots can be verified"):
        target.verify(cache, ragged_tree().row(0))
    with pytest.raises(UnsupportedModelError, match='no drafter can be used; use drafter="none"'):
        target.use_features((0,))


def test_models_that_take_no_tree_are_refused_by_name():
    encoder = hf.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    for model, message in (
        (hf.T5ForConditionalGeneration(encoder), "T5ForConditionalGeneration is an encoder-decoder"),
        (build("bloom").model, "attention interface"),
        (build("qwen3_next").model, r'linear_attention layers.*use drafter="none"'),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            Target(model)


def test_an_untested_family_is_probed_when_loaded(monkeypatch):
    model = build("granite").model
    Target(model)
    monkeypatch.setattr(attention.Visibility, "bias", lambda self, window, fold=1: None)
    with pytest.raises(UnsupportedModelError, match="other logits for a draft tree"):
        Target(model)


def test_bfloat16_logits_of_a_tree_are_bit_for_bit_those_of_plain_decoding():
    """A path's, one token at a time and within a tree of decoys."""
    model = tiny.model().to(torch.bfloat16)
    target = Target(model)
    path = tiny.prompt(12, seed=3)
    cache, _ = start(target, [tiny.prompt(40)], 512)
    one_by_one = []
    for token in path:
        one_by_one.append(target.verify(cache, DraftTree.root([token], torch.device("cpu"))).logits[0, 0])
        cache.commit([[0]])
    cache, _ = start(target, [tiny.prompt(40)], 512)
    # Every node of the path is followed by two siblings of its child that nothing continues.
    nodes, parents, depths, places = [path[0]], [0], [0], [0]
    for depth, token in enumerate(path[1:], 1):
        parents += [places[-1]] * 3
        nodes += [(token + 1) % tiny.VOCAB, (token + 2) % tiny.VOCAB, token]
        depths += [depth] * 3
        places.append(len(nodes) - 1)
    zeros = torch.zeros(1, len(nodes))
    tree = DraftTree(
        torch.tensor([nodes]), torch.tensor([parents]), torch.tensor([depths]), zeros, [len(nodes)]
    )
    found = target.verify(cache, tree).logits[0, places]
    assert (torch.stack(one_by_one) == found).float().mean() > 0.9


def test_longrope_ends_where_its_factors_would_change():
    """Beyond the original length a forward's longest position decides how all its tokens are turned."""
    short = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = tiny.model(
        "phi3",
        sliding_window=None,
        original_max_position_embeddings=48,
        rope_parameters={**short, "original_max_position_embeddings": 48},
    )
    assert Target(model).max_context == 48
    with pytest.raises(ConfigError, match="max_context=64 is more than 48"):
        Target(model, max_context=64)


def test_layers_under_their_older_name_are_found():
    model = build("gpt2").model
    prompt = tiny.prompt(9)
    _, (forward,) = start(Target(model, feature_layers=(0,)), [prompt], 4)
    torch.testing.assert_close(forward.logits[0, 0], plain_logits(model, prompt)[-1], atol=TOLERANCE, rtol=0)


def test_threads_that_run_one_model_do_not_leave_our_attention_on_it():
    model = tiny.model("llama")
    before = model.config._attn_implementation
    targets = [Target(model, feature_layers=(0,)) for _ in range(2)]
    expected = [start(targets[0], [tiny.prompt(30, seed)], 1)[1][0].logits for seed in range(4)]

    def decode(index):
        return start(targets[index % 2], [tiny.prompt(30, index)], 1)[1][0].logits

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(decode, range(4)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert model.config._attn_implementation == before


def test_the_cache_goes_in_and_comes_out_under_its_name_of_this_release():
    model = tiny.model()
    name = architectures.cache_argument(model)
    assert name in architectures.CACHE_NAMES
    ids = torch.tensor([tiny.prompt(9)])
    with torch.inference_mode():
        whole = model(ids).logits[0, -1]
        cache = architectures.cache_of(model(ids[:, :-1], use_cache=True))
        assert torch.allclose(model(ids[:, -1:], **{name: cache}).logits[0, -1], whole, atol=1e-4)


def test_recurrent_models_have_a_name_too():
    model = build("mamba").model
    output = model(torch.tensor([tiny.prompt(4)]), use_cache=True)
    assert architectures.cache_argument(model) in architectures.CACHE_NAMES
    assert architectures.cache_of(output) is not None


def test_a_compiled_model_runs_its_layers_so_and_is_as_before_outside(monkeypatch):
    compiled = []

    def stand_in(forward, dynamic):
        assert dynamic
        return lambda *args, **kwargs: compiled.append(forward) or forward(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", stand_in)
    model = tiny.model()
    plain, target = Target(model), Target(model, compile=True, pack=True)
    assert target.compiles and not target.packs
    forwards = []
    for one in (plain, target):
        cache = one.new_cache()
        forwards += [forward for _, forward in one.prefill(cache, cache.add_row(), tiny.prompt(9))]
    assert torch.equal(forwards[0].logits, forwards[1].logits)
    assert len(compiled) == len(model.model.layers)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
