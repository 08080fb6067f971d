"""The documents name only what is there: files, links, tests, methods of classes, and Python that compiles."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CARD = ROOT / "src/ddtree/assets/demo/dflash/README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), CARD]
ROOTS = (ROOT, ROOT / "src", ROOT / "docs")
TOPS = ("src", "tests", "docs", "benchmarks", "scripts", "tools")
FILES = [path for top in TOPS for path in (ROOT / top).rglob("*") if path.suffix in (".py", ".mjs")]
SOURCES = {path: path.read_text() for path in FILES}


def defined(name: str, file: str = "", within: str = "") -> bool:
    """Return whether a file of this name, or any, defines a function or attribute, maybe of a class."""
    texts = [text for path, text in SOURCES.items() if file in ("", path.name)]
    if within:
        classes = [re.split(r"\n(?=\S)", text)[1:] for text in texts]
        texts = [part for parts in classes for part in parts if re.match(rf"class {within}\b", part)]
        return any(re.search(rf"(def |self\.|^    ){name}\b", text, re.MULTILINE) for text in texts)
    return any(re.search(rf"def {name}\(", text) for text in texts)


def broken(document: Path, text: str) -> list[str]:
    """Return the links, paths, tests and methods that a document's text names and that do not exist."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]*)", text)
    paths = re.findall(rf"(?<![\w./:-])(?:{'|'.join(TOPS)}|ddtree)/[\w./*-]*\w", text)
    scripts = re.findall(r"(?<![\w/.*-])(\w+\.py)\b", text)
    tests = re.findall(r"(?:(\w+\.py)::)?\b(test_\w+)\b(?!\.py|/)", text)
    members = re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)\(?\)?`", text)
    return [
        *(link for link in links if not (document.parent / link).exists()),
        *(path for path in paths if not any(list(root.glob(path)) for root in ROOTS)),
        *(script for script in scripts if script not in {path.name for path in FILES}),
        *(name for file, name in tests if not defined(name, file)),
        *(f"{owner}.{name}" for owner, name in members if not defined(name, within=owner)),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists_and_its_python_compiles(document):
    text = document.read_text()
    assert not broken(document, text)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(textwrap.dedent(block), document.name, "exec")


@pytest.mark.parametrize("text", [
    "[x](no.md)", "`src/ddtree/no.py`", "`ddtree/no/`", "`no_such.py`", "`test_no_such`", "`test_docs.py::test_no`",
    "`Engine.no`", "`NoClass.step`",
])  # fmt: skip
def test_what_does_not_exist_is_found(text):
    assert len(broken(ROOT / "README.md", text)) == 1
