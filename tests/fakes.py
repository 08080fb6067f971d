"""A service whose answers a test writes itself, and a real HTTP server in front of a service."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import talker
from ddtree.engine.sequence import Result
from ddtree.server.app import create_app
from ddtree.server.drafting import Drafting
from ddtree.server.events import Event
from ddtree.server.limits import Limits
from ddtree.server.metrics import Metrics
from ddtree.server.run import Server, bind, url
from ddtree.server.state import Settings
from ddtree.server.tokens import TokenTexts
from ddtree.stats import Stats


def result(text, tokens, reason="stop", prompt=(1,), **figures):
    stats = Stats(prompt_tokens=len(prompt), output_tokens=len(tokens), **figures)
    return Result(text, list(tokens), reason, None, None, list(prompt), 7, stats)


def said(text, reason="stop"):
    """The events of an answer that comes a character at a time."""
    ids = [ord(char) % 256 for char in text]
    pieces = [Event(char, [token], [i % 2]) for i, (char, token) in enumerate(zip(text, ids, strict=True))]
    return [*pieces, Event("", [], [], result=result(text, ids, reason))]


class FakeService:
    """Answers with `script(asked, index)`: a list of events, delivered at once by another thread, or an iterator."""

    def __init__(self, **limits):
        self.name = "fake"
        self.limits = Limits(**limits)
        self.drafting = Drafting()
        self.health = {"live": True, "ready": True, "status": "ready", "error": None}
        self.metrics = Metrics(self.name)
        self.model = SimpleNamespace(
            tokenizer=talker.tokenizer(),
            target=SimpleNamespace(model=talker.model(), max_context=512, vocab_size=talker.VOCAB),
            engine=SimpleNamespace(max_rows=2, members=("dflash", "lookup")),
        )
        self.texts = TokenTexts(self.model.tokenizer)
        self.script = lambda asked, index: said("hello")
        self.refusal = None
        self.asked = []
        self.cancelled = []
        self.watchers = []

    def submit_all(self, asked):
        if self.refusal is not None:
            raise self.refusal
        self.asked += asked
        for index, one in enumerate(asked):
            threading.Thread(target=self._play, args=(one, index), daemon=True).start()
        return list(asked)

    def _play(self, asked, index):
        for event in self.script(asked, index):
            asked.deliver(event)

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def set_drafting(self, drafting):
        drafting.check_drafter(self.model.engine.members)
        self.drafting = drafting

    def state(self):
        return {"model": self.name, "rows": 0}

    def watch(self, deliver):
        self.watchers.append(deliver)
        return lambda: self.watchers.remove(deliver)

    def shutdown(self, grace=0.0):
        self.health = {"live": False, "ready": False, "status": "stopped", "error": None}


@contextmanager
def served(service, grace=5.0, port=0, **settings):
    """The address of a server, on a free port by default, which has ended afterwards."""
    bound = bind("127.0.0.1", port)
    server = Server(create_app(service, Settings(**settings)), service, grace=grace)
    thread = threading.Thread(target=server.serve_on, args=(bound,))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield url(bound)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def eventually(holds, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)
