"""A target shared by the tests of drafters."""

import pytest

import tiny
from ddtree.model.target import Target


@pytest.fixture(scope="module")
def target():
    return Target(tiny.model("qwen3", tie_word_embeddings=False).requires_grad_(False))
