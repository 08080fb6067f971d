"""The DFlash drafter: the published network's numbers, slots and depths, rows that do not touch each other."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash, checkpoint
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.drafters.loading import load_drafter
from ddtree.engine.engine import Engine
from ddtree.errors import ConfigError
from ddtree.model.kv_cache import KVCache
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN, Noise
from ddtree.sampling.params import SamplingParams
from ddtree.stats import Clock
from ddtree.train.batches import Batch, pack
from drafting import varied_network

FIXTURES = Path(__file__).parents[1] / "fixtures"
BLOCK = 6
PROMPT, ACCEPTED = 11, 3  # of the fixtures' two rounds


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model("qwen3", tie_word_embeddings=False))


def features(count, seed, width=64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def started(net, target, lengths, chunk=1000, **options):
    """A drafter with a row of each length, its features observed in chunks, and the rows' requests."""
    coupling = options.pop("coupling", PLAIN)
    drafter = DFlash(Backbone(net, target, **options), coupling=coupling)
    rows = []
    for row, length in enumerate(lengths):
        drafter.add_row()
        observe(drafter, row, length, chunk)
        rows.append(request(length))
    return drafter, rows


def observe(drafter, row, length, chunk=1000):
    tokens, known = tiny.prompt(length, length), features(length, length)
    for at in range(0, length, chunk):
        drafter.observe(row, tokens[at : at + chunk], known[at : at + chunk])


def request(length, **changes):
    """Prompt of a length, and a bonus token."""
    options = {"budget": 12, "depth": BLOCK - 1, **changes}
    return DraftRow([*tiny.prompt(length, length), (7 * length + 3) % 40], **options)


def draft(drafter, rows):
    return drafter.draft(rows, Clock())


def same_tree(left, right):
    assert left.sizes == right.sizes
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(left, name), getattr(right, name))
    torch.testing.assert_close(left.logprobs, right.logprobs, rtol=0, atol=1e-4)


@torch.no_grad()
def marginals(net, target, row, first_slot=1):
    """Log-probabilities [L, V] of a row by the training forward, with the whole context at once."""
    context, bonus = len(row.tokens) - 1, row.tokens[-1]
    block = torch.full((1, net.config.block_size), net.config.mask_token_id)
    block[0, 0] = bonus
    hidden = net(
        torch.nn.functional.embedding(block, target.embed.weight),
        torch.arange(context, context + block.shape[1])[None],
        net.context(features(context, context)[None]),
        torch.arange(context)[None],
    )
    return target.head(net.norm(hidden[0, first_slot:])).log_softmax(-1)


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
    net = varied_network()
    drafter, rows = started(net, target, [9])
    rows[0].chain = True
    expected = marginals(net, target, rows[0]).argmax(-1).tolist()
    assert draft(drafter, rows).tokens[0].tolist() == [rows[0].tokens[-1], *expected]
    unanchored = dataclasses.replace(rows[0], tokens=[*rows[0].tokens[:-1], net.config.mask_token_id])
    assert marginals(net, target, unanchored).argmax(-1).tolist() != expected


def test_drafters_that_sample_from_the_anchor_read_depth_1_from_slot_0(target):
    net = varied_network(sample_from_anchor=True)
    drafter, rows = started(net, target, [9])
    rows[0].chain, rows[0].depth = True, BLOCK
    assert drafter.max_depth == BLOCK
    expected = marginals(net, target, rows[0], first_slot=0).argmax(-1).tolist()
    assert draft(drafter, rows).tokens[0, 1:].tolist() == expected


def test_a_tree_holds_the_most_likely_prefixes_of_the_marginals(target):
    net = varied_network()
    drafter, rows = started(net, target, [9])
    logq = marginals(net, target, rows[0])
    tree = draft(drafter, rows)
    top = logq.topk(12, dim=-1)
    prefixes = {(): 0.0}
    level = prefixes
    for depth in range(BLOCK - 1):
        level = {
            (*path, int(token)): score + float(value)
            for path, score in level.items()
            for token, value in zip(top.indices[depth], top.values[depth], strict=True)
        }
        level = dict(sorted(level.items(), key=lambda item: -item[1])[:40])
        prefixes |= level
    best = sorted(prefixes, key=lambda path: -prefixes[path])[:13]
    paths = [()]
    for node in range(1, tree.sizes[0]):
        paths.append((*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])))
    assert paths == best


