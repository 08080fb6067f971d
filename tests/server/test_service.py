"""The engine's thread: answers as if alone, rows freed, limits kept, errors contained."""

import json
import random
import threading
import time

import pytest
import torch

import ddtree
import talker
from ddtree.errors import CacheMemoryError, ConfigError, PromptError
from ddtree.sampling.params import SamplingParams
from ddtree.server.config import DraftSettings, ServerLimits
from ddtree.server.handle import (
    BusyError,
    ClosingError,
    EngineError,
    GenerationRequest,
    TimeoutReached,
)
from ddtree.server.worker import EngineThread

PATIENCE = 60


class Reader:
    """Collects the events of one answer."""

    def __init__(self):
        self.events, self.over, self.begun = [], threading.Event(), threading.Event()

    def put(self, item):
        _, delta = item
        self.events.append(delta)
        self.begun.set()
        if delta.last:
            self.over.set()

    def wait(self):
        assert self.over.wait(PATIENCE), "the answer never ended"
        return self.events[-1]

    @property
    def text(self):
        return "".join(event.text for event in self.events)

    @property
    def tokens(self):
        return [token for event in self.events for token in event.tokens]


def make(drafter="lookup", max_rows=4, **options):
    model = ddtree.load(talker.model(), drafter, tokenizer=talker.tokenizer(), max_rows=max_rows)
    return EngineThread(model, name="tiny", **options)


@pytest.fixture
def service():
    made = make()
    made.start()
    yield made
    made.shutdown(0)
    nothing_is_left(made)
    made.model.close()


def nothing_is_left(service):
    engine = service.model.engine
    assert engine.idle and engine._cache.rows == 0 and not service._handles and service._open == 0
    assert service.state()["kv"]["used"] == 0
    if engine.drafter is not None:
        assert not engine.drafter._rows


def ask(service, prompt="to be or not to be", reader=None, drafting=None, text=True, **params):
    reader = reader or Reader()
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **params})
    request = GenerationRequest(service.model.encode(prompt), params, drafting, text)
    (reader.handle,) = service.submit([request], reader)
    return reader


def eventually(true):
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def alone(prompt, **params):
    with ddtree.load(talker.model(), "none", tokenizer=talker.tokenizer()) as model:
        return model.generate(prompt, **{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **params})


def test_eight_at_once_are_each_as_alone():
    service = make(max_rows=8)
    service.start()
    prompts = ["ab" * length for length in range(1, 9)]
    settings = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    drafting = [{"method": method} for method in ("off", "chain", "tree", "auto")]
    readers = [
        ask(service, prompt, drafting=drafting[at % 4], **settings[at % 2])
        for at, prompt in enumerate(prompts)
    ]
    for at, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        result, expected = reader.wait().result, alone(prompt, **settings[at % 2])
        assert reader.tokens == result.token_ids == expected.token_ids
        assert reader.text == result.text == expected.text
        assert sum(len(event.origins) for event in reader.events) == len(reader.tokens)
    service.shutdown(0)
    nothing_is_left(service)


def test_the_first_answer_is_drafted_for_automatically(service):
    result = ask(service).wait().result
    assert result.stats.method == "auto" and service.model.engine.policy is not None
    assert service.wait_ready(PATIENCE) and service.health == {
        "live": True, "ready": True, "status": "ready", "error": None,
    }  # fmt: skip


def test_origins_tell_accepted_depths_from_bonus_tokens(service):
    reader = ask(service, "abcabcabc", drafting={"method": "tree", "budget": 8}, max_tokens=60)
    reader.wait()
    origins = [origin for event in reader.events for origin in event.origins]
    accepted = reader.events[-1].result.stats.accepted
    assert sum(origin > 0 for origin in origins) == sum(depth * times for depth, times in accepted.items())
    assert origins[0] == 0 and max(origins) == max(accepted) > 0


def test_logprobs_come_with_their_tokens(service):
    reader = ask(service, logprobs=2)
    result = reader.wait().result
    assert [one.token for event in reader.events for one in event.logprobs] == result.token_ids


def test_without_text_tokens_come_alone(service):
    reader = ask(service, text=False)
    assert reader.wait().result.text == "" == reader.text and len(reader.tokens) == 30
    with pytest.raises(ConfigError, match="stop strings"):
        ask(service, text=False, stop="x")


