"""Prompts that join while others run: a chunk between two rounds, and the text of each as if alone."""

import pytest
import torch

import reference
import tiny
from ddtree.engine.engine import Engine
from ddtree.errors import CacheMemoryError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from driving import answered, finish, greedy
from scripted import Scripted

LENGTH = 24
CHUNK = 8
PROMPTS = [tiny.prompt(n, seed=n) for n in (5, 61, 23, 9)]


class Logged(Target):
    """Tells what passes there were: "p" a chunk of a prompt, "v" a verification."""

    log = ""

    def _probe(self):
        """Do nothing: passes of the probe are none of the engine's."""

    def prefill(self, *args, **kwargs):
        for part in super().prefill(*args, **kwargs):
            self.log += "p"
            yield part

    def verify(self, *args, **kwargs):
        self.log += "v"
        return super().verify(*args, **kwargs)


def in_prefill(engine):
    """The sequence whose prompt is being processed."""
    prefill = engine._scheduler.prefill
    return None if prefill is None else prefill.sequence


def texts_of(model):
    return [prompt + reference.decode(model, prompt, greedy(LENGTH), LENGTH) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(model):
    return texts_of(model)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "lookup"),
        ("llama", "merged"),
        ("gemma3", "tree"),
        ("gpt_oss", "tree"),
        ("mistral", "none"),
        ("qwen3_moe", "lookup"),
    ],
)
def test_texts_are_those_of_each_prompt_alone(family, kind):
    model = tiny.model(family)
    drafter = None if kind == "none" else tiny.drafter(kind, model)
    engine = Engine(Target(model), drafter, max_rows=3, prefill_chunk=CHUNK)
    sequences = [engine.add(PROMPTS[0], greedy(LENGTH), depth=4)]
    engine.step()
    engine.step()
    sequences += [engine.add(prompt, greedy(LENGTH), depth=4) for prompt in PROMPTS[1:]]
    finish(engine)
    assert [sequence.tokens for sequence in sequences] == texts_of(model)


def test_running_rows_wait_for_one_chunk_between_two_rounds(model, texts):
    target = Logged(model)
    engine = Engine(target, Scripted(texts, reach=1), prefill_chunk=CHUNK)
    first = engine.add(PROMPTS[0], greedy(LENGTH))
    engine.step()
    late = [engine.add(prompt, greedy(LENGTH)) for prompt in PROMPTS[1:3]]
    joining = []
    while not engine.idle:
        moved = engine.step()
        joining.append(in_prefill(engine))
        # The first token waits for no round.
        assert late[0].output_length or late[0] not in moved
    assert target.log.startswith("p" + "vp" * (8 + 3))
    assert "pp" not in target.log
    assert joining.count(late[0]) == 2 * (8 - 1)
    assert [s.tokens for s in (first, *late)] == texts[:3]


def test_while_nothing_runs_short_prompts_join_in_one_step(model, texts):
    target = Logged(model)
    engine = Engine(target, Scripted(texts), prefill_chunk=10)
    order = [2, 0, 3, 1, 0]
    sequences = [engine.add(PROMPTS[i], greedy(LENGTH)) for i in order]
    moved = [engine.step() for _ in range(3)]
    assert moved == [[], [], sequences[:3]] and target.log == "ppp" + "pp"
    assert in_prefill(engine) is sequences[3] and engine.running == sequences[:3]
    finish(engine)
    assert [s.tokens for s in sequences] == [texts[i] for i in order]


@pytest.mark.parametrize("within", [False, True])
def test_a_cancelled_joining_sequence_is_gone_at_once(model, texts, within):
    engine = Engine(Target(model), Scripted(texts), prefill_chunk=CHUNK)
    late = None

    def cancelling(prefix, logits):
        if late is not None and within:
            engine.cancel(late)
        return logits

    first = engine.add(PROMPTS[0], greedy(LENGTH, processors=(cancelling,)))
    engine.step()
    late = engine.add(PROMPTS[1], greedy(LENGTH))
    engine.step()
    engine.step()
    if not within:
        assert in_prefill(engine) is late and engine.kv_bytes()[0] > 0
        engine.cancel(late)
        assert in_prefill(engine) is None
    engine.step()
    assert (late.finish_reason, late.output, in_prefill(engine)) == ("cancelled", [], None)
    assert engine._cache.rows == 1
    finish(engine)
    assert first.tokens == texts[0]


