"""Hooks of mkdocs.yml: the site has the repository's own Markdown under its own paths, so that one
relative link works in an editor, in a code host and on the site. MkDocs names the hooks.
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "docs", "docs/site", "docs/tutorials", "pipelines", "pipelines/*", "benchmarks")
SUFFIXES = (".md", ".png", ".css", ".js", ".ipynb", ".cff", "overlay.yaml", "LICENSE")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LIST_BELOW_TEXT = re.compile(r"^(?!\s*(?:[-|]|\d+\.) )(.*\S.*\n)(?=(?:-|1\.) )", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files and every page and picture under its path in the repository."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for folder in FOLDERS:
        for path in sorted(ROOT.glob(f"{folder}/*")):
            if path.name.endswith(SUFFIXES):
                place = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with an empty line above each list, which Python-Markdown wants."""
    pieces = FENCE.split(markdown)
    pieces[::2] = [LIST_BELOW_TEXT.sub(r"\1\n", piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with each formula in MathML, which browsers draw without a script."""
    return FORMULA.sub(
        lambda formula: convert(
            html.unescape(formula[2]), display="block" if formula[1] == "div" else "inline"
        ),
        content,
    )
