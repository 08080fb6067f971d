"""The DFlash drafter: the published network's numbers, slots and depths, vocabulary, noise, training blocks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import tiny
from ddtree.drafters.dflash import DFlash, checkpoint
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.drafters.loading import load_drafter
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams
from ddtree.train.batches import Batch, pack
from ddtree.tree import best_first
from drafting import (
    BLOCK,
    DEPTH,
    block_states,
    draft,
    features,
    marginals,
    opened,
    request,
    scored,
    varied_network,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPT, ACCEPTED = 11, 3  # of the fixtures' two rounds
SHAPES = pytest.mark.parametrize("changes", [{}, {"windows": (4, None), "causal": (True, False)}])


def started(net, target, *rows, coupling=(0.0, 1.0), **options):
    """A drafter that has seen the rows' contexts."""
    return opened(DFlash(Backbone(net, target, **options), coupling=coupling), *rows)


def traced(drafter, row):
    """The tree for a row, and the log-probabilities [L, Vd] that it was built from."""
    seen = []
    drafter.trace = lambda _, logprobs: seen.append(logprobs.clone())
    return draft(drafter, row), seen[0]


def finish(engine):
    while not engine.idle:
        engine.step()


# The published package's numbers


@pytest.mark.parametrize("case", ["full", "sliding"])
@torch.no_grad()
def test_hidden_states_are_those_of_the_published_package(case):
    folder = FIXTURES / f"dflash_{case}"
    net = checkpoint.read(folder).network()
    rounds = load_file(folder / "rounds.safetensors")
    known, slots, expected = rounds["features"], rounds["slots"], rounds["hidden"]
    cache, start = KVCache(64), 0
    cache.add_row()
    for stop, block, wanted in zip((PROMPT, PROMPT + ACCEPTED), slots, expected, strict=True):
        size = len(block)
        cache.open(0, 1, stop - start)
        net.inject(net.context(known[None, start:stop]), torch.arange(start, stop)[None], cache)
        cache.commit([list(range(stop - start))])
        start, positions = stop, torch.arange(stop, stop + size)[None]
        columns = torch.arange(cache.open(0, 1, size))[None]
        ours = net.norm(net.block(block[None], positions, cache, columns, None))[0]
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
        context = net.context(known[None, :stop])
        at_once = net.norm(net(block[None], positions, context, torch.arange(stop)[None]))[0]
        torch.testing.assert_close(at_once, wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_sliding_fixture_depends_on_window_and_causality():
    folder = FIXTURES / "dflash_sliding"
    read = checkpoint.read(folder)
    rounds = load_file(folder / "rounds.safetensors")
    for change in ({"windows": ()}, {"causal": ()}, {"windows": (5, None)}):
        net = DFlashNet(dataclasses.replace(read.config, **change))
        net.load_state_dict(read.tensors)
        context = net.context(rounds["features"][None, :PROMPT])
        positions = torch.arange(PROMPT, PROMPT + 5)[None]
        hidden = net.norm(net(rounds["slots"][None, 0], positions, context, torch.arange(PROMPT)[None]))[0]
        assert (hidden - rounds["hidden"][0]).abs().max() > 1e-2


def test_drafts_and_text_are_those_of_the_published_generation_loop():
    """Features of the right layers, at the right time, of accepted tokens only (TensorRT-LLM, vllm PR#42704)."""
    folder = FIXTURES / "dflash_target"
    record = json.loads((folder / "generation.json").read_text())
    target = Target(hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    drafter, drafts = load_drafter(FIXTURES / "dflash_full", target), []
    plain = drafter.draft

    def recorded(rows, clock):
        tree = plain(rows, clock)
        drafts.append(tree.tokens[0, 1:].tolist())
        return tree

    drafter.draft = recorded
    engine = Engine(target, drafter)
    params = SamplingParams(temperature=0, max_tokens=len(record["output"]))
    sequence = engine.add(record["prompt"], params, method="chain", budget=4)
    while not engine.idle:
        engine.step()
    assert sequence.output == record["output"]
    assert sum(sequence.stats.accepted[k] * k for k in range(1, 5)) >= 9
    assert drafts[: len(record["drafts"])] == record["drafts"]


# Slots and depths


def test_slot_0_is_the_bonus_token_and_depth_1_is_read_from_slot_1(target):
    """hipfire#483: without the anchor in slot 0 the drafter accepts next to nothing."""
    net, row = varied_network(), request(9, chain=True)
    expected = marginals(net, target, row).argmax(-1).tolist()
    assert draft(started(net, target, row), row).tokens[0].tolist() == [row.tokens[-1], *expected]
    unanchored = dataclasses.replace(row, tokens=[*row.tokens[:-1], net.config.mask_token_id])
    assert marginals(net, target, unanchored).argmax(-1).tolist() != expected


def test_drafters_that_sample_from_the_anchor_read_depth_1_from_slot_0(target):
    net, row = varied_network(sample_from_anchor=True), request(9, depth=BLOCK, chain=True)
    drafter = started(net, target, row)
    assert drafter.max_depth == BLOCK
    expected = marginals(net, target, row, first_slot=0).argmax(-1).tolist()
    assert draft(drafter, row).tokens[0, 1:].tolist() == expected


def test_a_tree_holds_the_most_likely_prefixes_of_the_marginals(target):
    net, row = varied_network(), request(9)
    likely = marginals(net, target, row).topk(12, dim=-1)
    best = best_first([row.tokens[-1]], likely.indices[None], likely.values[None], [12], [DEPTH])
    tree = draft(started(net, target, row), row)
    assert list(scored(tree)) == list(scored(best))
    assert scored(tree) == pytest.approx(scored(best), abs=1e-4)


def test_the_whole_block_is_drafted_even_where_depth_is_limited(target):
    row = request(9, chain=True)
    drafter = started(varied_network(), target, row)
    short = draft(drafter, dataclasses.replace(row, depth=2))
    assert short.tokens[0].tolist() == draft(drafter, row).tokens[0, :3].tolist()


def test_text_is_the_same_up_to_the_end_of_the_context(target):
    near = Target(target.model, max_context=24)
    sequences = []
    for drafter in (None, DFlash(Backbone(varied_network(), near))):
        engine = Engine(near, drafter)
        sequences.append(engine.add(tiny.prompt(5), SamplingParams(temperature=0, max_tokens=100)))
        finish(engine)
    plain, drafted = sequences
    assert drafted.output == plain.output
    assert (drafted.finish_reason, len(drafted.tokens)) == ("length", 24)


def test_a_budget_beyond_the_vocabulary_takes_every_token(target):
    row = request(9, budget=200, depth=1)
    tree = draft(started(varied_network(), target, row), row)
    assert sorted(tree.tokens[0, 1:].tolist()) == list(range(tiny.VOCAB))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_targets_get_half_precision_drafters(dtype):
    half = Target(tiny.model("qwen3").to(dtype))
    engine = Engine(half, DFlash(Backbone(varied_network(), half)))
    sequences = [engine.add(tiny.prompt(n), SamplingParams(temperature=0, max_tokens=12)) for n in (4, 9)]
    finish(engine)
    assert [len(sequence.output) for sequence in sequences] == [12, 12]


# Vocabulary, embedding, head


def test_a_reduced_vocabulary_proposes_its_own_tokens_only(target):
    net, ids, row = varied_network(), torch.tensor([40, 3, 17, 5, 9]), request(9)
    tree, logprobs = traced(started(net, target, row, draft_ids=ids), row)
    expected = marginals(net, target, row)[:, ids].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())
    assert int(tree.tokens[0, 1]) == int(ids[expected[0].argmax()])


def test_own_head_and_embeddings_of_a_checkpoint_are_used(target):
    net, generator, row = varied_network(), torch.Generator().manual_seed(5), request(9, chain=True)
    head, embedding = torch.randn(2, tiny.VOCAB, 32, generator=generator)
    slot = torch.randn(32, generator=generator)
    drafter = started(net, target, row, head=head, embedding=embedding, mask_embedding=slot)
    block = torch.cat([embedding[row.tokens[-1]][None], slot.expand(BLOCK - 1, -1)])[None]
    with torch.no_grad():
        context = net.context(features(row.tokens[:-1])[None])
        hidden = net(block, torch.arange(9, 9 + BLOCK)[None], context, torch.arange(9)[None])
        expected = (net.norm(hidden[0, 1:]) @ head.T).argmax(-1)
    assert draft(drafter, row).tokens[0, 1:].tolist() == expected.tolist()


def test_slots_are_the_bare_rows_of_a_scaled_embedding():
    """Gemma multiplies its embedding; published drafters expect the bare rows, times a factor of their own."""
    gemma = Target(tiny.model("gemma3"))
    net = varied_network(input_embedding_scale=3.0)
    token = torch.tensor([[5]])
    assert torch.equal(net.embed(gemma.embed.weight, token), gemma.embed.weight[token] * 3.0)
    assert not torch.allclose(gemma.embed(token), gemma.embed.weight[token])


def test_factor_and_soft_cap_of_a_checkpoint_shape_the_marginals(target):
    net, row = varied_network(output_multiplier=0.5, final_logit_softcapping=2.0), request(9)
    _, logprobs = traced(started(net, target, row), row)
    logits = target.head(net.norm(block_states(net, target, row)[1:]))
    capped = torch.tanh(logits * 0.5 / 2.0) * 2.0
    torch.testing.assert_close(logprobs, capped.log_softmax(-1), rtol=0, atol=1e-4)
    assert (logits.log_softmax(-1) - logprobs).abs().max() > 0.1


# Noise-coupled drafting


@pytest.mark.parametrize("ids", [None, torch.tensor([40, 3, 17, 5, 9, 22, 31])])
def test_coupled_rows_rank_the_whole_vocabulary_under_their_noise(target, ids):
    net, beta, kappa, temperature = varied_network(), 3.0, 1.3, 1.5
    noise = Noise(11, tiny.VOCAB)
    rows = [request(9, noise=noise, temperature=temperature, chain=True), request(9, chain=True)]
    tree = draft(started(net, target, *rows, draft_ids=ids, coupling=(beta, kappa)), *rows)
    known = torch.arange(tiny.VOCAB) if ids is None else ids
    logq = marginals(net, target, rows[0])[:, known].log_softmax(-1)
    gumbel = torch.stack([noise.gumbel(10 + depth, known) for depth in range(BLOCK - 1)])
    scores = ((logq + beta * temperature * gumbel) / kappa).log_softmax(-1)
    assert tree.tokens[0, 1:].tolist() == known[scores.argmax(-1)].tolist()
    torch.testing.assert_close(tree.logprobs[0, 1:], scores.amax(-1).cumsum(0), rtol=0, atol=1e-4)
    assert tree.tokens[1, 1:].tolist() == known[logq.argmax(-1)].tolist()
    assert tree.tokens[0].tolist() != tree.tokens[1].tolist()


@pytest.mark.parametrize("coupling", [(-0.1, 1.0), (0.5, 0.0), (float("nan"), 1.0)])
def test_a_coupling_out_of_range_is_refused(target, coupling):
    with pytest.raises(ConfigError, match="must be finite and"):
        DFlash(Backbone(varied_network(), target), coupling=coupling)


# Training


@SHAPES
@torch.no_grad()
def test_packed_blocks_give_what_each_block_gives_alone(changes):
    net, tokens = varied_network(**changes), tiny.prompt(20)
    anchors = torch.tensor([3, 4, 11])
    none = torch.zeros(1, 3, dtype=torch.int64)
    batch = Batch(torch.tensor([tokens]), torch.tensor([20]), anchors[None], none, context=11, indices=[0])
    blocks = pack(batch, BLOCK, net.config.mask_token_id)
    x = torch.randn(1, blocks.tokens.shape[1], 32, generator=torch.Generator().manual_seed(0))
    context = net.context(features(tokens[: blocks.context])[None])
    places = torch.arange(blocks.context)[None]
    packed = net.norm(net(x, blocks.positions, context, places, blocks.mask))
    for index, anchor in enumerate(anchors.tolist()):
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        positions = torch.arange(anchor, anchor + BLOCK)[None]
        alone = net.norm(net(x[:, part], positions, context[:, :anchor], torch.arange(anchor)[None]))
        torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=1e-5)


