"""A target shared by the tests of the engine."""

import pytest

import tiny


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")
