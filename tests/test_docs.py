"""The documents name only what is there: files, links, tests, and Python that compiles."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "src/ddtree/assets/demo/dflash/README.md",
]
FOLDERS = "src|tests|docs|benchmarks|scripts|tools|ddtree"
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("*.*") if path.suffix in (".py", ".mjs")}


def broken(document: Path, text: str) -> list[str]:
    """Return the links, paths and tests that a document's text names and that do not exist."""
    wrong = []
    for target in re.findall(r"\]\((?!https?:|#)([^)#]*)", text):
        if not (document.parent / target).exists():
            wrong.append(target)
    for name in re.findall(rf"(?<![\w./:-])(?:{FOLDERS})/[\w./*-]*\w", text):
        places = (ROOT, ROOT / "src", ROOT / "docs")
        if not any(list(place.glob(name)) for place in places):
            wrong.append(name)
    for name in re.findall(r"(?<![\w/.*-])(\w+\.py)\b", text):
        if not any(
            list((ROOT / top).rglob(name)) for top in ("src", "tests", "benchmarks", "scripts", "tools")
        ):
            wrong.append(name)
    for file, name in re.findall(r"(?:(\w+\.py)::)?\b(test_\w+)\b(?!\.py|/)", text):
        sources = [source for path, source in TESTS.items() if not file or path.name == file]
        if not any(re.search(rf"def {name}\(", source) for source in sources):
            wrong.append(f"{file}::{name}")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_paths_and_tests_in_documents_exist(document):
    assert not broken(document, document.read_text())


@pytest.mark.parametrize("text", [
    "[x](no.md)", "`src/ddtree/no.py`", "`ddtree/no/`", "`no_such.py`", "`test_no_such`", "`test_docs.py::test_no`",
])  # fmt: skip
def test_what_does_not_exist_is_found(text):
    assert len(broken(ROOT / "README.md", text)) == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_compiles(document):
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        compile(textwrap.dedent(block), document.name, "exec")
