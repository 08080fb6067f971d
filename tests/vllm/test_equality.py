"""The text is that of stock vLLM, whatever the trees: float32, greedy."""

from __future__ import annotations

import pytest
from engines import PROMPTS, TOKENS, answers, counters, drafted, engine, oracle, params
from vllm.v1.core.sched.scheduler import Scheduler

from scripted import Scripted


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def known(request, checkpoints):
    """A model's folder, and the answers of stock vLLM to each prompt by itself."""
    folder = checkpoints(request.param)
    with engine(folder) as stock:
        return folder, [answers(stock, [prompt], params(TOKENS))[0] for prompt in PROMPTS]


def test_trees_that_hold_the_answer_give_it_in_fewer_steps(known):
    with engine(known[0], oracle(known)) as made:
        for prompt, answer in zip(PROMPTS, known[1], strict=True):
            assert answers(made, [prompt], params(TOKENS)) == [answer]
        found = counters(made)
    assert found["nodes"] > found["steps"]
    assert found["accepted"] > 2 * found["steps"], "trees are hardly accepted, so that nothing is shown"


@pytest.mark.parametrize(
    ("times", "arguments"),
    [
        (1, {}),
        (2, {"enable_prefix_caching": True}),
        (1, {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}),
        # Four trees of 17 nodes, and 40 tokens a step: the last ones are cut, or wait.
        (1, {"max_num_batched_tokens": 40}),
    ],
    ids=["together", "prefix cache", "prompts in chunks", "trees that the scheduler cuts"],
)
def test_requests_decoded_together_are_as_if_alone(known, times, arguments):
    found = drafted(known, times=times, **arguments)
    assert found["accepted"] > (0 if arguments else found["steps"])


@pytest.mark.parametrize("caching", [False, True])
def test_after_preemption(known, monkeypatch, caching):
    preempted = []
    stock = Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return stock(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    # Four answers of up to 104 tokens, and their trees, where there is room for two or three.
    assert drafted(known, num_gpu_blocks_override=11, enable_prefix_caching=caching)["accepted"]
    assert preempted


@pytest.mark.parametrize("nodes", [1, 5, 30])
def test_until_the_context_is_full(known, nodes):
    context = 64
    with engine(known[0], oracle(known), max_model_len=context, nodes=nodes, budget=nodes) as made:
        found = answers(made, PROMPTS, params(1000))
    for prompt, own, text in zip(PROMPTS, found, known[1], strict=True):
        assert own == text[: context - len(prompt)]


def test_an_answer_may_be_of_one_token(known):
    with engine(known[0], oracle(known)) as made:
        for tokens in (1, 2, 3):
            assert answers(made, PROMPTS, params(tokens)) == [text[:tokens] for text in known[1]]


def test_a_prompt_whose_keys_and_values_are_known_but_for_one_token(known):
    # The engine fills such a request's first step up with tokens that are none, where others are running.
    prompts = [(prompt * 20)[:65] for prompt in PROMPTS]
    with engine(known[0], enable_prefix_caching=True) as stock:
        expected = [answers(stock, [prompt], params(TOKENS))[0] for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    with engine(
        known[0], lambda spec, target: Scripted(texts), enable_prefix_caching=True, max_num_seqs=2
    ) as made:
        for _ in range(2):
            assert answers(made, prompts, params(TOKENS)) == expected


def test_stop_tokens_end_an_answer_within_a_path(known):
    with engine(known[0], oracle(known)) as made:
        for prompt, text in zip(PROMPTS, known[1], strict=True):
            stop = text[10]
            found = answers(made, [prompt], params(TOKENS, stop_token_ids=[stop]))[0]
            assert found == text[: text.index(stop) + 1]


def test_requests_that_are_given_up_leave_the_others_and_nothing_else(known):
    found = {}
    with engine(known[0], oracle(known)) as made:
        core = made.llm_engine
        for name, prompt in zip("abcd", PROMPTS, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, params(TOKENS))
        for _ in range(3):
            core.step()
        core.abort_request(["b", "c"])
        while core.has_unfinished_requests():
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in core.step()}
        # What has ended is told to the worker with the next step.
        assert answers(made, PROMPTS[:1], params(1)) == [known[1][0][:1]]
        worker = core.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        assert len(runner.states) == len(runner._drafter_rows.rows) == 1
    assert (found["a"], found["d"]) == (known[1][0], known[1][3])


def test_requests_may_ask_for_less(known):
    asked = [
        {},
        {"method": "off"},
        {"method": "chain", "budget": 3},
        {"depth": 2},
    ]
    with engine(known[0], oracle(known)) as made:
        given = [params(TOKENS, extra_args={"ddtree": own}) for own in asked]
        assert answers(made, PROMPTS, given) == known[1]
        found = counters(made)
    assert found["arms"].keys() == {"off", "tree@scripted", "chain@scripted"}
    assert found["arms"]["off"] >= TOKENS
