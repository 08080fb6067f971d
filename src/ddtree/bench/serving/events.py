"""Server-sent events out of a response's bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator


async def events(source: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event, as soon as it is complete.

    Lines end at line feeds alone: JSON may hold other characters that Python takes for the end of a line.
    """
    rest = b""
    data: list[bytes] = []
    async for piece in source:
        *lines, rest = (rest + piece).split(b"\n")
        for line in map(bytes.rstrip, lines):
            if line.startswith(b"data:"):
                data.append(line[5:].lstrip())
            elif not line and data:
                yield b"\n".join(data).decode("utf-8", "replace")
                data = []
