"""The server's drafting and what requests change of it: fields, ranges, errors."""

import pytest

from ddtree.errors import ConfigError
from ddtree.server.config import DraftSettings, ServerLimits


def test_a_request_changes_only_the_fields_it_names():
    server = DraftSettings(method="tree", depth=4, budget=32, drafter="lookup")
    assert server.merged(None) == server.merged({}) == server
    assert server.merged({"depth": 8, "drafter": None}) == DraftSettings("tree", 8, 32, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "magic"}, "method='magic'"), ({"method": ["tree"]}, "method="), ({"method": None}, "method=None"),
        ({"depth": 0}, "depth=0"), ({"depth": 17}, "depth=17"), ({"depth": True}, "depth=True"),
        ({"depth": 2.0}, "depth=2.0"), ({"budget": -1}, "budget=-1"), ({"budget": 1025}, "budget=1025"),
        ({"budget": "many"}, "budget='many'"), ({"budget": False}, "budget=False"), ({"budget": []}, "budget="),
        ({"drafter": 3}, "drafter=3"), ({"dept": 3}, "'dept': did you mean depth"),
        ({"xyz": 3}, "choose from method"), ([("depth", 3)], "must be an object"), ("tree", "must be an object"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_named(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        DraftSettings().merged(overrides)


def test_a_drafter_must_be_loaded():
    DraftSettings().check_drafter(())
    DraftSettings(drafter="lookup").check_drafter(("lookup",))
    with pytest.raises(ConfigError, match="'dflash' is not loaded: loaded are lookup"):
        DraftSettings(drafter="dflash").check_drafter(("lookup",))


@pytest.mark.parametrize("field", ["max_waiting", "max_body", "max_tokens", "max_n", "request_timeout"])
def test_limits_are_checked(field):
    for value in (-1, "many", True, float("nan")):
        with pytest.raises(ConfigError, match=field):
            ServerLimits(**{field: value})