@pytest.mark.parametrize("error", [CacheMemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["prefill", "take", "observe"])
def test_memory_that_runs_out_ends_the_joining_sequence_only(model, texts, monkeypatch, where, error):
    engine = Engine(Target(model), Scripted(texts, reach=1), prefill_chunk=CHUNK)
    first = engine.add(PROMPTS[0], greedy(LENGTH))
    engine.step()
    late = engine.add(PROMPTS[1], greedy(LENGTH))
    for _ in range(4):
        engine.step()
    observe = engine.drafter.observe

    def full(row, *rest):
        if where == "observe" and row == 0:
            return observe(row, *rest)
        raise error("full")

    owner, name = {
        "prefill": (engine._scheduler.prefill, "_chunks"),
        "take": (engine._cache, "take"),
        "observe": (engine.drafter, "observe"),
    }[where]
    monkeypatch.setattr(owner, name, map(full, [0]) if where == "prefill" else full)
    finish(engine)
    assert late.finish_reason == "error" and isinstance(late.error, CacheMemoryError)
    assert first.tokens == texts[0]
    assert engine._cache.rows == 0 and in_prefill(engine) is None


def test_a_growth_that_fails_leaves_the_running_rows_as_they_are(model, texts, monkeypatch):
    engine = Engine(Target(model), Scripted(texts), prefill_chunk=64)
    first = engine.add(PROMPTS[0], greedy(LENGTH))
    engine.step()
    engine.step()
    late = engine.add(PROMPTS[1], greedy(LENGTH))
    zeros = torch.zeros

    def limited(shape, **options):
        if len(shape) == 5 and shape[1] == 2:
            raise RuntimeError("no memory")
        return zeros(shape, **options)

    monkeypatch.setattr(torch, "zeros", limited)
    finish(engine)
    assert late.finish_reason == "error" and "for 2 rows of 256 tokens" in str(late.error)
    assert first.tokens == texts[0]


def test_targets_with_caches_of_their_own_join_as_well(model, texts):
    engine = Engine(AutoregressiveTarget(model), prefill_chunk=CHUNK, prefix_bytes=10**9)
    first = engine.add(PROMPTS[0], greedy(LENGTH))
    engine.step()
    late = engine.add(PROMPTS[1], greedy(LENGTH))
    finish(engine)
    assert [first.tokens, late.tokens] == texts[:2]
    assert engine.prefixes is None and engine.kv_bytes() == (0, 0)


def test_origins_tell_the_depth_of_every_accepted_token(model, texts):
    engine = Engine(Target(model), Scripted(texts, reach=3))
    sequences = [engine.add(prompt, greedy(max_tokens=10)) for prompt in PROMPTS[:2]]
    rounds = []
    engine.listener = rounds.append
    finish(engine)
    for sequence in sequences:
        assert sequence.origins == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]
    # The last round's draft is cut to what the answer may still hold.
    assert [[len(path) for path in one.paths] for one in rounds] == [[4, 4], [4, 4], [1, 1]]
    assert all(one.rows == sequences and set(one.seconds) == set(engine.clock.seconds) for one in rounds)
    assert all(one.seconds["verify"] > 0 for one in rounds)
    assert [str(choice.arm) for choice in rounds[0].choices] == ["tree@scripted"] * 2
    assert rounds[0].tree.sizes == [7, 7]


def test_bytes_in_use_are_those_of_committed_tokens(model, texts):
    engine = Engine(Target(model), Scripted(texts), prefill_chunk=CHUNK)
    engine.add(PROMPTS[0], greedy(LENGTH))
    assert engine.kv_bytes() == (0, 0)
    engine.step()
    # Two layers of keys and values, two heads of 8 floats.
    token = 2 * 2 * 2 * 8 * 4
    assert engine.kv_bytes() == (5 * token, 256 * token)
    engine.add(PROMPTS[1], greedy(LENGTH))
    engine.step()
    engine.step()
    assert engine.kv_bytes()[0] == (len(engine.running[0].tokens) - 1 + CHUNK) * token
    finish(engine)
    assert engine.kv_bytes()[0] == 0


@pytest.mark.parametrize("kind", [Target, AutoregressiveTarget])
@pytest.mark.parametrize("chunk", [5, 512])
def test_log_probabilities_of_a_prompt_are_those_of_one_pass_over_it(model, chunk, kind):
    prompt = tiny.prompt(23, seed=1)
    engine = Engine(kind(model), None, prefill_chunk=chunk, prefix_bytes=2**20)
    for _ in range(2):  # the second time its beginning is known
        [sequence] = answered(engine, (prompt, greedy(3, prompt_logprobs=2)), method="off")
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert [one.token for one in sequence.prompt_logprobs] == prompt[1:]
        for one, row in zip(sequence.prompt_logprobs, expected, strict=False):
            assert one.logprob == pytest.approx(row[one.token].item(), abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
