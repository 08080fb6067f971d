"""Names of methods: what they mean, and what is refused."""

import pytest

from ddtree.bench.methods import MethodSpec, default_methods, parse_method, parse_methods
from ddtree.errors import ConfigError

MEMBERS = ("dflash", "lookup")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("off", MethodSpec("off", "off", 0)),
        ("chain", MethodSpec("chain", "chain", 16)),
        ("tree:16", MethodSpec("tree:16", "tree", 16)),
        ("tree:auto", MethodSpec("tree:auto", "tree", "auto")),
        ("auto", MethodSpec("auto", "auto", "auto")),
        ("chain@dflash", MethodSpec("chain@dflash", "chain", 16, ("dflash",))),
        ("tree:auto@dflash+lookup", MethodSpec("tree:auto@dflash+lookup", "tree", "auto", MEMBERS)),
        ("auto@lookup", MethodSpec("auto@lookup", "auto", "auto", ("lookup",))),
        ("tree:8+uncoupled", MethodSpec("tree:8+uncoupled", "tree", 8, None, False)),
        ("chain@lookup+uncoupled", MethodSpec("chain@lookup+uncoupled", "chain", 16, ("lookup",), False)),
    ],
)
def test_names_are_read(text, spec):
    assert parse_method(text, MEMBERS) == spec
    assert spec.adaptive == ("auto" in text)


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
        parse_method(text, MEMBERS)


def test_a_pair_without_a_drafter_has_plain_decoding_only():
    with pytest.raises(ConfigError, match="cell 'chain' needs a drafter"):
        parse_method("chain", ())
    assert default_methods([16], drafting=False) == ["off"]
    assert parse_method("off", ()).method == "off"


def test_off_comes_first_and_no_cell_twice():
    found = parse_methods(["auto", "chain", "off", "auto"], MEMBERS)
    assert [spec.name for spec in found] == ["off", "auto", "chain"]
    assert default_methods([8, "auto"]) == ["off", "chain", "tree:8", "tree:auto", "auto"]
