"""Whatever JSON a client sends, the answer is 200 or an error in OpenAI's form, and never the server's own failure."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes
from ddtree.server import schemas

PATHS = {
    "/v1/chat/completions": (schemas.ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (schemas.CompletionRequest, {"prompt": "hi"}),
    "/tokenize": (schemas.TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (schemas.DetokenizeRequest, {"tokens": [1]}),
    "/api/drafting": (schemas.DraftingRequest, {}),
}
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PLAUSIBLE = st.sampled_from(
    [0, 1, -1, 2**63, 0.5, True, "x", "", ["x"], [1], {}, {"1": 1}, {"include_usage": True}, {"depth": 3}]
)


@pytest.fixture(scope="module")
def client():
    with fakes.served(fakes.FakeWorker()) as address, httpx.Client(base_url=address) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_no_request_makes_the_server_fail(client, path):
    schema, least = PATHS[path]
    others = ("tools", "response_format", "best_of", "suffix", "unknown")
    names = st.sampled_from([*schema.model_fields, *others])

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(names, PLAUSIBLE | JSON, max_size=4), st.booleans())
    def check(fields, whole):
        response = client.post(path, json={**least, **fields} if whole else fields)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}

    check()
