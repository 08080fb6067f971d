"""Rules of the house: names are unique, and public definitions say what they do."""

import ast
from collections import defaultdict

import layers
import pytest

FILES = sorted(layers.SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
_WORDS = """
A An The This These That It Its Of As At In On By For From To With What How Where When Whether Which Who Why
All Any Both Each Every Many Most Some No None Nothing One Likewise
"""
NOT_VERBS = set(_WORDS.split())


def public(tree):
    """Give the public definitions of a module, with the methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def decorators(node):
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def first_line(node):
    return (ast.get_docstring(node) or "").partition("\n")[0]


def where(path, node):
    return f"{path.relative_to(layers.SOURCE)}:{node.lineno} {node.name}: {first_line(node)}"


def test_no_two_files_share_a_name():
    places = defaultdict(list)
    for path in FILES:
        if path.name not in ("__init__.py", "cli.py"):
            places[path.name].append(str(path.relative_to(layers.SOURCE)))
    assert [found for found in places.values() if len(found) > 1] == []


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(where(path, node))
    assert [found for found in places.values() if len(found) > 1] == []


def test_every_public_definition_has_a_docstring():
    missing = [
        where(path, node)
        for path, tree in TREES.items()
        for node in public(tree)
        if not first_line(node)
        and not decorators(node) & {"overload"}
        and ".setter" not in str(decorators(node))
    ]
    assert missing == []


def test_docstrings_of_functions_begin_with_a_verb():
    """A property is an attribute, and may be named by a noun."""
    wrong = [
        where(path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not decorators(node) & {"property", "cached_property"}
        and first_line(node)
        and first_line(node).split()[0].strip(".,:;'\"`") in NOT_VERBS
    ]
    assert wrong == []


@pytest.mark.parametrize("text", ["Where it goes.", "The tokens of a row.", "What was told."])
def test_a_sentence_without_a_verb_would_be_found(text):
    node = ast.parse(f'def f():\n    """{text}"""\n').body[0]
    assert first_line(node).split()[0] in NOT_VERBS
