"""The pages: links and headings of all Markdown, and the site that `make docs` makes of it."""

import html
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import moecore
from tests.browser import LOOKS, clipped, opened
from tests.project import ROOT

PATTERNS = ("*.md", "docs/**/*.md", "pipelines/*.md", "pipelines/*/README.md", "benchmarks/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FROM_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]+(?:src|href)="(?:https?:)?//')


def heading_anchors(path: Path) -> Iterator[str]:
    """The anchors of a page's headings, as code hosts and the site write them."""
    used: Counter[str] = Counter()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for heading in HEADING.findall(text):
        words = re.sub(r"\]\([^)]*\)", "", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        yield f"{anchor}-{used[anchor]}" if used[anchor] else anchor
        used[anchor] += 1


def broken_links(page: Path) -> Iterator[str]:
    for pair in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        link = "".join(pair)
        target, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or anchor and anchor not in heading_anchors(file):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_every_link_leads_to_a_file_and_a_heading():
    assert len(PAGES) > 25
    assert [link for page in PAGES for link in broken_links(page)] == []


@pytest.mark.parametrize("text", ["[a](no.md)", "[a](README.md#no)", "[a](#no)", "[a]: no.md"])
def test_a_broken_link_is_seen(text, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(f"# Yes\n[b](#yes) `[c](no.md)`\n\n{text}\n", encoding="utf-8")
    assert len(list(broken_links(page))) == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for module in ("material", "latex2mathml", "mkdocstrings"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: `make docs` does it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_is_built_and_asks_nothing_of_others(site):
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) > len(PAGES)  # and that of errors
    assert [page.name for page, text in pages.items() if FROM_ELSEWHERE.search(text)] == []
    assert "arithmatex" not in pages[site / "docs/methods.html"]


def test_every_public_name_is_described(site):
    page = (site / "docs/api.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for name in moecore.__all__:
        assert f"moecore.{name}\n" in text or f"moecore.{name}¶" in text, name
    assert "moecore.routers.NoisyTopK" in text
    assert "attention heads; they divide the width" in text  # a setting's description


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize(
    "name", ["index", "docs/api", "docs/tutorials/first_runs", "docs/methods", "docs/claims"]
)
def test_a_page_fits_the_screen(site, browser, name, width, scheme):
    with opened(browser, site / f"{name}.html", width, scheme) as page:
        assert clipped(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_search_works_from_disk(site, browser):
    with opened(browser, site / "docs/faq.html", 1400, "light") as page:
        page.click(".md-search__input")
        page.keyboard.type("expert choice", delay=20)
        page.wait_for_selector(".md-search-result__link[href*='expert-choice']")
