"""Pages in headless Chromium: what a person sees, and that nothing is asked of the network."""

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LOOKS = [(1400, "light"), (390, "dark")]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Debian's Chromium, without a screen; skips where it or playwright is not installed."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    playwright_api = pytest.importorskip("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@contextmanager
def opened(
    browser: "Browser", address: Path | str, width: int, scheme: str, known: Collection[str] = ()
) -> "Iterator[Page]":
    """The page of a file or address, without errors or requests beyond its folder or server."""
    # known: what the errors of other people's pages hold, which are let pass.
    target = address.resolve().as_uri() if isinstance(address, Path) else address
    inside = "file:" if isinstance(address, Path) else "/".join(target.split("/")[:3])
    colours = "dark" if scheme == "dark" else "light"
    view = {"width": width, "height": 900}
    context = browser.new_context(viewport=view, color_scheme=colours)
    page = context.new_page()
    wrong: list[str] = []

    def said(message: "ConsoleMessage") -> None:
        if message.type == "error" and not any(part in message.text for part in known):
            wrong.append(f"console: {message.text}")

    def asked(request: "Request") -> None:
        if not request.url.startswith((inside, "data:", "blob:")):
            wrong.append(f"asked for {request.url}")

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", asked)
    page.goto(target)
    yield page
    context.close()
    assert not wrong, wrong


def clipped(page: "Page") -> list[str]:
    """What is wider than the screen and lies in nothing that scrolls."""
    return page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(element => {
          const box = element.getBoundingClientRect();
          if (!box.width || !box.height) return false;
          if (box.right <= document.documentElement.clientWidth + 1 && box.left >= -1) return false;
          for (let up = element.parentElement; up; up = up.parentElement) {
            const how = getComputedStyle(up).overflowX;
            if (how === 'auto' || how === 'scroll' || how === 'hidden') return false;
          }
          return getComputedStyle(element).position !== 'fixed';
        }).map(element => element.tagName + '.' + element.className)"""
    )
