"""The dashboard as it is served, and its parts against each other; its logic where Node.js is at hand."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import fakes
from ddtree.server import app as application

FOLDER = Path(application.__file__).parent / "dashboard"
NAMES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = {name: (FOLDER / name).read_text("utf-8") for name in NAMES if name.endswith(("js", "mjs"))}
STYLES = {name: (FOLDER / name).read_text("utf-8") for name in NAMES if name.endswith(".css")}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = (FOLDER / "index.html").read_text("utf-8")


@pytest.fixture(scope="module")
def client():
    return TestClient(application.create_app(fakes.FakeWorker()))


class Elements(HTMLParser):
    """Start tags of the page with their attributes."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.feed(PAGE)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def values(self, attribute):
        return [attributes[attribute] for _, attributes in self.found if attribute in attributes]


ELEMENTS = Elements()


def test_the_page_is_at_the_root(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == (FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_with_its_type(client, name):
    answer = client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPES[Path(name).suffix]
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/dashboard/app.mjs"])
def test_the_policy_forbids_inline_code_and_other_hosts(client, path):
    policy = client.get(path).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"


def test_a_browser_that_has_the_file_is_told_so(client):
    first = client.get("/dashboard/app.mjs")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/dashboard/app.mjs", headers={"If-None-Match": f"W/{first.headers['etag']}"})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/dashboard/app.mjs", headers={"If-None-Match": '"old"'}).status_code == 200


def test_head_tells_what_get_does(client):
    head, get = client.head("/"), client.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == get.headers


@pytest.mark.parametrize("name", ["app.py", "..%2Fapp.py", "%2e%2e/app.py", "", "nothing.mjs"])
def test_nothing_else_is_served(client, name):
    assert client.get(f"/dashboard/{name}", follow_redirects=False).status_code in (404, 307)
    assert client.get(f"/dashboard/{name}").content != (FOLDER.parent / "app.py").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host(name):
    text = (FOLDER / name).read_text("utf-8")
    text = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]|@import|url\(", text)


def test_the_page_has_no_inline_script_style_or_handler():
    for tag, attributes in ELEMENTS.found:
        assert tag != "style" and "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "script" or "src" in attributes
    for text in SCRIPTS.values():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )


def test_all_that_the_page_and_its_modules_name_exists():
    named = [value for value in ELEMENTS.values("src") + ELEMENTS.values("href") if not value.startswith("#")]
    assert named and all(name.startswith("dashboard/") for name in named)
    assert {name.removeprefix("dashboard/") for name in named} <= set(NAMES)
    imported = {one for text in SCRIPTS.values() for one in re.findall(r'from "\./([^"]+)"', text)}
    assert imported <= set(NAMES)
    # And none is left over: each is loaded by the page or a module.
    assert set(NAMES) - {"index.html"} == imported | {name.removeprefix("dashboard/") for name in named}


def test_every_id_that_scripts_use_exists_once():
    ids = ELEMENTS.values("id")
    assert len(ids) == len(set(ids))
    used = set()
    for text in SCRIPTS.values():
        used |= set(re.findall(r'(?:byId|getElementById|number)\("([\w-]+)"', text))
        for template in re.findall(r"byId\(`([^`]+)`\)", text):
            pattern = re.compile(re.sub(r"\$\{[^}]*\}", r"[\\w]+", template))
            assert any(pattern.fullmatch(one) for one in ids), template
    assert len(used) > 30
    assert used <= set(ids)


def test_every_field_has_a_label_and_every_reference_a_target():
    ids = set(ELEMENTS.values("id"))
    assert set(ELEMENTS.values("for")) <= ids
    for attribute in ("aria-labelledby", "aria-controls"):
        assert set(ELEMENTS.values(attribute)) <= ids
    labelled = set(ELEMENTS.values("for"))
    wrapped = set(re.findall(r'<label[^>]*>[^<]*<input[^>]*id="([\w-]+)"', PAGE))
    fields = {a["id"] for tag, a in ELEMENTS.found if tag in ("input", "select", "textarea") and "id" in a}
    assert fields <= labelled | wrapped


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


COLOURS = {
    name: pair
    for name, *pair in re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLES["theme.css"]
    )
}


def test_every_colour_has_a_light_and_a_dark_form_and_is_used():
    used = {one for style in STYLES.values() for one in re.findall(r"var\(--([\w-]+)\)", style)}
    assert used == set(COLOURS)
    named = r"#[0-9a-f]{3,8}\b|\brgba?\("
    for name, style in STYLES.items():
        rules = re.sub(r"--[\w-]+: light-dark\([^)]*\);", "", style)
        assert not [line for line in rules.splitlines() if ":" in line and re.search(named, line)], name


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_pictures_stand_out(theme):
    texts = {
        "panel": ("ink", "dim", "accent", "second", "good", "bad"),
        "paper": ("ink", "dim", "accent", "second", "good", "bad"),
        "accent": ("on-accent",),
        **{ground: ("ink",) for ground in ("accent-soft", "d1", "d2", "d4", "d8")},
    }
    for ground, inks in texts.items():
        for ink in inks:
            assert contrast(COLOURS[ink][theme], COLOURS[ground][theme]) >= 4.5, (ink, ground)
    for name in ("field", "accent", "second", *(f"p{part}" for part in range(6))):
        assert contrast(COLOURS[name][theme], COLOURS["panel"][theme]) >= 3, name


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_logic_that_needs_no_page():
    file = Path(__file__).with_name("dashboard.test.mjs")
    done = subprocess.run(["node", "--test", str(file)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