def test_what_cannot_work_is_refused_at_once(service):
    params = SamplingParams()
    for prompt, drafting, error in (
        ([], None, PromptError),
        ([9999], None, PromptError),
        ([5] * 600, None, PromptError),
        ([5], {"method": "magic"}, ConfigError),
        ([5], {"dept": 3}, ConfigError),
        ([5], {"drafter": "absent"}, ConfigError),
    ):
        with pytest.raises(error):
            service.submit([GenerationRequest(prompt, params, drafting)], Reader())
    with pytest.raises(ConfigError, match="logit_bias"):
        service.submit([GenerationRequest([5], SamplingParams(logit_bias={9999: 1}))], Reader())


def test_a_cancelled_answer_frees_its_row_within_a_round(service):
    whole = alone("to be or not to be", max_tokens=400).token_ids
    stays = ask(service, max_tokens=300)
    reader = ask(service, max_tokens=400)
    assert reader.begun.wait(PATIENCE)
    service.cancel(reader.handle)
    last = reader.wait()
    assert len(service.model.engine.running) <= 1
    assert last.result.finish_reason == "cancelled"
    assert reader.tokens == last.result.token_ids == whole[: len(reader.tokens)]
    assert stays.wait().result.finish_reason == "length"
    service.cancel(reader.handle)


def test_a_full_queue_refuses_and_takes_more_when_there_is_room():
    service = make(max_rows=1, limits=ServerLimits(max_waiting=2))
    service.start()
    readers = [ask(service, max_tokens=200) for _ in range(3)]
    with pytest.raises(BusyError) as refused:
        ask(service)
    assert refused.value.retry_after >= 1
    service.cancel(readers[0].handle)
    readers[0].wait()
    eventually(lambda: service._open < 3)
    readers.append(ask(service, max_tokens=3))
    assert [reader.wait().result.finish_reason for reader in readers] == ["cancelled", *3 * ["length"]]
    service.shutdown(0)
    nothing_is_left(service)


def test_several_answers_are_admitted_together_or_not_at_all():
    service = make(max_rows=1, limits=ServerLimits(max_waiting=2))
    service.start()
    params = SamplingParams(max_tokens=3, temperature=0.0)
    reader, good, bad = Reader(), GenerationRequest([5], params), GenerationRequest([], params)
    with pytest.raises(BusyError):
        service.submit([good] * 4, reader)
    with pytest.raises(PromptError):
        service.submit([good, bad], reader)
    service.submit([good] * 3, reader)
    eventually(lambda: sum(delta.last for delta in reader.events) == 3)
    eventually(lambda: service._open == 0)
    service.shutdown(0)


def test_shutdown_finishes_what_runs_and_refuses_what_comes(service):
    readers = [ask(service, max_tokens=40) for _ in range(6)]
    service.shutdown(PATIENCE)
    assert [reader.wait().result.finish_reason for reader in readers] == ["length"] * 6
    with pytest.raises(ClosingError):
        ask(service)
    assert service.health["status"] == "stopped" and not service.health["live"]


def test_shutdown_ends_what_takes_too_long(service):
    reader = ask(service, max_tokens=450)
    assert reader.begun.wait(PATIENCE)
    service.shutdown(0)
    last = reader.wait()
    assert isinstance(last.error, ClosingError) and last.result is None


def test_an_answer_may_take_only_so_long():
    service = make(limits=ServerLimits(request_timeout=0.05))
    service.start()
    slow = ask(service, max_tokens=450, processors=[slowly])
    assert isinstance(slow.wait().error, TimeoutReached)
    service.shutdown(0)
    nothing_is_left(service)


def slowly(prefix, logits):
    time.sleep(0.01)
    return logits


def test_drafting_changes_live_where_a_request_does_not_fix_it():
    service = make(drafting=DraftSettings(method="off"))
    service.start()
    free = ask(service, max_tokens=300)
    fixed = ask(service, max_tokens=300, drafting={"method": "off"})
    partly = ask(service, max_tokens=300, drafting={"depth": 1})
    for reader in (free, fixed, partly):
        assert reader.begun.wait(PATIENCE)
    service.set_drafting(DraftSettings(method="tree", budget=8))
    results = [reader.wait().result for reader in (free, fixed, partly)]
    text = alone("to be or not to be", max_tokens=300).token_ids
    assert all(result.token_ids == text for result in results)
    arms = [result.stats.arms for result in results]
    assert arms[0]["off"] and arms[0]["tree@lookup"]
    assert set(arms[1]) == {"off"}
    assert arms[2]["tree@lookup"] and max(results[2].stats.accepted) <= 1 < max(results[0].stats.accepted)
    service.shutdown(0)


