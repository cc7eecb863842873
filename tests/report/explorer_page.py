"""The explorer opened in a browser: where it is written, and what it says of itself."""

from pathlib import Path

from moecore.report.page.explorer_page import explorer

PICKED = "#phase=pretrain&method=vmoe&beside=prc&layer=2&image=3&patch=4&kind=attack&step=2"


def written(path: Path, found) -> Path:
    path.write_text(explorer(found), encoding="utf-8")
    return path


def address(path: Path, state: str = "") -> str:
    return path.resolve().as_uri() + state


def settled(page):
    """The page once nothing is being drawn."""
    page.wait_for_selector("main[data-drawn]")
    page.wait_for_function("find('main').dataset.drawn === String(turn)")
    return page


def numbers(page, panel: int = 0) -> list[str]:
    """What stands in the patches, row by row."""
    settled(page)
    return page.locator(f".panel >> nth={panel}").locator(".cell").all_text_contents()


def state(page) -> dict[str, str]:
    settled(page)
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
