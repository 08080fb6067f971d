"""The dashboard in a real browser, against a real server with a tiny model. Needs Playwright's Python package and a
Chromium on the path."""

import json
import re
import shutil
import time
from contextlib import contextmanager

import pytest

import ddtree
import fakes
import talker
from ddtree.server.config import DraftSettings
from ddtree.server.engine_thread import EngineThread

playwright = pytest.importorskip("playwright.sync_api")
LANES = ("on", "off")
PATIENCE = 60_000  # ms; machines that build things are slow at times
playwright.expect.set_options(timeout=PATIENCE)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def model():
    with ddtree.load(talker.model(), tokenizer=talker.tokenizer(), max_rows=4, prefix_bytes=1 << 24) as model:
        yield model


@contextmanager
def served(model, **settings):
    """A worker, and the address that it is served at."""
    worker = EngineThread(model, name="tiny")
    worker.start()
    fakes.ready(worker)
    with fakes.served(worker, grace=0.0, **settings) as address:
        yield worker, address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=3 * PATIENCE
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[(1280, "light"), (390, "dark")], ids=["wide", "narrow"])
def opened(request, model, browser):
    width, scheme = request.param
    with served(model) as (worker, address):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE)
        yield context, worker, address
        context.close()


@pytest.fixture
def worker(opened):
    return opened[1]


@pytest.fixture
def page(opened):
    """The page, opened; that nothing was complained about in its console is checked afterwards."""
    context, worker, address = opened
    worker.set_drafting(DraftSettings(method="tree", budget=32))
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address + "/")
    playwright.expect(page.locator("#link")).to_have_text("live")
    yield page
    page.close()
    assert complaints == []


def test_a_message_is_answered_and_its_rounds_are_drawn(page):
    page.fill("#max-tokens", "200")
    page.fill("#chat-input", "abcabcabc")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#chat-note")).to_have_text("Answer complete.")
    assert page.locator("#chat-log .tok").count() > 0
    assert page.locator("#chat-log .tok.bonus").count() > 0
    playwright.expect(page.locator("#chat-log .figures")).to_have_text(
        re.compile(
            r"^[\d.]+ tokens/s · [\d.]+ tokens a round · \d+ tokens in .* · first after .* · then .* each"
        )
    )
    # The root and the target's next token, and in between what was drafted.
    playwright.expect(page.locator("#tree .node.bonus")).to_have_count(2)
    assert page.locator("#tree .node").count() > 2
    playwright.expect(page.locator("#rounds .round.shown")).to_have_count(1)
    playwright.expect(page.locator("#tau-now")).not_to_have_text("–")
    playwright.expect(page.locator("#tau-chart .line")).to_have_count(1)
    playwright.expect(page.locator("#arms")).to_contain_text("tree@")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_race_gives_the_same_text_twice(page):
    page.fill("#max-tokens", "60")
    page.click("#tab-race")
    page.fill("#race-input", "To be, or not to be")
    page.click("#race-go")
    playwright.expect(page.locator("#race-note")).to_contain_text("Same text")
    assert page.inner_text("#race-on") == page.inner_text("#race-off") != ""
    assert page.locator("#race-chart .line").count() == 2
    cached = [
        re.search(r"(\d+) prompt tokens cached", page.inner_text(f"#race-{lane}-figures")) for lane in LANES
    ]
    assert cached[0] and cached[1] and cached[0][1] == cached[1][1]  # no head start
    playwright.expect(page.locator("#gain")).to_have_text(re.compile(r"^[\d.]+×$"))
    playwright.expect(page.locator("#tpot-chart .reference")).to_have_count(1)


def test_rounds_are_looked_back_at(page):
    page.fill("#max-tokens", "200")
    page.fill("#chat-input", "abcabcabc")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#chat-note")).to_have_text("Answer complete.")
    rounds = page.locator("#rounds .round")
    playwright.expect(rounds.nth(1)).to_be_attached()
    rounds.first.click()
    playwright.expect(page.locator("#hold")).to_have_attribute("aria-pressed", "true")
    playwright.expect(rounds.first).to_have_class("round shown")
    playwright.expect(page.locator("#earlier")).to_be_disabled()
    page.focus("#later")
    page.keyboard.press("Enter")
    playwright.expect(rounds.nth(1)).to_have_class("round shown")
    made = int(re.search(r"(\d+) tokens? this round", page.inner_text("#tree-facts"))[1])
    assert re.search(rf"made {made}$", page.get_attribute("#rounds svg", "aria-label"))
    page.click("#hold")
    playwright.expect(page.locator("#hold")).to_have_attribute("aria-pressed", "false")


def test_a_tab_out_of_sight_gives_its_connection_up(model, browser):
    look = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    with served(model) as (worker, address):
        page.goto(address + "/")
        playwright.expect(page.locator("#link")).to_have_text("live")
        page.evaluate(look, True)
        fakes.eventually(lambda: not worker.book._watchers, 60)
        page.evaluate(look, False)
        playwright.expect(page.locator("#link")).to_have_text("live")
        fakes.eventually(lambda: len(worker.book._watchers) == 1, 60)
    page.close()


def test_the_controls_change_the_server_and_follow_it(page, worker):
    page.focus("#methods input:checked")
    page.keyboard.press("ArrowLeft")
    page.focus("#depth")
    page.keyboard.press("Home")
    playwright.expect(page.locator("#drafting-note")).to_have_text("In use from the next round on.")
    fakes.eventually(lambda: worker.drafting == DraftSettings(method="chain", depth=1, budget=32))
    worker.set_drafting(DraftSettings(method="off", depth=7, budget="auto"))
    playwright.expect(page.locator("#depth-value")).to_have_text("7")
    playwright.expect(page.locator("#methods input[value=off]")).to_be_checked()
    playwright.expect(page.locator("#budget-auto")).to_be_checked()


def test_an_answer_can_be_stopped(page, worker, monkeypatch):
    step = worker.model.step

    def slowly():
        time.sleep(0.2)
        return step()

    monkeypatch.setattr(worker.model, "step", slowly)
    worker.set_drafting(DraftSettings(method="off"))
    endless = {"ignore_eos": True, "max_tokens": 450}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, **endless})),
    )
    page.fill("#chat-input", "stop me")
    page.keyboard.press("Enter")
    page.click("#chat-stop")
    playwright.expect(page.locator("#chat-note")).to_have_text("Stopped.")
    playwright.expect(page.locator("#chat-log .figures")).to_contain_text("stopped")
    playwright.expect(page.locator("#rows")).to_have_text("0")


def test_the_theme_is_switched_and_kept(page):
    color = "getComputedStyle(document.body).backgroundColor"
    page.click("#theme")
    light = page.evaluate(color)
    page.click("#theme")
    assert page.evaluate(color) != light
    page.reload()
    playwright.expect(page.locator("#theme")).to_have_text("Theme: dark")


def test_the_page_comes_back_with_the_server(model, browser):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    with served(model) as (_, address):
        page.goto(address + "/")
        playwright.expect(page.locator("#link")).to_have_text("live")
    playwright.expect(page.locator("#link")).to_contain_text("Trying again")
    with served(model, port=int(address.rpartition(":")[2])):
        playwright.expect(page.locator("#link")).to_have_text("live")
    page.close()


def test_a_key_is_asked_for_and_used(model, browser):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    with served(model, api_keys=("sesame",)) as (_, address):
        page.goto(address + "/")
        playwright.expect(page.locator("#link")).to_contain_text("API key")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#link")).to_contain_text("refuses this API key")
        playwright.expect(page.locator("#key-box")).to_have_attribute("open", "")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#link")).to_have_text("live")
    page.close()
