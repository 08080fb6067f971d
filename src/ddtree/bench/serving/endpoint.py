"""Requests to one OpenAI-compatible endpoint, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from ddtree.bench.serving.answer import Answer
from ddtree.bench.serving.events import events
from ddtree.errors import ConfigError, DDTreeError

try:
    import httpx
except ImportError as error:
    raise ConfigError("this needs httpx: pip install 'ddtree[bench]'") from error

Message = dict[str, str]


class EndpointError(DDTreeError):
    """The endpoint cannot be reached or refuses what every request needs."""


class Endpoint:
    """A client of a server; to be used as an async context.

    Args:
        url: of the server, with or without `/v1`.
        key: sent as bearer token; None for none.
        model: to ask for; None for the first that the server names.
        chat: use `/v1/chat/completions`; otherwise `/v1/completions`, with the last message as it is.
        timeout: seconds without a byte after which an answer is given up.
    """

    def __init__(
        self, url: str, *, key: str | None = None, model: str | None = None, chat: bool = True,
        timeout: float = 600.0,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        # What tells how many tokens there have been, in each chunk; some servers do not take it.
        self._stream_options: dict[str, bool] = {"include_usage": True, "continuous_usage_stats": True}
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
                limits=httpx.Limits(max_connections=None),
                # The server is named; a proxy would be measured instead.
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ConfigError(f"--url {url} is no address: write http://HOST:PORT") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def find(self) -> None:
        """Learn the model's name and what the server takes, by a request of one token.

        Raises:
            EndpointError: there is no such server, or it refuses the request.
        """
        try:
            if self.model is None:
                reply = await self._client.get("/v1/models")
                reply.raise_for_status()
                self.model = str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(
                f"{self.url} does not answer ({_told(error)}): is it running there?"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self.url}/v1/models names no model: give --model") from error
        first = await self.ask([{"role": "user", "content": "Hello"}], {"max_tokens": 1})
        if first.status in (400, 422) and "stream_options" in (first.error or ""):
            del self._stream_options["continuous_usage_stats"]
            first = await self.ask([{"role": "user", "content": "Hello"}], {"max_tokens": 1})
        if not first.good:
            raise EndpointError(f"{self.url} refuses a request of one token: {first.error}")

    async def ask(self, messages: Sequence[Message], fields: dict[str, Any]) -> Answer:
        """One answer, read to its end. What goes wrong is told in it, not raised.

        Args:
            messages: of the chat.
            fields: of the request's body, beside model, prompt and stream.
        """
        prompt = {"messages": list(messages)} if self._chat else {"prompt": messages[-1]["content"]}
        body = {
            "model": self.model, **prompt, "stream": True, "stream_options": self._stream_options, **fields,
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        try:
            async with self._client.stream("POST", self._path, json=body) as reply:
                answer.status = reply.status_code
                if reply.status_code == 200:
                    await self._read(reply, answer)
                else:
                    answer.error = _refusal(await reply.aread(), reply.status_code)
        except httpx.HTTPError as error:
            answer.error = _told(error)
        answer.latency = answer.latency or time.perf_counter() - answer.began
        return answer

    async def metrics(self) -> str:
        """What `/metrics` says; "" where there is none."""
        try:
            reply = await self._client.get("/metrics")
            return reply.text if reply.status_code == 200 else ""
        except httpx.HTTPError:
            return ""

    async def version(self) -> str | None:
        """Of the server, where it tells."""
        try:
            reply = await self._client.get("/version")
            return str(reply.json()["version"]) if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def _read(self, reply: httpx.Response, answer: Answer) -> None:
        async for data in events(reply.aiter_bytes()):
            now = time.perf_counter() - answer.began
            answer.latency = now
            if data == "[DONE]":
                return
            try:
                chunk = json.loads(data)
                _take(chunk, answer, now)
            except (ValueError, TypeError, AttributeError, KeyError):
                answer.error = f"a chunk is malformed: {data[:200]}"
                return
        answer.error = answer.error or "the stream broke off"


def _take(chunk: dict[str, Any], answer: Answer, now: float) -> None:
    """Take a chunk of a stream in."""
    if "error" in chunk:
        answer.error = str(chunk["error"].get("message", chunk["error"]))
        return
    usage = chunk.get("usage")
    if usage:
        answer.usage = usage
    timings = (chunk.get("ddtree") or {}).get("timings")
    if timings:
        answer.timings = timings[0]
    for choice in chunk.get("choices") or []:
        text = _text(choice)
        if text:
            answer.text += text
            answer.chunks.append((now, usage.get("completion_tokens") if usage else None))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _text(choice: dict[str, Any]) -> str:
    """What a choice's chunk adds; thoughts count as an answer, as their tokens do."""
    delta = choice.get("delta")
    if delta is None:
        return str(choice.get("text") or "")
    return "".join(
        delta[name]
        for name in ("reasoning_content", "reasoning", "content")
        if isinstance(delta.get(name), str)
    )


def _refusal(body: bytes, status: int) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return f"{status}: {error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())
