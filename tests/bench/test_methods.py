"""Cells: how a way of decoding is written."""

import pytest

from ddtree.bench import methods as cells
from ddtree.bench.methods import Cell
from ddtree.errors import ConfigError

MEMBERS = ("dflash", "lookup")


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("off", Cell("off", "off", 0)),
        ("chain", Cell("chain", "chain", 16)),
        ("tree:16", Cell("tree:16", "tree", 16)),
        ("tree:auto", Cell("tree:auto", "tree", "auto")),
        ("auto", Cell("auto", "auto", "auto")),
        ("chain@dflash", Cell("chain@dflash", "chain", 16, ("dflash",))),
        ("tree:auto@dflash+lookup", Cell("tree:auto@dflash+lookup", "tree", "auto", ("dflash", "lookup"))),
        ("auto@lookup", Cell("auto@lookup", "auto", "auto", ("lookup",))),
        ("tree:8+uncoupled", Cell("tree:8+uncoupled", "tree", 8, None, False)),
        ("chain@lookup+uncoupled", Cell("chain@lookup+uncoupled", "chain", 16, ("lookup",), False)),
    ],
)
def test_names_are_read(text, cell):
    assert cells.parse(text, MEMBERS) == cell
    assert cell.adaptive == ("auto" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree", "unknown cell 'tree': write off, chain"),
        ("chain:4", "unknown cell"),
        ("auto:4", "unknown cell"),
        ("beam:4", "unknown cell"),
        ("", "unknown cell"),
        ("tree:", "a tree's budget is auto or a whole number in 1..1024"),
        ("tree:0", "a tree's budget"),
        ("tree:-4", "a tree's budget"),
        ("tree:1025", "a tree's budget"),
        ("tree:1.5", "a tree's budget"),
        ("tree:16@eagle", "there is no drafter 'eagle'; choose from dflash, lookup"),
        ("tree:16@", "there is no drafter ''"),
        ("tree:16@dflash+dflash", "names a drafter twice"),
        ("off@lookup", "off drafts nothing"),
        ("off+uncoupled", "off drafts nothing"),
    ],
)
def test_names_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        cells.parse(text, MEMBERS)


def test_a_pair_without_a_drafter_has_plain_decoding_only():
    with pytest.raises(ConfigError, match="cell 'chain' needs a drafter"):
        cells.parse("chain", ())
    assert cells.usual([16], drafting=False) == ["off"]
    assert cells.parse("off", ()).method == "off"


def test_off_comes_first_and_no_cell_twice():
    found = cells.parse_all(["auto", "chain", "off", "auto"], MEMBERS)
    assert [cell.name for cell in found] == ["off", "auto", "chain"]
    assert cells.usual([8, "auto"]) == ["off", "chain", "tree:8", "tree:auto", "auto"]
