"""Imports point down the layers of `tools/layers.py`, and the document that shows them is made from the same list."""

import layers
import size

FILES = layers.modules()


def test_imports_point_to_lower_layers_only():
    assert layers.upward(layers.arrows(FILES)) == []


def test_every_room_is_in_one_layer():
    named = [room for layer in layers.LAYERS for room in layer]
    assert sorted(named) == sorted({layers.room_of(module) for module in FILES} - {None})


def test_no_files_import_one_another_in_a_circle():
    assert layers.circles({module: set(layers.imports(module, FILES)) for module in FILES}) == []


def test_the_document_shows_the_layers():
    """If it does not, run `python tools/layers.py --write`."""
    assert layers.table() in layers.DOCUMENT.read_text()


def package(folder, **texts):
    """The modules of a package made of these files."""
    for name, text in {"__init__": "", **texts}.items():
        path = folder / "ddtree" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return layers.modules(folder / "ddtree")


def test_imports_that_point_up_or_sideways_are_found(tmp_path):
    files = package(
        tmp_path,
        tree="def f():\n    from ddtree import model\n",
        model="from .errors import E\n",
        stats="import ddtree.storage\n",
        storage="",
        errors="",
        surprise="NAME = 'ddtree.model'\n",
    )
    found = layers.arrows(files)
    assert set(found) == {("tree", "model"), ("model", "errors"), ("stats", "storage"), ("surprise", "model")}
    assert layers.upward(found) == [
        "surprise is in no layer",
        "ddtree.stats imports ddtree.storage",
        "ddtree.tree imports ddtree.model",
    ]


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert sorted(layers.circles(graph)) == [["a", "b", "c"], ["f", "g"]]


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        '"""Two\n\nlines."""\n\n# Why.\nTEXT = """a\n\nb"""  # how\n\ndef f(\n    x,\n):\n    "says"\n    return x\n'
    )
    assert size.code_lines(path) == 6


def test_what_a_module_reaches_are_its_imports_and_theirs(tmp_path):
    files = package(
        tmp_path, api="import ddtree.tree\n", tree="from ddtree import errors\n", errors="", other=""
    )
    assert size.reached(files) == {"ddtree.api", "ddtree.tree", "ddtree.errors"}
