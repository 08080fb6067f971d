"""The rooms of the package, from top to bottom, and what imports what.

A room is a sub-package of `ddtree`, with everything below it, or a top-level module. Imports point from a layer to
those below it, never up and never sideways; `tests/test_layers.py` reads them all, also those within functions. The
package's own `__init__` and `__main__` are no rooms: the first names the public face without importing it, the second
starts the command line.

    python tools/layers.py            print the rooms and what each imports
    python tools/layers.py --write    put the table of layers into docs/structures.md
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ddtree"
DOCUMENT = ROOT / "docs" / "structures.md"
BEGIN, END = "<!-- layers: written by tools/layers.py -->", "<!-- end of layers -->"

LAYERS: tuple[dict[str, str], ...] = (
    {"cli": "the commands and what they print"},
    {
        "bench": "prompt sets, methods measured side by side, tables and pictures",
        "train": "answers of the target, features, losses, the training loop, export",
        "server": "the thread that decodes, HTTP around it, the dashboard",
        "integrations": "`custom_generate` of transformers; the plugin for vLLM",
    },
    {"api": "`load`, `Model`, `Stream`: the public face"},
    {"engine": "the loop of rounds, the scheduler, sequences, the prefix cache, text of tokens"},
    {"policy": "how much to draft: latency, acceptance, the choice of drafters and nodes"},
    {
        "inspection": "what a checkpoint is, and whether a drafter fits a target",
        "prompts": "text, chats and ids as token ids",
    },
    {"drafters": "the `Drafter` protocol, and one file for each way to draft"},
    {"model": "target models: loading, attention, the key/value cache, verification"},
    {"sampling": "the target's choice at a position"},
    {"tree": "`DraftTree`: build, ancestor mask, walk"},
    {
        "stats": "time and counts of a sequence",
        "storage": "the cache folder, and files written whole or not at all",
    },
    {"errors": "what a user can cause, and the checks and wording of messages"},
)


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Dotted name and file of every module of a package."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str | None:
    """The room of a module, as "drafters" for `ddtree.drafters.dflash.heads`; None for `__init__` and `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def imports(module: str, files: Mapping[str, Path]) -> Iterator[str]:
    """The modules of `files` that a module imports anywhere, by statement or by name (as `importlib` takes it).

    The package itself is left out.
    """
    package = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in _nodes(files[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in files else base for name in names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        yield from (name for name in names if name in files and name != module and "." in name)


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """The statements and strings of a file that may name modules."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def arrows(files: Mapping[str, Path]) -> dict[tuple[str, str], list[str]]:
    """Which room imports which other one, and by which imports."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in files:
        here = room_of(module)
        for other in imports(module, files):
            there = room_of(other)
            if here is not None and there is not None and here != there:
                found[here, there].append(f"{module} imports {other}")
    return dict(found)


def upward(found: Mapping[tuple[str, str], list[str]]) -> list[str]:
    """The imports that do not point to a lower layer."""
    level = {room: at for at, layer in enumerate(LAYERS) for room in layer}
    unknown = {room for pair in found for room in pair} - set(level)
    wrong = [f"{room} is in no layer" for room in sorted(unknown)]
    for (here, there), lines in sorted(found.items()):
        if not unknown & {here, there} and level[here] >= level[there]:
            wrong += lines
    return wrong


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another, each sorted (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def table() -> str:
    """The layers as a table of Markdown."""
    lines = [
        BEGIN,
        "",
        "| layer | room | what it owns |",
        "| --: | --- | --- |",
        *(
            f"| {at} | `{room}{'/' if (SOURCE / room).is_dir() else '.py'}` | {text} |"
            for at, layer in enumerate(LAYERS, 1)
            for room, text in layer.items()
        ),
        "",
        END,
    ]
    return "\n".join(lines)


def written(text: str) -> str:
    """A document with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
        return
    found = arrows(modules())
    for layer in LAYERS:
        for room in layer:
            below = sorted(there for here, there in found if here == room)
            print(f"{room:14}{', '.join(below)}")


if __name__ == "__main__":
    main()
