"""Keys, names of the server, other origins."""

import httpx
import pytest

import fakes

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked():
    settings = {"api_keys": ("first key", "second"), "cors_origins": ("https://good.example",)}
    with fakes.served(fakes.FakeWorker(), **settings) as address, httpx.Client(base_url=address) as client:
        yield client


@pytest.fixture(scope="module")
def local():
    with (
        fakes.served(fakes.FakeWorker(), hosts=("localhost", "127.0.0.1", "::1", "Box.example")) as address,
        httpx.Client(base_url=address) as client,
    ):
        yield client


@pytest.mark.parametrize("key", ["first key", "second"])
def test_any_of_the_keys_opens(locked, key):
    assert locked.post(CHATS, json=CHAT, headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer third", "Bearer first", "Basic second", "second"]
)
def test_nothing_else_does(locked, sent):
    headers = {} if sent is None else {"Authorization": sent}
    response = locked.post(CHATS, json=CHAT, headers=headers)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/api/state", "/api/events", "/api/drafting", "/v1/completions", "/tokenize", "/nowhere"],
)
def test_all_that_tells_of_texts_or_changes_something_needs_a_key(locked, path):
    for method in ("GET", "POST"):
        assert locked.request(method, path, json={}).status_code == 401


@pytest.mark.parametrize("path", ["/", "/health", "/health/ready", "/metrics", "/version", "/openapi.json"])
def test_what_tells_nothing_of_them_is_open(locked, path):
    assert locked.get(path).status_code == 200


def test_pages_of_the_origins_named_may_call_and_no_others(locked):
    def allowed(origin):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return locked.options(CHATS, headers=asked).headers.get("access-control-allow-origin")

    assert allowed("https://good.example") == "https://good.example"
    assert allowed("https://evil.example") is None


def test_without_an_origin_named_there_is_no_cors(local):
    headers = local.get("/version", headers={"Origin": "https://good.example"}).headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "box.example"])
def test_names_of_the_server_are_let_in(local, host):
    assert local.get("/version", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:8000"]
)
def test_a_site_whose_name_leads_here_is_not(local, host):
    assert local.post(CHATS, json=CHAT, headers={"Host": host}).status_code == 421
