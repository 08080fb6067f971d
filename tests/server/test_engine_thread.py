"""The engine's thread: answers as if alone, rows freed, limits kept, errors contained."""

import json
import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import ddtree
import talker
from ddtree.errors import CacheMemoryError, ConfigError, PromptError
from ddtree.sampling.params import SamplingParams
from ddtree.server.config import DraftSettings, ServerLimits
from ddtree.server.engine_thread import EngineThread
from ddtree.server.handle import BusyError, ClosingError, EngineError, GenerationRequest, TimeoutReached
from fakes import eventually, ready

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


@contextmanager
def started(**options):
    made = make(**options)
    made.start()
    yield made
    made.shutdown(0)
    nothing_is_left(made)
    made.model.close()


@pytest.fixture
def worker():
    with started() as made:
        yield made


def nothing_is_left(worker):
    engine = worker.model.engine
    assert engine.idle and engine._cache.rows == 0 and not worker._handles and worker._open == 0
    assert worker.state()["kv"]["used"] == 0
    if engine.drafter is not None:
        assert not engine.drafter._rows


def ask(worker, prompt="to be or not to be", reader=None, drafting=None, **params):
    reader = reader or Reader()
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **params})
    request = GenerationRequest(worker.model.encode(prompt), params, drafting)
    (reader.handle,) = worker.submit([request], reader)
    return reader


def alone(prompt, **params):
    with ddtree.load(talker.model(), "none", tokenizer=talker.tokenizer()) as model:
        return model.generate(prompt, **{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **params})


def test_eight_at_once_are_each_as_alone():
    with started(max_rows=8) as worker:
        prompts = ["ab" * length for length in range(1, 9)]
        settings = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
        drafting = [{"method": method} for method in ("off", "chain", "tree", "auto")]
        readers = [
            ask(worker, prompt, drafting=drafting[at % 4], **settings[at % 2])
            for at, prompt in enumerate(prompts)
        ]
        for at, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
            result, expected = reader.wait().result, alone(prompt, **settings[at % 2])
            assert reader.tokens == result.token_ids == expected.token_ids
            assert reader.text == result.text == expected.text
            assert sum(len(event.origins) for event in reader.events) == len(reader.tokens)


def test_the_first_answer_is_drafted_for_automatically(worker):
    result = ask(worker).wait().result
    assert result.stats.method == "auto" and worker.model.engine.policy is not None
    assert worker.health == {"live": True, "ready": True, "status": "ready", "error": None}


def test_origins_tell_accepted_depths_from_bonus_tokens(worker):
    reader = ask(worker, "abcabcabc", drafting={"method": "tree", "budget": 8}, max_tokens=60)
    reader.wait()
    origins = [origin for event in reader.events for origin in event.origins]
    accepted = reader.events[-1].result.stats.accepted
    assert sum(origin > 0 for origin in origins) == sum(depth * times for depth, times in accepted.items())
    assert origins[0] == 0 and max(origins) == max(accepted) > 0


def test_logprobs_come_with_their_tokens(worker):
    reader = ask(worker, logprobs=2)
    result = reader.wait().result
    assert [one.token for event in reader.events for one in event.logprobs] == result.token_ids


def test_what_cannot_work_is_refused_at_once(worker):
    params = SamplingParams()
    for prompt, drafting, error in (
        ([], None, PromptError), ([9999], None, PromptError), ([5] * 600, None, PromptError),
        ([5], {"method": "magic"}, ConfigError), ([5], {"dept": 3}, ConfigError),
        ([5], {"drafter": "absent"}, ConfigError),
    ):  # fmt: skip
        with pytest.raises(error):
            worker.submit([GenerationRequest(prompt, params, drafting)], Reader())
    with pytest.raises(ConfigError, match="logit_bias"):
        worker.submit([GenerationRequest([5], SamplingParams(logit_bias={9999: 1}))], Reader())


def test_a_cancelled_answer_frees_its_row_within_a_round(worker):
    whole = alone("to be or not to be", max_tokens=400).token_ids
    stays = ask(worker, max_tokens=300)
    reader = ask(worker, max_tokens=400)
    assert reader.begun.wait(PATIENCE)
    worker.cancel(reader.handle)
    last = reader.wait()
    assert len(worker.model.engine.running) <= 1
    assert last.result.finish_reason == "cancelled"
    assert reader.tokens == last.result.token_ids == whole[: len(reader.tokens)]
    assert stays.wait().result.finish_reason == "length"
    worker.cancel(reader.handle)


def test_a_full_queue_refuses_and_takes_more_when_there_is_room():
    with started(max_rows=1, limits=ServerLimits(max_waiting=2)) as worker:
        readers = [ask(worker, max_tokens=200) for _ in range(3)]
        with pytest.raises(BusyError) as refused:
            ask(worker)
        assert refused.value.retry_after >= 1
        worker.cancel(readers[0].handle)
        readers[0].wait()
        eventually(lambda: worker._open < 3)
        readers.append(ask(worker, max_tokens=3))
        assert [reader.wait().result.finish_reason for reader in readers] == ["cancelled", *3 * ["length"]]