def test_gradients_reach_every_weight_in_mixed_precision():
    net = varied_network()
    with torch.autocast("cpu", torch.bfloat16):
        context = net.context(features(tiny.prompt(9))[None])
        x, positions = torch.randn(1, BLOCK, 32), torch.arange(9, 9 + BLOCK)[None]
        hidden = net(x, positions, context, torch.arange(9)[None])
    net.norm(hidden).float().pow(2).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


# Several blocks at once


@SHAPES
@torch.inference_mode()
def test_blocks_side_by_side_give_what_each_gives_alone(target, changes):
    """Packed on one context, ragged rows and prefixes of different lengths included; windows and causal layers too."""
    net, rows = varied_network(**changes), [request(9), request(5), request(14)]
    drafter = started(net, target, *rows)
    known = torch.randint(0, tiny.VOCAB, (3, 4, 4), generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([[1, 2, 3, 4], [2, 2, 1, 1], [4, 3, 2, 1]])
    packed = drafter.backbone.branches(known, counts, BLOCK - 1)
    for branch in range(4):
        own = slice(branch, branch + 1)
        alone = drafter.backbone.branches(known[:, own], counts[:, own], BLOCK - 1)
        torch.testing.assert_close(packed[:, branch], alone[:, 0], rtol=0, atol=1e-4)
    given = known[0, 2, : counts[0, 2]].tolist()
    anchored = dataclasses.replace(rows[0], tokens=[*rows[0].tokens[:-1], given[0]])
    states = block_states(net, target, anchored, given[1:])
    torch.testing.assert_close(packed[0, 2], states[1:], rtol=0, atol=1e-4)