def test_one_of_several_drafters_can_be_named(tmp_path):
    drafters = ["lookup", f"draft:{talker.save(tmp_path)}"]
    model = ddtree.load(talker.model(), drafters, tokenizer=talker.tokenizer())
    service = EngineThread(model, name="tiny", drafting=DraftSettings(method="tree", budget=4))
    with pytest.raises(ConfigError, match="not loaded"):
        service.set_drafting(DraftSettings(drafter="absent"))
    service.start()
    names = model.engine.members
    one = ask(service, drafting={"drafter": names[1]}).wait().result
    assert set(one.stats.arms) == {f"tree@{names[1]}"}
    both = ask(service).wait().result
    assert set(both.stats.arms) == {f"tree@{names[0]}+{names[1]}"}
    assert one.token_ids == both.token_ids
    service.shutdown(0)


def test_a_failing_reader_ends_its_answer_alone(service):
    ask(service, reader=Failing())
    other = ask(service)
    assert other.wait().result.finish_reason == "length"
    eventually(lambda: service._open == 0)


class Failing(Reader):
    def put(self, item):
        raise RuntimeError("no reader")


def test_a_failing_processor_ends_its_answer_alone(service):
    def fail(prefix, logits):
        if len(prefix) > 25:
            raise ZeroDivisionError("mine")
        return logits

    readers = ask(service, processors=[fail]), ask(service)
    assert isinstance(readers[0].wait().error, ZeroDivisionError)
    assert readers[1].wait().result.token_ids == alone("to be or not to be").token_ids


def test_a_failing_watcher_spoils_no_answer(service):
    def fail(report):
        raise RuntimeError("no watcher")

    reports = []
    service.book.watch(fail)
    stop = service.book.watch(reports.append)
    ask(service, drafting={"method": "tree", "budget": 4}, max_tokens=80).wait()
    assert reports and fail not in service.book._watchers
    stop()
    told = len(reports)
    ask(service).wait()
    assert len(reports) == told


def test_an_engine_error_ends_all_answers_and_the_next_are_made(service, monkeypatch):
    service.wait_ready(PATIENCE)
    target = service.model.target
    whole = target.verify
    readers = [ask(service, max_tokens=400) for _ in range(6)]
    assert readers[0].begun.wait(PATIENCE)
    monkeypatch.setattr(target, "verify", broken(RuntimeError("device lost")))
    for reader in readers:
        last = reader.wait()
        assert isinstance(last.error, EngineError) and "device lost" in str(last.error)
    assert "device lost" in service.health["error"] and service.health["ready"]
    for _ in range(2):
        assert ask(service).wait().error is not None
    assert service.health["status"] == "failing" and not service.health["ready"]
    monkeypatch.setattr(target, "verify", whole)
    assert ask(service).wait().result.token_ids == alone("to be or not to be").token_ids
    assert service.health == {"live": True, "ready": True, "status": "ready", "error": None}


