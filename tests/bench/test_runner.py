"""The measuring: order, seeds, conversations, verdicts, and methods on a real target."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import benchfakes as fakes
import tiny
from ddtree.bench.methods import Baseline, EngineMethod, parse_method
from ddtree.bench.near_ties import verdict
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import ResultsFile, read
from ddtree.drafters.ngram import Lookup
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.policy.calibration import quick
from ddtree.policy.controller import Policy
from ddtree.sampling.params import SamplingParams

NAMES = ["off", "chain", "tree:8", "auto"]
GREEDY, SAMPLED = (SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0))


def run(path, made, plan=None, **settings):
    with ResultsFile(path, fakes.header([each.name for each in made], **settings)) as results:
        fakes.runner(results, made, plan).run()
    return read(path)


def test_every_method_comes_first_as_often_as_any_other(tmp_path):
    made = fakes.methods(*NAMES)
    run(tmp_path / "raw.jsonl", made)
    order = made[0].order[2 * len(NAMES) :]  # after the warm-up
    rounds = [tuple(order[start : start + 4]) for start in range(0, len(order), 4)]
    assert len(rounds) == 12 and all(sorted(one) == sorted(NAMES) for one in rounds)
    assert len(set(rounds[:4])) == 4
    assert max(Counter(one[0] for one in rounds).values()) <= 6
    assert any(one.index("off") < one.index("auto") for one in rounds)
    assert any(one.index("off") > one.index("auto") for one in rounds)


def test_all_methods_and_turns_have_the_same_seed_and_prompt(tmp_path):
    made = fakes.methods(*NAMES)
    raw = run(tmp_path / "raw.jsonl", made, fakes.plan(turns=2), turns=2)
    seeds = {}
    for record in raw.runs:
        seeds.setdefault(record["id"], set()).add(record["seed"])
    assert all(len(found) == 1 for found in seeds.values())
    assert len({*map(tuple, seeds.values())}) == len(seeds)
    first, *others = ([(prompt, params.seed) for prompt, params in each.asked] for each in made)
    assert all(sorted(other) == sorted(first) for other in others)
    assert Counter(record["turn"] for record in raw.runs) == {0: 48, 1: 48}


def test_a_seed_does_not_depend_on_the_prompts_beside_it(tmp_path):
    every = run(tmp_path / "every.jsonl", fakes.methods("off"))
    some = run(tmp_path / "some.jsonl", fakes.methods("off"), fakes.plan(fakes.prompts()[-1:]))
    other = run(tmp_path / "other.jsonl", fakes.methods("off"), fakes.plan(fakes.prompts()[-1:], seed=5))
    seed = {record["seed"] for record in every.runs if record["id"] == "code-3"}
    assert {record["seed"] for record in some.runs} == seed
    assert {record["seed"] - 5 for record in other.runs} == seed


def test_conversations_go_on_from_the_plain_answer(tmp_path):
    made = fakes.methods("off", "chain")
    made[1].tokens = (7, 7)
    talk = [BenchPrompt("talk", "chat", ("ab", "cd", "ef"))]
    raw = run(tmp_path / "raw.jsonl", made, fakes.plan(talk, temperatures=(0.0,)))
    answer = fakes.FakePair().decode(list(fakes.TEXT))
    wanted = [list(text.encode()) for text in ("ab", f"ab{answer}cd", f"ab{answer}cd{answer}ef")]
    for each in made:
        assert [prompt for prompt, _ in each.asked[1:]] == wanted
    places = [(record["message"], record["messages"]) for record in raw.runs]
    assert places == [(n, 3) for n in (0, 0, 1, 1, 2, 2)]
    assert [record["verdict"]["kind"] for record in raw.runs] == ["equal", "different"] * 3
    short = run(tmp_path / "short.jsonl", fakes.methods("off"), fakes.plan(talk, messages=2))
    assert {record["message"] for record in short.runs} == {0, 1}
    # The third message no longer fits with the answers before it.
    cut = run(tmp_path / "cut.jsonl", fakes.methods("off"), fakes.plan(talk, max_context=26))
    assert {(record["message"], record["messages"]) for record in cut.runs} == {(0, 2), (1, 2)}


def test_what_the_methods_have_learnt_is_kept(tmp_path):
    raw = run(tmp_path / "raw.jsonl", fakes.methods(*NAMES))
    assert raw.policies == {"auto": {"arms": ["auto"]}}
    assert raw.latency["widths"] == [1, 2, 4, 8]


def test_sampled_answers_of_a_baseline_are_not_compared(tmp_path):
    made = fakes.methods("off", "hf")
    made[1].tokens = (7, 7)
    raw = run(tmp_path / "raw.jsonl", made)
    kinds = {
        (record["temperature"], record["verdict"]["kind"]) for record in raw.runs if record["cell"] == "hf"
    }
    assert kinds == {(0.0, "different"), (1.0, "unchecked")}


def test_nothing_that_fits_and_no_plain_decoding_are_refused(tmp_path):
    with ResultsFile(tmp_path / "raw.jsonl", fakes.header(NAMES)) as results:
        with pytest.raises(ConfigError, match="no prompt leaves room for 8 tokens in the context of 8"):
            fakes.runner(results, fakes.methods("off"), fakes.plan(max_context=8)).run()
        with pytest.raises(ConfigError, match="must be 'off'"):
            fakes.runner(results, fakes.methods("chain"))


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model("llama"))


@pytest.fixture(scope="module")
def merged():
    return tiny.drafter("merged", tiny.model("llama"), coupled=True)


def method(text, target, drafter):
    names = [part.name for part in getattr(drafter, "drafters", [drafter])]
    spec = parse_method(text, names)
    return EngineMethod(spec, target, drafter, Policy(quick(target, drafter)) if spec.adaptive else None)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["T=0", "T=1"])
@pytest.mark.parametrize(
    "text",
    ["chain", "tree:8", "tree:16@dflash", "tree:8@dflash+lookup", "tree:8+uncoupled", "tree:auto", "auto"],
)
def test_every_cell_gives_the_text_of_plain_decoding(target, merged, text, params):
    prompt = tiny.prompt(9) * 2
    plain = method("off", target, merged).answer(prompt, params)
    way = method(text, target, merged)
    answer = way.answer(prompt, params)
    assert answer.tokens == plain.tokens and len(plain.tokens) == 24
    assert verdict(target, prompt, plain.tokens, answer.tokens, params) == {"kind": "equal"}
    record = answer.as_dict()
    assert (
        record["tokens"] == 24
        and record["rounds"] <= 23 == plain.stats.rounds
        and plain.as_dict()["tau"] == 1
    )
    assert abs(record["total_s"] - record["ttft_s"] - record["decode_s"]) < 1e-5
    assert sum(record["accepted_depth"].values()) == record["rounds"]
    kinds = [one["kind"] for one in way.learnt()]
    assert kinds == (["policy", "latency"] if way.spec.adaptive else [])
    assert bool(record["arms"]) == way.spec.adaptive


def test_plain_decoding_carries_no_drafter_and_no_features(target, merged):
    way = method("off", target, merged)
    way.answer(tiny.prompt(5), GREEDY)
    assert way.drafter is None and target.feature_layers == ()
    method("tree:8", target, merged).answer(tiny.prompt(5), GREEDY)
    assert target.feature_layers == (0, 1)


def test_members_are_the_parts_of_the_drafter_and_nothing_else(target, merged):
    dflash, lookup, _ = merged.drafters
    assert method("chain@lookup", target, merged).drafter is lookup
    assert method("tree:8@lookup+dflash", target, merged).drafter.drafters == [dflash, lookup]
    assert method("tree:8", target, merged).drafter is merged


def test_an_uncoupled_method_drafts_as_drafters_without_coupling_do(target, merged):
    plain = tiny.drafter("merged", tiny.model("llama"), coupled=False)
    prompt = tiny.prompt(9) * 2
    hidden, never = (method(text, target, drafter).answer(prompt, SAMPLED).stats.accepted
                     for text, drafter in (("tree:8+uncoupled", merged), ("tree:8", plain)))  # fmt: skip
    coupled = method("tree:8", target, merged).answer(prompt, SAMPLED).stats.accepted
    assert hidden == never != coupled


@pytest.mark.parametrize("name", ["hf", "prompt-lookup", "assisted"])
def test_baselines_are_transformers_own_and_greedily_give_the_same_text(merged, name):
    model = tiny.model("llama", eos_token_id=7)
    target = Target(model)
    own, prompt = model.generation_config, tiny.prompt(9) * 2
    assert len(method("tree:8@dflash", target, merged).answer(prompt, GREEDY).tokens) > 0
    seen = []
    handle = model.register_forward_hook(
        lambda *_: seen.append((model.config._attn_implementation, target._hooks))
    )
    plain = EngineMethod(parse_method("off"), target, None).answer(prompt, GREEDY)
    assert seen[-1][0] == "ddtree"
    seen.clear()
    baseline = Baseline(name, target, merged)
    answer, sampled = (baseline.answer(prompt, params) for params in (GREEDY, SAMPLED))
    handle.remove()
    assert all(name != "ddtree" and not hooks for name, hooks in seen)
    assert answer.tokens == plain.tokens
    assert 0 < answer.stats.ttft < answer.stats.total
    assert model.generation_config is own and baseline.learnt() == []
    assert answer.comparable and not sampled.comparable
    assert sampled.tokens == baseline.answer(prompt, SAMPLED).tokens


def test_unknown_baselines_and_a_missing_draft_model_are_named(target):
    lookup = Lookup(vocab_size=target.vocab_size)
    with pytest.raises(ConfigError, match="unknown baseline 'vllm': choose from hf, prompt-lookup, assisted"):
        Baseline("vllm", target, lookup)
    for drafter in (lookup, None):
        with pytest.raises(ConfigError, match="needs a draft model: give --drafter draft:MODEL"):
            Baseline("assisted", target, drafter)


def test_a_difference_in_float32_is_one_however_near_the_tie(target, monkeypatch):
    answers = [3, 4, 5], [3, 9, 5]
    difference = SimpleNamespace(near_tie=True, index=1, tokens=(4, 9), gap=0.01, noise=0.02)
    monkeypatch.setattr("ddtree.bench.near_ties.first_difference", lambda *_: difference)
    found = verdict(target, [1], *answers, GREEDY)
    assert found == {"kind": "different", "at": 1, "tokens": [4, 9], "gap": 0.01, "noise": 0.02}
    half = SimpleNamespace(dtype=torch.bfloat16, noise=0.0)
    assert verdict(half, [1], *answers, GREEDY)["kind"] == "near-tie"
    difference.near_tie, difference.gap = False, float("inf")
    assert verdict(half, [1], *answers, GREEDY) | {"noise": 0} == {
        "kind": "different", "at": 1, "tokens": [4, 9], "gap": None, "noise": 0,
    }  # fmt: skip
