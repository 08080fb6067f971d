"""Print how large the package is: files, lines of code, what a first answer needs, import arrows between rooms.

A line of code is a line with anything on it but blanks, comments and docstrings. What `load().generate()` reaches is
counted twice: all that `ddtree.api` imports, directly or through others, imports within functions included; and the
modules that a process has in fact loaded after it generated a few tokens with a tiny model and n-grams of its own text.
The first is what a reader may have to follow, whatever the model; the second is what that one answer ran.

    python tools/size.py [--source src/ddtree] [--tests tests] [--static]

`--static` leaves the second count out: it needs torch and the installed package, the rest needs Python alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

import layers

CORE = ("tree", "sampling", "model", "engine", "policy", "api")
SHORT = 60
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_FIRST_ANSWER = """
import json, sys, transformers
import ddtree
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
ddtree.load(model, "lookup").generate([1, 2, 3, 1, 2, 3], max_tokens=8, method="tree", budget=8)
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "ddtree"]))
"""


def code_lines(path: Path) -> int:
    """Lines of a Python file without blanks, comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    return len(lines - blank)


def reached(files: dict[str, Path], start: str = "ddtree.api") -> set[str]:
    """What a module imports, directly or through others, with the packages that these lie in."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        # The package's own `__init__` names the public face without importing it.
        if module in found or module == "ddtree":
            continue
        found.add(module)
        waiting += [module.rpartition(".")[0], *layers.imports(module, files)]
    return found


def loaded() -> list[str]:
    """The modules of ddtree in a process that has generated a few tokens."""
    command = [sys.executable, "-c", _FIRST_ANSWER]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=layers.SOURCE)
    parser.add_argument("--tests", type=Path, default=layers.ROOT / "tests")
    parser.add_argument("--static", action="store_true", help="run nothing")
    args = parser.parse_args()
    files = layers.modules(args.source)
    lines = {module: code_lines(path) for module, path in files.items()}
    rooms: dict[str | None, int] = {}
    for module, count in lines.items():
        room = layers.room_of(module)
        rooms[room] = rooms.get(room, 0) + count
    core = sum(rooms.get(room, 0) for room in CORE) + lines.get("ddtree.drafters", 0)
    short = sum(_lines(path) <= SHORT for path in files.values())
    tests = sorted(args.tests.rglob("*.py"))
    arrows = layers.arrows(files)
    graph = {room: {there for here, there in arrows if here == room} for room in {here for here, _ in arrows}}
    rows = [
        (f"files / of {SHORT} lines or fewer", f"{len(files)} / {short}"),
        ("code lines: all / core", f"{sum(lines.values()):,} / {core:,}"),
        ("policy, code lines", f"{rooms.get('policy', 0):,}"),
    ]
    static = reached(files)
    rows.append(("load().generate(): files reached / code lines", _counted(static, lines)))
    if not args.static:
        rows.append(("  of these, loaded by one answer", _counted(loaded(), lines)))
    rows += [
        ("tests: lines / code lines", f"{sum(map(_lines, tests)):,} / {sum(map(code_lines, tests)):,}"),
        (
            "import arrows between rooms, not downward, circles",
            f"{len(arrows)}, {len(layers.upward(arrows))}, {len(layers.circles(graph))}",
        ),
    ]
    print("\n".join(f"{name:52} {figure}" for name, figure in rows))
    print(
        "rooms: "
        + ", ".join(f"{room or 'ddtree'} {count:,}" for room, count in sorted(rooms.items(), key=_size))
    )


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _counted(names: Iterable[str], lines: dict[str, int]) -> str:
    known = [name for name in names if name in lines]
    return f"{len(known)} / {sum(lines[name] for name in known):,}"


def _size(item: tuple[str | None, int]) -> int:
    return -item[1]


if __name__ == "__main__":
    main()
