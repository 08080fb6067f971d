"""A small load client for an OpenAI-compatible server: drafting modes are compared in one run.

The modes take turns, block by block: answers that are made at once share the server's rounds, so modes cannot be mixed
in a block. Requests are chat completions, streamed, with the drafting mode in the field `ddtree`. For load at scale
use a client made for that (see docs/measuring-serving.md).
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from tqdm import tqdm

from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.tables import Table, quartiles
from ddtree.errors import ConfigError, DDTreeError, check_whole, first_line

try:
    import httpx
except ImportError as error:
    raise ConfigError("ddtree bench serve needs httpx: pip install 'ddtree[bench]'") from error

AS_SERVED = "as served"
_MODE = re.compile(r"(off|chain|tree|auto)(?::(auto|\d+))?(?:/(\d+))?(?:@(.+))?")
_WARM_UP_TOKENS = 16
_TIMEOUT = 600.0  # seconds without a byte after which an answer has failed
_BLOCK = 4  # conversations of a block for each one at once, so that little of it runs with fewer beside it


class ServerError(DDTreeError):
    """The server cannot be reached, or refuses what every request needs."""


@dataclass(frozen=True)
class LoadPlan:
    """A load to put on a server: prompts, drafting modes and repetitions.

    Attributes:
        prompts: of each conversation the first message is asked.
        modes: drafting modes, the first one being the base; such as "off", "tree:16", "auto/8", "tree@lookup".
        concurrency: requests at once, such as 4; the next one begins when one ends.
        turns: repetitions of everything.
        fields: of each request, such as max_tokens and seed.

    Raises:
        ConfigError: a number is less than 1, or a mode is malformed.
    """

    prompts: Sequence[BenchPrompt]
    modes: Sequence[str] = (AS_SERVED,)
    concurrency: int = 1
    turns: int = 1
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("--concurrency", self.concurrency, 1)
        check_whole("--turns", self.turns, 1)
        for mode in self.modes:
            drafting_fields(mode)

    def blocks(self) -> Iterator[tuple[int, str, list[BenchPrompt]]]:
        """Yield number, mode and prompts of each block; every mode is as often first as the others."""
        size = 1 if self.concurrency == 1 else _BLOCK * self.concurrency
        count = max(1, len(self.prompts) // size)
        # With few prompts the same ones are asked again, so that the concurrency is reached.
        chosen = list(islice(cycle(self.prompts), max(len(self.prompts), size)))
        for number in range(self.turns * count):
            first = number % len(self.modes)
            for mode in (*self.modes[first:], *self.modes[:first]):
                yield number, mode, chosen[number % count :: count]


@dataclass
class TimedReply:
    """One streamed answer. Times are in seconds since it was sent.

    Attributes:
        block: number of the block it belongs to.
        mode: drafting mode.
        id: of the prompt.
        sent: when it was sent, by `time.perf_counter`.
        text: of the whole answer, reasoning included.
        tokens: output tokens, by the server's usage.
        prompt_tokens, cached_tokens: of the prompt, and those of them that came from the server's prefix cache.
        ttft: time to the first piece of text; None without text.
        latency: time to the last piece so far, in the end to the end of the stream.
        error: what went wrong; None for a whole answer.
    """

    block: int
    mode: str
    id: str
    sent: float
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: float | None = None
    latency: float = 0.0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Return the time per output token after the first: (latency - TTFT) / (tokens - 1)."""
        if self.ttft is None or self.tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.tokens - 1)

    def add(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of the stream that came at `latency`. Raises ServerError for one that tells of an error."""
        if "error" in chunk:
            raise ServerError(chunk["error"]["message"])
        if usage := chunk.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0
        for choice in chunk.get("choices") or []:
            delta = choice["delta"]
            text = "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))
            if text and self.ttft is None:
                self.ttft = self.latency
            self.text += text


def load_table(replies: Sequence[TimedReply]) -> Table:
    """Return medians and quartiles of each mode, and how many of its texts are those of the first mode."""
    by_mode: dict[str, list[TimedReply]] = defaultdict(list)
    for reply in replies:
        by_mode[reply.mode].append(reply)
    base = next(iter(by_mode), "")
    base_speeds = _speeds(by_mode[base])
    base_texts = {reply.id: reply.text for reply in by_mode[base] if reply.error is None}
    rows = []
    for mode, every in by_mode.items():
        good = [reply for reply in every if reply.error is None]
        speeds = _speeds(every)
        ratios = [speeds[block] / base_speeds[block] for block in speeds if base_speeds.get(block)]
        cached, asked = sum(reply.cached_tokens for reply in good), sum(reply.prompt_tokens for reply in good)
        compared = [reply.text == base_texts[reply.id] for reply in good if reply.id in base_texts]
        row = [
            mode,
            str(len(every)),
            str(len(every) - len(good)),
            _spread(speeds.values(), 1),
            _spread(ratios, 2),
        ]
        row += [_spread((1e3 * reply.ttft for reply in good if reply.ttft is not None), 0)]
        row += [_spread((1e3 * reply.tpot for reply in good if reply.tpot is not None), 1)]
        rows.append([*row, f"{cached / asked:.0%}" if asked else "-", f"{sum(compared)} of {len(compared)}"])
    title = "Medians (quartiles): of tokens/s and ratios over blocks, of times over answers"
    header = ["mode", "answers", "failed", "tokens/s", f"over {base}", "TTFT (ms)", "TPOT (ms)"]
    return Table(title, [*header, "prompt cached", "same text"], rows)


def _speeds(replies: Sequence[TimedReply]) -> dict[int, float]:
    """Return output tokens per second of each block of one mode."""
    blocks: dict[int, list[TimedReply]] = defaultdict(list)
    for reply in replies:
        blocks[reply.block].append(reply)
    return {number: sum(reply.tokens for reply in block)
            / (max(reply.sent + reply.latency for reply in block) - min(reply.sent for reply in block))
            for number, block in blocks.items()}  # fmt: skip


def _spread(values: Iterable[float], places: int) -> str:
    known = list(values)
    if not known:
        return "-"
    low, high = quartiles(known)
    return f"{statistics.median(known):.{places}f} ({low:.{places}f} to {high:.{places}f})"


def drafting_fields(mode: str) -> dict[str, Any]:
    """Return what a request says of drafting for METHOD[:BUDGET][/DEPTH][@DRAFTER]. Raises ConfigError."""
    if mode == AS_SERVED:
        return {}
    found = _MODE.fullmatch(mode)
    if found is None:
        raise ConfigError(
            f"--drafting {mode!r} is unknown: write off, chain, tree, tree:16, auto, auto/8 or tree@lookup"
        )
    method, budget, depth, drafter = found.groups()
    fields: dict[str, Any] = {"method": method}
    if budget:
        fields["budget"] = budget if budget == "auto" else int(budget)
    if depth:
        fields["depth"] = int(depth)
    if drafter:
        fields["drafter"] = drafter
    return {"ddtree": fields}


async def measure(
    url: str, plan: LoadPlan, key: str | None = None, model: str | None = None
) -> tuple[str, list[TimedReply]]:
    """Run a plan against a server; return the model's name and the answers in the order they ended.

    Args:
        url: of the server, with or without `/v1`.
        key: sent as bearer token.
        model: to ask for; None for the first that the server names.

    Raises:
        ConfigError: the address is malformed.
        ServerError: the server cannot be reached, names no model, or refuses a mode.
    """
    try:
        client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_TIMEOUT, connect=30.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy would be measured instead
        )
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise ConfigError(f"--url {url} is no address: write http://HOST:PORT") from error
    replies: list[TimedReply] = []
    async with client:
        try:
            name = model or str((await client.get("/v1/models")).json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{url} does not answer ({first_line(error)}): is it running there?") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{url}/v1/models names no model: give --model, and --api-key") from error

        async def ask(block: int, mode: str, prompt: BenchPrompt, **more: Any) -> TimedReply:
            reply = TimedReply(block, mode, prompt.id, time.perf_counter())
            messages = [{"role": "user", "content": prompt.turns[0]}]
            body = {**plan.fields, **more, **drafting_fields(mode), "model": name, "messages": messages}
            await _read_answer(client, body, reply)
            return reply

        async def work(block: int, mode: str, waiting: Iterator[BenchPrompt]) -> None:
            for prompt in waiting:
                replies.append(await ask(block, mode, prompt))

        for mode in plan.modes:
            first = await ask(-1, mode, plan.prompts[0], max_tokens=_WARM_UP_TOKENS)
            if first.error:
                raise ServerError(f"{url} refuses a request with drafting {mode!r}: {first.error}")
        for block, mode, prompts in tqdm(list(plan.blocks()), "measuring", unit="block"):
            waiting = iter(prompts)
            await asyncio.gather(*(work(block, mode, waiting) for _ in range(plan.concurrency)))
    return name, replies


async def _read_answer(client: httpx.AsyncClient, body: dict[str, Any], reply: TimedReply) -> None:
    """Send one request and read its stream to the end; what goes wrong is noted in `reply`."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply.error = "the stream broke off"
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ServerError(f"{response.status_code}: {(await response.aread())[:300].decode()}")
            async for data in sse_events(response.aiter_bytes()):
                reply.latency = time.perf_counter() - reply.sent
                if data == "[DONE]":
                    reply.error = None
                    return
                reply.add(json.loads(data))
    except ServerError as error:
        reply.error = str(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        reply.error = f"{type(error).__name__}: {first_line(error)}"
    finally:
        reply.latency = reply.latency or time.perf_counter() - reply.sent


async def sse_events(source: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event, of which an OpenAI-compatible one has a single line.

    Only line feeds end a line: JSON may hold other characters that `splitlines` takes for the end of one.
    """
    rest = b""
    async for piece in source:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", "replace")