def test_the_whole_block_is_drafted_even_where_depth_is_limited(target):
    net = varied_network()
    drafter, rows = started(net, target, [9])
    whole = draft(drafter, [dataclasses.replace(rows[0], chain=True)])
    short = draft(drafter, [dataclasses.replace(rows[0], chain=True, depth=2)])
    assert short.tokens[0].tolist() == whole.tokens[0, :3].tolist()


def test_text_is_the_same_up_to_the_end_of_the_context(target):
    near = Target(target.model, max_context=24)
    engine = Engine(near, DFlash(Backbone(varied_network(), near)))
    sequence = engine.add(tiny.prompt(5), SamplingParams(temperature=0, max_tokens=100))
    while not engine.idle:
        engine.step()
    other = Engine(near)
    plain = other.add(tiny.prompt(5), SamplingParams(temperature=0, max_tokens=100))
    while not other.idle:
        other.step()
    assert sequence.output == plain.output
    assert (sequence.finish_reason, len(sequence.tokens)) == ("length", 24)


# Rows and state


def test_a_batch_of_ragged_rows_drafts_what_its_rows_draft_alone(target):
    for net in (varied_network(), varied_network(windows=(4, None), causal=(True, False))):
        lengths = [3, 40, 1, 17]
        drafter, rows = started(net, target, lengths, chunk=7)
        together = draft(drafter, rows)
        for index, length in enumerate(lengths):
            alone = draft(*started(net, target, [length]))
            same_tree(together.row(index), alone)


def test_a_budget_beyond_the_vocabulary_takes_every_token(target):
    drafter, rows = started(varied_network(), target, [9])
    tree = draft(drafter, [dataclasses.replace(rows[0], budget=200, depth=1)])
    assert sorted(tree.tokens[0, 1:].tolist()) == list(range(tiny.VOCAB))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_targets_get_half_precision_drafters(dtype):
    half = Target(tiny.model("qwen3").to(dtype))
    engine = Engine(half, DFlash(Backbone(varied_network(), half)))
    sequences = [engine.add(tiny.prompt(n), SamplingParams(temperature=0, max_tokens=12)) for n in (4, 9)]
    while not engine.idle:
        engine.step()
    assert [len(sequence.output) for sequence in sequences] == [12, 12]


# Vocabulary, embedding, head


def test_a_reduced_vocabulary_proposes_its_own_tokens_only(target):
    net, ids = varied_network(), torch.tensor([40, 3, 17, 5, 9])
    drafter, rows = started(net, target, [9], draft_ids=ids)
    drafter.trace = lambda row, logprobs: traced.append(logprobs.clone())
    traced = []
    tree = draft(drafter, rows)
    expected = marginals(net, target, rows[0])[:, ids].log_softmax(-1)
    torch.testing.assert_close(traced[0], expected, rtol=0, atol=1e-4)
    assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())
    first = int(tree.tokens[0, 1])
    assert first == int(ids[expected[0].argmax()])


def test_own_head_and_embeddings_of_a_checkpoint_are_used(target):
    net, generator = varied_network(), torch.Generator().manual_seed(5)
    head = torch.randn(tiny.VOCAB, 32, generator=generator)
    embedding = torch.randn(tiny.VOCAB, 32, generator=generator)
    slot = torch.randn(32, generator=generator)
    drafter, rows = started(net, target, [9], head=head, embedding=embedding, mask_embedding=slot)
    block = torch.cat([embedding[rows[0].tokens[-1]][None], slot.expand(BLOCK - 1, -1)])[None]
    with torch.no_grad():
        context = net.context(features(9, 9)[None])
        hidden = net(block, torch.arange(9, 9 + BLOCK)[None], context, torch.arange(9)[None])
    rows[0].chain = True
    assert (
        draft(drafter, rows).tokens[0, 1:].tolist() == (net.norm(hidden[0, 1:]) @ head.T).argmax(-1).tolist()
    )


def test_slots_are_the_bare_rows_of_a_scaled_embedding():
    """Gemma multiplies its embedding; published drafters expect the bare rows, times a factor of their own."""
    gemma = Target(tiny.model("gemma3"))
    net = varied_network(input_embedding_scale=3.0)
    token = torch.tensor([[5]])
    assert torch.equal(net.embed(gemma.embed.weight, token), gemma.embed.weight[token] * 3.0)
    assert not torch.allclose(gemma.embed(token), gemma.embed.weight[token])