def test_several_answers_are_admitted_together_or_not_at_all():
    with started(max_rows=1, limits=ServerLimits(max_waiting=2)) as worker:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        reader, good, bad = Reader(), GenerationRequest([5], params), GenerationRequest([], params)
        with pytest.raises(BusyError):
            worker.submit([good] * 4, reader)
        with pytest.raises(PromptError):
            worker.submit([good, bad], reader)
        worker.submit([good] * 3, reader)
        eventually(lambda: sum(delta.last for delta in reader.events) == 3)
        eventually(lambda: worker._open == 0)


def test_shutdown_finishes_what_runs_and_refuses_what_comes(worker):
    readers = [ask(worker, max_tokens=40) for _ in range(6)]
    worker.shutdown(PATIENCE)
    assert [reader.wait().result.finish_reason for reader in readers] == ["length"] * 6
    with pytest.raises(ClosingError):
        ask(worker)
    assert worker.health["status"] == "stopped" and not worker.health["live"]


def test_shutdown_ends_what_takes_too_long(worker):
    reader = ask(worker, max_tokens=450)
    assert reader.begun.wait(PATIENCE)
    worker.shutdown(0)
    last = reader.wait()
    assert isinstance(last.error, ClosingError) and last.result is None


def test_an_answer_may_take_only_so_long():
    with started(limits=ServerLimits(request_timeout=0.05)) as worker:
        slow = ask(worker, max_tokens=450, processors=[slowly])
        assert isinstance(slow.wait().error, TimeoutReached)


def slowly(prefix, logits):
    time.sleep(0.01)
    return logits


def test_drafting_changes_live_where_a_request_does_not_fix_it():
    with started(drafting=DraftSettings(method="off")) as worker:
        free = ask(worker, max_tokens=300)
        fixed = ask(worker, max_tokens=300, drafting={"method": "off"})
        partly = ask(worker, max_tokens=300, drafting={"depth": 1})
        for reader in (free, fixed, partly):
            assert reader.begun.wait(PATIENCE)
        worker.set_drafting(DraftSettings(method="tree", budget=8))
        results = [reader.wait().result for reader in (free, fixed, partly)]
        text = alone("to be or not to be", max_tokens=300).token_ids
        assert all(result.token_ids == text for result in results)
        arms = [result.stats.arms for result in results]
        assert arms[0]["off"] and arms[0]["tree@lookup"]
        assert set(arms[1]) == {"off"}
        assert arms[2]["tree@lookup"] and max(results[2].stats.accepted) <= 1 < max(results[0].stats.accepted)


def test_one_of_several_drafters_can_be_named(tmp_path):
    drafters = ["lookup", f"draft:{talker.save(tmp_path)}"]
    model = ddtree.load(talker.model(), drafters, tokenizer=talker.tokenizer())
    worker = EngineThread(model, name="tiny", drafting=DraftSettings(method="tree", budget=4))
    with pytest.raises(ConfigError, match="not loaded"):
        worker.set_drafting(DraftSettings(drafter="absent"))
    worker.start()
    names = model.engine.members
    one = ask(worker, drafting={"drafter": names[1]}).wait().result
    assert set(one.stats.arms) == {f"tree@{names[1]}"}
    both = ask(worker).wait().result
    assert set(both.stats.arms) == {f"tree@{names[0]}+{names[1]}"}
    assert one.token_ids == both.token_ids
    worker.shutdown(0)


def test_a_failing_reader_ends_its_answer_alone(worker):
    ask(worker, reader=Failing())
    other = ask(worker)
    assert other.wait().result.finish_reason == "length"
    eventually(lambda: worker._open == 0)


class Failing(Reader):
    def put(self, item):
        raise RuntimeError("no reader")


def test_a_failing_processor_ends_its_answer_alone(worker):
    def fail(prefix, logits):
        if len(prefix) > 25:
            raise ZeroDivisionError("mine")
        return logits

    readers = ask(worker, processors=[fail]), ask(worker)
    assert isinstance(readers[0].wait().error, ZeroDivisionError)
    assert readers[1].wait().result.token_ids == alone("to be or not to be").token_ids


def test_a_failing_watcher_spoils_no_answer(worker):
    def fail(report):
        raise RuntimeError("no watcher")

    reports = []
    worker.book.watch(fail)
    stop = worker.book.watch(reports.append)
    ask(worker, drafting={"method": "tree", "budget": 4}, max_tokens=80).wait()
    assert reports and fail not in worker.book._watchers
    stop()
    told = len(reports)
    ask(worker).wait()
    assert len(reports) == told


