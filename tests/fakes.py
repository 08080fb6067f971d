"""An engine thread whose answers a test writes itself, and a real HTTP server in front of an engine thread."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import talker
from ddtree.engine.sequence import Result
from ddtree.server.app import create_app
from ddtree.server.config import DraftSettings, HttpSettings, ServerLimits
from ddtree.server.handle import TokenDelta
from ddtree.server.metrics import RoundBook
from ddtree.server.run import HttpServer, bind, url
from ddtree.server.tokens import TokenTexts
from ddtree.stats import Stats


def result(text, tokens, reason="stop", prompt=(1,), **figures):
    stats = Stats(prompt_tokens=len(prompt), output_tokens=len(tokens), **figures)
    return Result(text, list(tokens), reason, None, None, list(prompt), 7, stats)


def said(text, reason="stop"):
    """The deltas of an answer that comes a character at a time."""
    ids = [ord(char) % 256 for char in text]
    pieces = [
        TokenDelta(char, [token], [i % 2]) for i, (char, token) in enumerate(zip(text, ids, strict=True))
    ]
    return [*pieces, TokenDelta(result=result(text, ids, reason))]


class FakeWorker:
    """Answers with `script(handle, index)`: an iterable of deltas, sent by another thread.

    A handle has the `prompt`, `params` and `drafting` of its request, and `send(delta)`.
    """

    def __init__(self, **limits):
        self.name = "fake"
        self.limits = ServerLimits(**limits)
        self.drafting = DraftSettings()
        self.health = {"live": True, "ready": True, "status": "ready", "error": None}
        self.model = SimpleNamespace(
            tokenizer=talker.tokenizer(),
            target=SimpleNamespace(model=talker.model(), max_context=512, vocab_size=talker.VOCAB),
            defaults={},
            engine=SimpleNamespace(max_rows=2, members=("dflash", "lookup")),
        )
        self.texts = TokenTexts(self.model.tokenizer)
        self.book = RoundBook(self.name, self.texts)
        self.script = lambda handle, index: said("hello")
        self.refusal = None
        self.asked = []
        self.cancelled = []

    def submit(self, requests, queue):
        if self.refusal is not None:
            raise self.refusal
        handles = [
            SimpleNamespace(**vars(request), send=lambda delta, index=index: queue.put((index, delta)))
            for index, request in enumerate(requests)
        ]
        self.asked += handles
        for index, handle in enumerate(handles):
            threading.Thread(target=self._play, args=(handle, index), daemon=True).start()
        return handles

    def _play(self, handle, index):
        for delta in self.script(handle, index):
            handle.send(delta)

    def cancel(self, handle):
        self.cancelled.append(handle)

    def set_drafting(self, drafting):
        drafting.check_drafter(self.model.engine.members)
        self.drafting = drafting

    def state(self):
        return {"model": self.name, "rows": 0}

    def shutdown(self, grace=0.0):
        self.health = {"live": False, "ready": False, "status": "stopped", "error": None}


@contextmanager
def running(worker, grace=5.0, port=0, **settings):
    """A server, its thread and its address, on a free port by default. It has ended afterwards."""
    bound = bind("127.0.0.1", port)
    server = HttpServer(create_app(worker, HttpSettings(**settings)), worker, grace=grace)
    thread = threading.Thread(target=server.serve_on, args=(bound,))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield server, thread, url(bound)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def served(worker, **options):
    """The address of a server; see `running`."""
    with running(worker, **options) as (_, _, address):
        yield address


def ready(worker, seconds=300.0):
    """Wait until an engine thread has measured its rounds, or failed to; it must make answers then."""
    eventually(lambda: worker.health["status"] != "starting", seconds)
    assert worker.health["ready"]


def eventually(holds, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)