def test_factor_and_soft_cap_of_a_checkpoint_shape_the_marginals(target):
    net = varied_network(output_multiplier=0.5, final_logit_softcapping=2.0)
    drafter, rows = started(net, target, [9])
    traced = []
    drafter.trace = lambda row, logprobs: traced.append(logprobs.clone())
    draft(drafter, rows)
    plain = varied_network()
    raw = marginals(plain, target, rows[0])
    context = plain.context(features(9, 9)[None])
    with torch.no_grad():
        block = torch.full((1, BLOCK), net.config.mask_token_id)
        block[0, 0] = rows[0].tokens[-1]
        slots = target.embed.weight[block]
        hidden = plain(slots, torch.arange(9, 9 + BLOCK)[None], context, torch.arange(9)[None])
        logits = torch.tanh(target.head(net.norm(hidden[0, 1:])) * 0.5 / 2.0) * 2.0
    torch.testing.assert_close(traced[0], logits.log_softmax(-1), rtol=0, atol=1e-4)
    assert (raw - traced[0]).abs().max() > 0.1


# Noise-coupled drafting


def test_coupled_rows_rank_the_whole_vocabulary_under_their_noise(target):
    net, beta, kappa, temperature = varied_network(), 3.0, 1.3, 1.5
    for ids in (None, torch.tensor([40, 3, 17, 5, 9, 22, 31])):
        drafter, _ = started(net, target, [9, 9], draft_ids=ids, coupling=(beta, kappa))
        noise = Noise(11, tiny.VOCAB)
        rows = [request(9, noise=noise, temperature=temperature, chain=True), request(9, chain=True)]
        tree = draft(drafter, rows)
        logq = marginals(net, target, rows[0])
        known = torch.arange(tiny.VOCAB) if ids is None else ids
        logq = logq[:, known].log_softmax(-1)
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


@pytest.mark.parametrize("changes", [{}, {"windows": (4, None), "causal": (True, False)}])
@torch.no_grad()
def test_packed_blocks_give_what_each_block_gives_alone(changes):
    net = varied_network(**changes)
    anchors = torch.tensor([3, 4, 11])
    tokens, lengths = torch.tensor(tiny.prompt(20))[None], torch.tensor([20])
    batch = Batch(
        tokens, lengths, anchors[None], torch.zeros(1, 3, dtype=torch.int64), context=11, indices=[0]
    )
    blocks = pack(batch, BLOCK, net.config.mask_token_id)
    x = torch.randn(1, blocks.tokens.shape[1], 32, generator=torch.Generator().manual_seed(0))
    context = net.context(features(blocks.context, 1)[None])
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
        context = net.context(features(9, 1)[None])
        hidden = net(
            torch.randn(1, BLOCK, 32), torch.arange(9, 9 + BLOCK)[None], context, torch.arange(9)[None]
        )
    net.norm(hidden).float().pow(2).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


# Several blocks at once


@torch.inference_mode()
def test_blocks_side_by_side_give_what_each_gives_alone(target):
    """Packed on one context, ragged rows and prefixes of different lengths included; windows and causal layers too."""
    for changes in ({}, {"windows": (4, None), "causal": (True, False)}):
        net = varied_network(**changes)
        drafter, rows = started(net, target, [9, 5, 14])
        known = torch.randint(0, tiny.VOCAB, (3, 4, 4), generator=torch.Generator().manual_seed(1))
        counts = torch.tensor([[1, 2, 3, 4], [2, 2, 1, 1], [4, 3, 2, 1]])
        packed = drafter.backbone.branches(known, counts, BLOCK - 1)
        for branch in range(4):
            alone = drafter.backbone.branches(
                known[:, branch : branch + 1], counts[:, branch : branch + 1], BLOCK - 1
            )
            torch.testing.assert_close(packed[:, branch], alone[:, 0], rtol=0, atol=1e-4)
        context, count = len(rows[0].tokens) - 1, int(counts[0, 2])
        block = torch.full((1, BLOCK), net.config.mask_token_id)
        block[0, :count] = known[0, 2, :count]
        states = net(
            torch.nn.functional.embedding(block, target.embed.weight),
            torch.arange(context, context + BLOCK)[None],
            net.context(features(context, context)[None]),
            torch.arange(context)[None],
        )
        torch.testing.assert_close(packed[0, 2], states[0, 1:], rtol=0, atol=1e-4)