def test_an_engine_error_ends_all_answers_and_the_next_are_made(worker, monkeypatch):
    ready(worker)
    target = worker.model.target
    whole = target.verify
    readers = [ask(worker, max_tokens=400) for _ in range(6)]
    assert readers[0].begun.wait(PATIENCE)
    monkeypatch.setattr(target, "verify", broken(RuntimeError("device lost")))
    for reader in readers:
        last = reader.wait()
        assert isinstance(last.error, EngineError) and "device lost" in str(last.error)
    assert "device lost" in worker.health["error"] and worker.health["ready"]
    for _ in range(2):
        assert ask(worker).wait().error is not None
    assert worker.health["status"] == "failing" and not worker.health["ready"]
    monkeypatch.setattr(target, "verify", whole)
    assert ask(worker).wait().result.token_ids == alone("to be or not to be").token_ids
    assert worker.health == {"live": True, "ready": True, "status": "ready", "error": None}


def broken(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_want_of_memory_is_told_as_such(worker, monkeypatch):
    ready(worker)
    monkeypatch.setattr(worker.model.target, "verify", broken(torch.OutOfMemoryError("full")))
    assert isinstance(ask(worker).wait().error, CacheMemoryError)


def test_a_row_that_cannot_be_freed_costs_the_engine_and_not_the_worker(worker, monkeypatch):
    ready(worker)
    first = worker.model.engine
    monkeypatch.setattr(first._cache, "drop_row", broken(RuntimeError("stuck")))
    readers = [ask(worker, max_tokens=5), ask(worker, max_tokens=400)]
    assert isinstance(readers[1].wait().error, EngineError)
    readers[0].wait()
    result = ask(worker, drafting={"method": "tree", "budget": 4}).wait().result
    assert worker.model.engine is not first and "tree@lookup" in result.stats.arms
    assert result.token_ids == alone("to be or not to be").token_ids


def test_a_drafter_whose_rows_cannot_be_freed_is_given_up(monkeypatch):
    with started(drafting=DraftSettings(drafter="lookup")) as worker:
        ready(worker)
        monkeypatch.setattr(worker.model.engine.drafter, "drop_row", broken(RuntimeError("stuck")))
        assert ask(worker, max_tokens=5).wait().last
        eventually(lambda: worker.model.engine.drafter is None)
        assert set(ask(worker).wait().result.stats.arms) == {"off"}


def test_a_worker_that_cannot_go_on_says_so_and_leaves_nobody_waiting(monkeypatch):
    worker = make()
    worker.start()
    ready(worker)
    monkeypatch.setattr(worker.model.engine._cache, "drop_row", broken(RuntimeError("stuck")))
    monkeypatch.setattr(worker.model, "renew", broken(RuntimeError("no more")))
    reader, request = Reader(), GenerationRequest([5, 6], SamplingParams(max_tokens=9, seed=1))
    worker.submit([request] * 6, reader)
    eventually(lambda: sum(isinstance(delta.error, ClosingError) for delta in reader.events) == 6)
    eventually(lambda: not worker.health["live"])
    assert worker.health["status"] == "failed" and "no more" in worker.health["error"]
    with pytest.raises(ClosingError, match="no more"):
        ask(worker)
    worker.shutdown(0)


def test_nothing_runs_while_there_is_nothing_to_do(worker):
    ask(worker).wait()
    eventually(lambda: worker._open == 0)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_memory_of_the_last_answer_is_no_longer_told_once_it_is_cancelled(worker):
    reader = ask(worker, max_tokens=400, ignore_eos=True)
    assert reader.begun.wait(PATIENCE) and worker.state()["kv"]["used"] > 0
    worker.cancel(reader.handle)
    assert reader.wait().result.finish_reason == "cancelled"
    assert worker.state()["kv"]["used"] == 0


def test_random_submissions_and_cancels_leave_no_row_behind(worker):
    rng = random.Random(0)
    readers = []
    for turn in range(200):
        try:
            drafting = {"method": rng.choice(["off", "chain", "tree", "auto"])}
            prompt, length = "ab" * rng.randint(1, 30), rng.randint(1, 12)
            readers.append(ask(worker, prompt, drafting=drafting, max_tokens=length))
        except BusyError:
            time.sleep(0.02)
        if readers and rng.random() < 0.4:
            worker.cancel(rng.choice(readers).handle)
        if turn % 20 == 0:
            worker.set_drafting(DraftSettings(method=rng.choice(["off", "tree", "auto"])))
    reasons = {reader.wait().result.finish_reason for reader in readers}
    assert reasons == {"length", "cancelled"} and len(readers) > 60
    eventually(lambda: worker._open == 0)
    nothing_is_left(worker)


def test_state_and_reports_are_plain_values(worker):
    reports = []
    worker.book.watch(reports.append)
    ask(worker, "abcabcabc", drafting={"budget": 8}, max_tokens=60).wait()
    ask(worker, "abcabcabc", drafting={"method": "tree", "budget": 8}, max_tokens=60).wait()
    ask(worker, "abcabcabc", drafting={"method": "off"}, max_tokens=60).wait()
    eventually(lambda: worker._open == 0)
    state = json.loads(json.dumps(worker.state()))
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
