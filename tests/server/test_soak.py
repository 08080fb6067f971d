"""scripts/soak.py: a short soak of a tiny model, and that it sees what it is there to see."""

import asyncio
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import ddtree
import fakes
import talker
from ddtree.server.engine_thread import EngineThread
from ddtree.server.handle import BusyError

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts():
    """The script and its traffic, as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module("soak"), importlib.import_module("soak_traffic")


def traffic(module, address, expected="hello"):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    case = module.Case(module.CHAT, body, ((expected, "stop"),))
    return module.Traffic(address, None, [case], ["lookup"], 512, random.Random(0), deadline=5.0)


def press(module, worker, acts, expected="hello", seconds=0.5):
    """Some acts alone on a worker; gives the traffic."""
    with fakes.served(worker) as address:
        made = traffic(module, address, expected)
        made._acts = {getattr(made, f"_{name}"): 1 for name in acts}
        asyncio.run(made.run(2, seconds))
    return made


@pytest.mark.exhaustive
def test_a_tiny_model_bears_ten_seconds_of_everything(tmp_path):
    target = talker.save(tmp_path / "tiny", max_position_embeddings=1024)
    out = tmp_path / "out.json"
    command = [
        sys.executable, SCRIPTS / "soak.py", "--target", target, "--serve=--drafter=lookup", "--serve=--device=cpu",
        "--minutes", "0.17", "--cases", "12", "--deadline", "60", "--out", out,
    ]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["verdict"] == "passed" and "soak: passed" in done.stdout
    assert found["counts"]["answers held against what they are alone"] > 10
    assert found["after"]["rows"] == found["after"]["waiting"] == found["after"]["kv_bytes"] == 0


def test_answers_as_expected_pass_and_others_do_not(scripts):
    acts = ("whole", "stream", "break_off", "give_up", "half")
    good = press(scripts[1], fakes.FakeWorker(), acts)
    assert not good.wrongs and good.counts["answers held against what they are alone"] > 1
    bad = press(scripts[1], fakes.FakeWorker(), acts, expected="goodbye")
    assert "another text than alone" in bad.wrongs[0] and bad.counts["wrong"] > 1


def test_an_answer_that_breaks_off_is_wrong(scripts):
    worker = fakes.FakeWorker()
    worker.script = lambda handle, index: [*fakes.said("hel")[:-1], fakes.TokenDelta(error=ValueError("x"))]
    assert "500" in press(scripts[1], worker, ["whole"]).wrongs[0]
    assert "an error in a stream" in press(scripts[1], worker, ["stream"]).wrongs[0]


def test_an_answer_that_never_comes_is_lost(scripts, monkeypatch):
    worker = fakes.FakeWorker()
    worker.script = lambda handle, index: []
    monkeypatch.setattr(scripts[1].asyncio, "timeout", lambda _, real=asyncio.timeout: real(0.2))
    assert scripts[1].TOOK in press(scripts[1], worker, ["whole"], seconds=0.1).wrongs[0]


def test_a_full_queue_is_waited_for(scripts):
    worker = fakes.FakeWorker()
    worker.refusal = BusyError("full", 0)
    real = worker.submit

    def later(requests, queue):
        try:
            return real(requests, queue)
        finally:
            worker.refusal = None

    worker.submit = later
    made = press(scripts[1], worker, ["whole"])
    assert not made.wrongs and made.counts["told to wait"] == 1


def test_all_nonsense_is_refused_by_a_real_server(scripts):
    loaded = ddtree.load(talker.model(), "lookup", tokenizer=talker.tokenizer())
    worker = EngineThread(loaded, name="tiny")
    worker.start()
    fakes.ready(worker)
    with loaded, fakes.served(worker) as address, httpx.Client(base_url=address, timeout=60) as client:
        for method, path, content in scripts[1].nonsense(loaded.target.max_context):
            reply = client.request(
                method, path, content=content, headers={"Content-Type": "application/json"}
            )
            traffic(scripts[1], address)._refusal(reply, content)


@pytest.mark.parametrize(
    "status, body, words",
    [(500, {}, "to nonsense"), (200, {}, "to nonsense"), (429, {}, "to nonsense"), (400, {}, "another form"),
     (400, {"error": "no"}, "another form")],
)  # fmt: skip
def test_other_answers_to_nonsense_are_wrong(scripts, status, body, words):
    with pytest.raises(scripts[1].Wrong, match=words):
        traffic(scripts[1], "")._refusal(httpx.Response(status, json=body), b"{}")


def test_what_does_not_return_is_told(scripts):
    before = {"rows": 0, "waiting": 0, "kv_bytes": 0, "memory_mb": 400.0, "files": 9, "threads": 5}
    compare = scripts[0].compare
    assert compare(before, {**before, "memory_mb": 450.0, "files": 12}, slack=64.0) == []
    worse = {"rows": 1, "waiting": 2, "kv_bytes": 3, "memory_mb": 500.0, "files": 20, "threads": 11}
    for name, value in worse.items():
        assert len(compare(before, {**before, name: value}, slack=64.0)) == 1, name
    assert scripts[0].engine_errors("x 1\nddtree_engine_errors_total 2.0\n") == ["2.0 rounds broke off"]
    assert scripts[0].engine_errors("ddtree_engine_errors_total 0.0\n") == []
