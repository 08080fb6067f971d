#!/usr/bin/env python3
"""Takes the pictures of the dashboard in docs/: a real server, real answers, a real browser.

    make browser
    ddtree serve demo &
    .venv/bin/python scripts/screenshots.py http://127.0.0.1:8000 docs/images

Needs Chromium on the path, and Pillow (matplotlib brings it), which keeps the files small.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

CHAT = "Write a Python function that returns the n-th Fibonacci number."
RACE = "List the months of the year with the number of days in each."
BUDGET = "6"  # a place on the slider: 12 nodes, so that there is a tree to see
PATIENCE = 300_000  # ms
MARGIN = 12  # pixels
COLOURS = 256  # of a picture: flat areas and text need no more


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of the dashboard in docs/.")
    parser.add_argument("address", help="of a server without other traffic")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as started:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, width, height, scheme in (("wide", 1280, 900, "light"), ("narrow", 390, 844, "dark")):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.goto(asked.address)
            expect(page.locator("#link")).to_have_text("live")
            page.click("#methods label:has-text('auto')")
            race(page)
            if name == "wide":
                save(page, asked.folder / "dashboard-race.png", "body", "#playground")
            page.click("#methods label:has-text('tree')")
            page.uncheck("#budget-auto")
            page.fill("#budget", BUDGET)
            expect(page.locator("#drafting-note")).to_have_text("In use from the next round on.")
            chat(page)
            if name == "wide":
                save(page, asked.folder / "dashboard-wide.png", "body", "#live")
            else:
                save(page, asked.folder / "dashboard-narrow.png", "#playground", "#last-round")
            page.check("#budget-auto")
            page.click("#methods label:has-text('auto')")
            expect(page.locator("#budget-value")).to_have_text("auto")
            context.close()
        browser.close()


def race(page: Page) -> None:
    """The prompt with drafting and without, to the end."""
    page.click("#tab-race")
    page.fill("#race-input", RACE)
    page.click("#race-go")
    expect(page.locator("#race-go")).to_be_visible()
    expect(page.locator("#gain")).to_be_visible()


def chat(page: Page) -> None:
    """An answer to its end, and of the last 25 rounds the one that gave most."""
    page.click("#tab-chat")
    page.fill("#chat-input", CHAT)
    page.keyboard.press("Enter")
    expect(page.locator("#chat-note")).to_have_text("Answer complete.")
    page.evaluate(
        """() => {
            const height = (round) => Number(round.querySelector(".bar").getAttribute("height"));
            const rounds = [...document.querySelectorAll("#rounds .round")].slice(-25);
            const best = rounds.reduce((one, other) => (height(other) > height(one) ? other : one));
            best.dispatchEvent(new MouseEvent("click"));
            document.activeElement.blur();
        }"""
    )
    expect(page.locator("#rows")).to_have_text("0")


def save(page: Page, path: Path, first: str, last: str) -> None:
    """Write the page from the start of one element to the end of another as a small PNG."""
    taken = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    edges = "([one, other]) => [[one, 'top'], [other, 'bottom']].map(([name, edge]) => "
    edges += "document.querySelector(name).getBoundingClientRect()[edge] + scrollY)"
    top, bottom = page.evaluate(edges, [first, last])
    taken = taken.crop((0, max(0, int(top) - MARGIN), taken.width, min(taken.height, int(bottom) + MARGIN)))
    taken.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, f"{taken.width} x {taken.height}", f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
