"""Press a server for long with everything at once, and tell whether it bore it.

    python scripts/soak.py --target demo --minutes 30
    python scripts/soak.py --url http://127.0.0.1:8000 --pid 4711 --minutes 5

Well-formed requests, streamed and whole, are mixed with aborts, nonsense, oversized prompts, slow readers and changes
of drafting. Each well-formed request must get the text that it got alone, before; nonsense must be refused in OpenAI's
form; afterwards rows, queue, keys and values, files, threads and memory must be what they were after a first part of
the time, by which caches have filled. The server that is started computes in float32, where no two scores come so
near to each other that the size of a batch decides.

The exit code is 0 when all went well, 1 when not, and 2 when the soak could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
from soak_traffic import CHAT, Case, Traffic, bodies, whole

from ddtree.bench import prompt_sets
from ddtree.errors import DDTreeError

WARM_UP = 0.25  # of the time, after which memory may not grow any more
DRAINED = 30.0  # seconds that may go by until nothing is left


def main():
    args = arguments()
    server = None
    try:
        if args.url is None:
            server = Server(args)
            args.url, args.pid = server.url, server.process.pid
        found = asyncio.run(soak(args, server))
    except (DDTreeError, httpx.HTTPError, OSError, RuntimeError) as error:
        print(f"soak: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        ended = server.end() if server else None
    if ended is not None:
        found["wrongs"] += ended
    found["verdict"] = "failed" if found["wrongs"] else "passed"
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    tell(found)
    return 1 if found["wrongs"] else 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo", help="to serve (default: demo)")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION",
                        help="of ddtree serve, as --serve=--drafter=lookup; repeatable")  # fmt: skip
    parser.add_argument(
        "--url", help="a server that runs already, in place of --target; its drafting is changed"
    )
    parser.add_argument("--pid", type=int, help="of that server, if its memory is to be watched")
    parser.add_argument("--api-key")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=8, help="acts at once (default: 8)")
    parser.add_argument(
        "--cases", type=int, default=32, help="requests whose answers are known (default: 32)"
    )
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS",
                        help="after which a request is held to be lost (default: 300)")  # fmt: skip
    parser.add_argument("--memory-slack", type=float, default=64.0, metavar="MB",
                        help="growth of memory that is taken for chance (default: 64)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    return parser.parse_args()


class Server:
    """`ddtree serve`, started here."""

    def __init__(self, args):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [
            sys.executable, "-m", "ddtree", "serve", args.target, "--port", "0", "--dtype", "float32", "--max-rows",
            "4", "--max-waiting", "16", "--max-body", "4M", "--prefix-memory", "64M", "--prefill-chunk", "128",
            *(["--api-key", args.api_key] if args.api_key else []), *args.serve,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        line = self.process.stdout.readline()
        found = re.search(r" at (http://\S+?)/v1", line)
        if found is None:
            self.process.kill()
            raise RuntimeError(f"the server did not start: {line}{self.log()}")
        self.url = found[1]

    def log(self):
        self._log.seek(0)
        return self._log.read()

    def end(self):
        """Stop it; what went wrong with that."""
        wrongs = []
        if self.process.poll() is not None:
            wrongs.append(f"the server ended by itself with {self.process.returncode}")
        else:
            self.process.send_signal(signal.SIGTERM)
            try:
                if code := self.process.wait(60):
                    wrongs.append(f"the server ended with {code}")
            except subprocess.TimeoutExpired:
                self.process.kill()
                wrongs.append("the server did not end at a signal")
        log = self.log()
        if "Traceback" in log or "ERROR" in log or "CRITICAL" in log:
            wrongs.append(f"the server's log: {log[-2000:]}")
        return wrongs


async def soak(args, server):
    """Everything; returns figures and what went wrong."""
    generator = random.Random(args.seed)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(
        base_url=args.url, headers=headers, timeout=args.deadline, trust_env=False
    ) as client:
        await ready(client, args.deadline)
        card = (await client.get("/v1/models")).json()["data"][0]
        texts = [prompt.turns[0] for prompt in prompt_sets.read(["small"])]
        cases = await alone(client, bodies(texts, generator, args.cases, card["max_model_len"]))
        state = (await client.get("/api/state")).json()
        traffic = Traffic(
            args.url, args.api_key, cases, state["drafters"], card["max_model_len"], generator, args.deadline
        )
        print(f"soak: {args.url}, {len(cases)} answers known, {args.minutes:g} minutes", flush=True)
        seconds = 60 * args.minutes
        await traffic.run(args.workers, WARM_UP * seconds)
        before = await rest(client, args.pid)
        await traffic.run(args.workers, (1 - WARM_UP) * seconds)
        after = await rest(client, args.pid)
        wrongs = [*traffic.wrongs, *compare(before, after, args.memory_slack)]
        await client.post("/api/drafting", json=state["drafting"])
        for one in cases:
            again = await case(client, one.path, one.body)
            if again != one:
                wrongs.append(
                    f"another text after it all: {again.expected}, not {one.expected}, to {one.body}"
                )
        wrongs += engine_errors((await client.get("/metrics")).text)
        if (await client.get("/health/ready")).status_code != 200:
            wrongs.append("the server is not ready any more")
    return {
        "model": card["id"], "minutes": args.minutes, "counts": dict(traffic.counts), "before": before,
        "after": after, "wrongs": wrongs,
    }  # fmt: skip


async def ready(client, deadline):
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        with suppress(httpx.ConnectError):
            if (await client.get("/health/ready")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError("the server is not ready")


async def alone(client, asked):
    """The requests as cases, each asked while nothing else goes on; every fourth chat also has a second turn."""
    cases = []
    for number, (path, body) in enumerate(asked):
        cases.append(await case(client, path, body))
        if path == CHAT and number % 4 == 0 and len(body["messages"]) == 1 and cases[-1].expected[0][0]:
            answer = {"role": "assistant", "content": cases[-1].expected[0][0]}
            more = {"role": "user", "content": "Go on."}
            cases.append(await case(client, path, {**body, "messages": [*body["messages"], answer, more]}))
    return cases


async def case(client, path, body):
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.status_code} {reply.text[:300]} to {body}")
    return Case(path, body, whole(reply.json()))


async def rest(client, pid):
    """What the server holds once all has ended; it has some seconds for that."""
    until = time.monotonic() + DRAINED
    while True:
        state = (await client.get("/api/state")).json()
        if not (state["rows"] or state["waiting"]) or time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    # Connections that were broken off are closed soon after.
    await asyncio.sleep(1.0)
    state = (await client.get("/api/state")).json()
    found = {"rows": state["rows"], "waiting": state["waiting"], "kv_bytes": state["kv"]["used"]}
    return {**found, **resident(pid)} if pid else found


def resident(pid):
    """Memory, open files and threads of a process, by Linux' /proc; nothing elsewhere."""
    folder = Path(f"/proc/{pid}")
    if not folder.exists():
        return {}
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return {
        "memory_mb": int(status["VmRSS"].split()[0]) / 1024,
        "peak_mb": int(status["VmHWM"].split()[0]) / 1024,
        "files": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def compare(before, after, slack):
    """What did not return to what it was."""
    wrongs = [f"{after[name]} {name} are left" for name in ("rows", "waiting") if after[name]]
    if after["kv_bytes"] != before["kv_bytes"]:
        wrongs.append(f"keys and values: {before['kv_bytes']} bytes before, {after['kv_bytes']} after")
    if "memory_mb" in before and "memory_mb" in after:
        grown = after["memory_mb"] - before["memory_mb"]
        if grown > slack:
            wrongs.append(f"memory grew by {grown:.0f} MB from {before['memory_mb']:.0f}")
        for name in ("files", "threads"):
            if after[name] > before[name] + 4:
                wrongs.append(f"{name}: {before[name]} before, {after[name]} after")
    return wrongs


def engine_errors(metrics):
    found = re.search(r"^ddtree_engine_errors_total (\S+)", metrics, re.MULTILINE)
    return [f"{found[1]} rounds broke off"] if found and float(found[1]) else []


def tell(found):
    for name, count in sorted(found["counts"].items()):
        print(f"  {count:8,}  {name}")
    for name in found["before"]:
        print(f"  {name}: {found['before'][name]:,.6g} before, {found['after'][name]:,.6g} after")
    for wrong in found["wrongs"]:
        print(f"soak: WRONG: {wrong}")
    print(f"soak: {found['verdict']}")


if __name__ == "__main__":
    sys.exit(main())
