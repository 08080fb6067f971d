"""What a server has to bear in `soak.py`: well-formed requests whose answers are known, and everything else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from ddtree.bench.load import sse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOK = "took longer than the deadline"


@dataclass(frozen=True)
class Case:
    """A well-formed request and, for each choice, the text and the reason of its end that it gets alone."""

    path: str
    body: dict
    expected: tuple


class Wrong(Exception):
    """The server did what it must not do."""


def bodies(texts, generator, count, context):
    """(path, body) of well-formed requests, greedy and sampled with fixed seeds, some of them long."""
    longest = "\n".join(texts * 20)[: min(4000, context // 2)]
    for number in range(count):
        long = number % 8 == 7
        text = longest if long else generator.choice(texts)[: min(400, context // 4)]
        body = {
            "max_tokens": generator.randint(4, 48),
            "temperature": generator.choice((0, 0, 0.8)),
            "seed": number,
        }
        if generator.random() < 0.2:
            body["n"] = 2
        if generator.random() < 0.2:
            body["stop"] = generator.choice(([" the"], ["e", "\n\n"], ["."]))
        if generator.random() < 0.2:
            body |= {"top_k": 20, "frequency_penalty": 0.5}
        if number % 3 == 2:
            yield COMPLETIONS, {"prompt": text, **body}
        else:
            yield CHAT, {"messages": [{"role": "user", "content": text}], **body}


def nonsense(context):
    """(method, path, content) of requests that must be refused."""

    def chat(**fields):
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}

    raw = [b"{", b"", b"[]", b"null", b"\xff\xfe\x00", b'{"messages": NaN}', b"[" * 100_000, b'{"messages":']
    fields = [
        {"messages": "text"}, {"messages": []}, {"messages": [{"role": "user", "content": 5}]}, {"messages": None},
        {"max_tokens": -2}, {"max_tokens": "ten"}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 7},
        {"n": 0}, {"n": 10**6}, {"model": "another"}, {"stream_options": {"include_usage": True}},
        {"ddtree": {"method": "warp"}}, {"ddtree": 5}, {"ddtree": {"depth": 99}}, {"ddtree": {"drafter": "nobody"}},
        {"logit_bias": {"x": 1}}, {"top_logprobs": 5}, {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"stop": 3}, {"seed": "s"},
    ]  # fmt: skip
    prompts = [[], "", [[]], [10**9], [-1], 5, {"a": 1}, [5] * (context + 10), "x" * (20 * context)]
    found = [("POST", CHAT, content) for content in raw]
    found += [("POST", CHAT, json.dumps(chat(**changed)).encode()) for changed in fields]
    found += [
        ("POST", COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": 4}).encode()) for prompt in prompts
    ]
    found += [
        ("GET", CHAT, b""),
        ("POST", "/v1/models", b"{}"),
        ("POST", "/nowhere", b"{}"),
        ("PUT", COMPLETIONS, b""),
    ]
    found += [("POST", "/api/drafting", b'{"method": "warp"}'), ("POST", "/api/drafting", b'{"speed": 2}')]
    found += [("POST", "/tokenize", b"{}"), ("POST", "/detokenize", b'{"tokens": [-5]}')]
    return found


class Traffic:
    """Acts on a server at random until told to stop.

    Attributes:
        counts: how often what was done.
        wrongs: what the server did wrong, the first ones in words.
    """

    def __init__(self, url, key, cases, drafters, context, generator, deadline):
        self.counts = Counter()
        self.wrongs = []
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._cases = cases
        self._drafters = drafters
        self._nonsense = nonsense(context)
        self._random = generator
        self._deadline = deadline
        self._acts = {
            self._whole: 20, self._stream: 25, self._slow: 6, self._break_off: 14, self._give_up: 6,
            self._refused: 16, self._huge: 1, self._half: 3, self._redraft: 5, self._look: 4,
        }  # fmt: skip

    async def run(self, workers, seconds):
        """So many acts at once, for so long, and until the last ones have ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=workers)
        timeout = httpx.Timeout(self._deadline)
        settings = {"base_url": self._url, "headers": self._headers, "timeout": timeout, "trust_env": False}
        small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        async with (
            httpx.AsyncClient(limits=limits, **settings) as self._client,
            httpx.AsyncClient(transport=small, **settings) as self._lagging,
        ):
            until = asyncio.get_running_loop().time() + seconds
            await asyncio.gather(*(self._worker(until) for _ in range(workers)))

    async def _worker(self, until):
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            (act,) = self._random.choices(list(self._acts), list(self._acts.values()))
            name = act.__name__.strip("_")
            self.counts[name] += 1
            try:
                async with asyncio.timeout(self._deadline):
                    await act()
            except TimeoutError:
                self._wrong(name, TOOK)
            except Wrong as wrong:
                self._wrong(name, str(wrong))
            except httpx.HTTPError as error:
                self._wrong(name, f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    def _wrong(self, name, what):
        self.counts["wrong"] += 1
        if len(self.wrongs) < 50:
            self.wrongs.append(f"{name}: {what}")

    def _pick(self):
        """A case and its body, drafted for in any way."""
        case = self._random.choice(self._cases)
        drafting = self._random.choice((None, None, *ways(self._random, self._drafters)))
        return case, {**case.body, **({} if drafting is None else {"ddtree": drafting})}

    # Requests that must get their answers.

    async def _whole(self):
        case, body = self._pick()
        while True:
            reply = await self._client.post(case.path, json=body)
            if reply.status_code != 429:
                break
            await self._wait(reply)
        if reply.status_code != 200:
            raise Wrong(f"{reply.status_code} {reply.text[:300]} to {body}")
        self._check(case, whole(reply.json()), body)

    async def _stream(self):
        case, body = self._pick()
        await self._read(self._client, case, body, 0.0)

    async def _slow(self):
        """Chunks are large and what takes them is small, so that the server has to wait."""
        case, body = self._pick()
        more = {"logprobs": True, "top_logprobs": 20} if case.path == CHAT else {"logprobs": 20}
        body |= {"ddtree_details": True, **more}
        await self._read(self._lagging, case, body, self._random.uniform(0.02, 0.2))

    async def _read(self, client, case, body, pause):
        body["stream"] = True
        while True:
            async with client.stream("POST", case.path, json=body) as reply:
                if reply.status_code == 200:
                    self._check(case, await streamed(reply, pause), body)
                    return
                await reply.aread()
                if reply.status_code != 429:
                    raise Wrong(f"{reply.status_code} {reply.text[:300]} to {body}")
            await self._wait(reply)

    async def _wait(self, reply):
        self.counts["told to wait"] += 1
        await asyncio.sleep(min(float(reply.headers["Retry-After"]), 5.0))

    def _check(self, case, found, body):
        self.counts["answers held against what they are alone"] += 1
        if found != case.expected:
            raise Wrong(f"another text than alone: {found} and not {case.expected}, to {body}")

    # Requests that are given up.

    async def _break_off(self):
        case, body = self._pick()
        left = self._random.randrange(12)
        async with self._client.stream("POST", case.path, json={**body, "stream": True}) as reply:
            self._served(reply)
            async for _ in reply.aiter_bytes():
                left -= 1
                if left < 0:
                    return

    async def _give_up(self):
        case, body = self._pick()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.005, 0.5)):
                self._served(await self._client.post(case.path, json=body))

    async def _half(self):
        """The connection ends in the middle of the request."""
        case, body = self._pick()
        content = json.dumps(body).encode()
        parts = urlsplit(self._url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST {case.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(content)}\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        writer.write(
            f"{head}{more}Content-Type: application/json\r\n\r\n".encode() + content[: len(content) // 2]
        )
        with suppress(OSError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    # Requests that must be refused.

    async def _refused(self):
        method, path, content = self._random.choice(self._nonsense)
        head = {"Content-Type": "application/json"}
        self._refusal(await self._client.request(method, path, content=content, headers=head), content)

    async def _huge(self):
        """Longer than the server takes; it may close the connection before all is sent."""
        content = b'{"prompt": "' + b"x" * (5 * 2**20) + b'"}'
        try:
            self._refusal(await self._client.post(COMPLETIONS, content=content), content)
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            self.counts["cut short"] += 1

    def _refusal(self, reply, content):
        self.counts[f"status {reply.status_code}"] += 1
        if not 400 <= reply.status_code < 500 or reply.status_code == 429:
            raise Wrong(f"{reply.status_code} {reply.text[:300]} to nonsense: {content[:200]!r}")
        try:
            named = set(reply.json()["error"])
        except (ValueError, KeyError, TypeError):
            named = set()
        if named != {"message", "type", "param", "code"}:
            raise Wrong(f"a refusal in another form: {reply.text[:300]} to {content[:200]!r}")

    # What goes on beside.

    async def _redraft(self):
        chosen = self._random.choice(ways(self._random, self._drafters))
        reply = await self._client.post("/api/drafting", json=chosen)
        if reply.status_code != 200 or reply.json()["method"] != chosen["method"]:
            raise Wrong(f"{reply.status_code} {reply.text[:300]} to drafting {chosen}")

    async def _look(self):
        path = self._random.choice(
            ("/metrics", "/api/state", "/v1/models", "/health/ready", "/", "/api/events")
        )
        async with self._client.stream("GET", path) as reply:
            if reply.status_code != 200:
                raise Wrong(f"{reply.status_code} to {path}")
            async for _ in reply.aiter_bytes():
                if path == "/api/events" and self._random.random() < 0.3:
                    return

    def _served(self, reply):
        if reply.status_code not in (200, 429):
            raise Wrong(f"{reply.status_code} to a request that was given up")


def ways(generator, drafters):
    """Settings of drafting, each valid."""
    found = [{"method": "off"}, {"method": "auto", "depth": generator.randint(1, 16)}]
    if drafters:
        found += [
            {"method": "chain", "depth": generator.randint(1, 16), "drafter": None},
            {"method": "tree", "budget": generator.choice((4, 16, 48, "auto")), "drafter": generator.choice(drafters)},
            {"method": "tree", "budget": 24, "depth": generator.randint(1, 16), "drafter": None},
        ]  # fmt: skip
    return found


def whole(reply):
    """(text, why it ended) of each choice of a whole reply."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    return tuple(
        (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"])
        for choice in choices
    )


async def streamed(reply, pause=0.0):
    """The same of a stream, read with pauses."""
    ends, done = {}, False
    texts = {}
    async for data in sse_events(reply.aiter_bytes()):
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise Wrong(f"an error in a stream: {chunk}")
        for choice in chunk["choices"]:
            index = choice["index"]
            delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + (delta or "")
            if choice["finish_reason"]:
                if index in ends:
                    raise Wrong("a choice ended twice")
                ends[index] = choice["finish_reason"]
        await asyncio.sleep(pause)
    if not done or set(ends) != set(texts):
        raise Wrong(f"a stream broke off: {texts}, ended {ends}, done {done}")
    return tuple((texts[index], ends[index]) for index in sorted(texts))