def broken(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_want_of_memory_is_told_as_such(service, monkeypatch):
    service.wait_ready(PATIENCE)
    monkeypatch.setattr(service.model.target, "verify", broken(torch.OutOfMemoryError("full")))
    assert isinstance(ask(service).wait().error, CacheMemoryError)


def test_a_row_that_cannot_be_freed_costs_the_engine_and_not_the_service(service, monkeypatch):
    service.wait_ready(PATIENCE)
    first = service.model.engine
    monkeypatch.setattr(first._cache, "drop_row", broken(RuntimeError("stuck")))
    readers = [ask(service, max_tokens=5), ask(service, max_tokens=400)]
    assert isinstance(readers[1].wait().error, EngineError)
    readers[0].wait()
    result = ask(service, drafting={"method": "tree", "budget": 4}).wait().result
    assert service.model.engine is not first and "tree@lookup" in result.stats.arms
    assert result.token_ids == alone("to be or not to be").token_ids


def test_a_drafter_whose_rows_cannot_be_freed_is_given_up(monkeypatch):
    service = make(drafting=DraftSettings(drafter="lookup"))
    service.start()
    service.wait_ready(PATIENCE)
    monkeypatch.setattr(service.model.engine.drafter, "drop_row", broken(RuntimeError("stuck")))
    assert ask(service, max_tokens=5).wait().last
    eventually(lambda: service.model.engine.drafter is None)
    assert set(ask(service).wait().result.stats.arms) == {"off"}
    service.shutdown(0)


def test_a_service_that_cannot_go_on_says_so_and_leaves_nobody_waiting(monkeypatch):
    service = make()
    service.start()
    service.wait_ready(PATIENCE)
    monkeypatch.setattr(service.model.engine._cache, "drop_row", broken(RuntimeError("stuck")))
    monkeypatch.setattr(service.model, "renew", broken(RuntimeError("no more")))
    reader, request = Reader(), GenerationRequest([5, 6], SamplingParams(max_tokens=9, seed=1))
    service.submit([request] * 6, reader)
    eventually(lambda: sum(isinstance(delta.error, ClosingError) for delta in reader.events) == 6)
    eventually(lambda: not service.health["live"])
    assert service.health["status"] == "failed" and "no more" in service.health["error"]
    with pytest.raises(ClosingError, match="no more"):
        ask(service)
    service.shutdown(0)


def test_nothing_runs_while_there_is_nothing_to_do(service):
    ask(service).wait()
    eventually(lambda: service._open == 0)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_memory_of_the_last_answer_is_no_longer_told_once_it_is_cancelled(service):
    reader = ask(service, max_tokens=400, ignore_eos=True)
    assert reader.begun.wait(PATIENCE) and service.state()["kv"]["used"] > 0
    service.cancel(reader.handle)
    assert reader.wait().result.finish_reason == "cancelled"
    assert service.state()["kv"]["used"] == 0


def test_random_submissions_and_cancels_leave_no_row_behind(service):
    rng = random.Random(0)
    readers = []
    for turn in range(200):
        try:
            readers.append(
                ask(
                    service,
                    "ab" * rng.randint(1, 30),
                    drafting={"method": rng.choice(["off", "chain", "tree", "auto"])},
                    max_tokens=rng.randint(1, 12),
                )
            )
        except BusyError:
            time.sleep(0.02)
        if readers and rng.random() < 0.4:
            service.cancel(rng.choice(readers).handle)
        if turn % 20 == 0:
            service.set_drafting(DraftSettings(method=rng.choice(["off", "tree", "auto"])))
    reasons = {reader.wait().result.finish_reason for reader in readers}
    assert reasons == {"length", "cancelled"} and len(readers) > 60
    eventually(lambda: service._open == 0)
    nothing_is_left(service)


def test_state_and_reports_are_plain_values(service):
    reports = []
    service.book.watch(reports.append)
    ask(service, "abcabcabc", drafting={"budget": 8}, max_tokens=60).wait()
    ask(service, "abcabcabc", drafting={"method": "tree", "budget": 8}, max_tokens=60).wait()
    ask(service, "abcabcabc", drafting={"method": "off"}, max_tokens=60).wait()
    eventually(lambda: service._open == 0)
    state = json.loads(json.dumps(service.state()))
    assert (state["model"], state["drafters"], state["rows"], state["waiting"]) == ("tiny", ["lookup"], 0, 0)
    assert state["drafting"] == {"method": "auto", "depth": 16, "budget": "auto", "drafter": None}
    assert state["rolling"]["tau"] >= 1 and state["rolling"]["by_arm"]["tree@lookup"]["rounds"] > 0
    answers = {kind: state["rolling"][kind]["answers"] for kind in ("drafted", "plain")}
    assert min(answers.values()) >= 1 and sum(answers.values()) == 3
    assert state["controller"][0]["load"] == 1 and state["controller"][0]["arm"]
    assert 0 < state["accepted_per_depth"][0] <= 1 and len(state["accepted_per_depth"]) == 16
    report = json.loads(json.dumps(next(one for one in reports if one["tree"])))
    tree = report["tree"]
    sizes = {len(tree[name]) for name in ("tokens", "parents", "depths", "logprobs")}
    assert len(sizes) == 1 and tree["path"][0] == 0 and max(tree["path"]) < sizes.pop()
    assert report["rows"] == len(report["accepted"]) == len(report["nodes"]) == 1
    assert {"draft", "verify"} <= set(report["seconds"])
