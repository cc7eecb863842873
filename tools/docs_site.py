"""Hooks of mkdocs.yml: the site has the repository's own Markdown under its own paths, so that one
relative link works in an editor, in a code host and on the site. MkDocs names the hooks.

mkdocstrings takes ``ClassAttributes`` from here.
"""

import html
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import moecore
from moecore.core.config import Config

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    ".",
    "docs",
    "docs/site",
    "docs/tutorials",
    "pipelines",
    "pipelines/*",
    "pipelines/*/*",
    "benchmarks",
    "conformance",
    "conformance/adapters",
    "conformance/findings",
)
SUFFIXES = (".md", ".py", ".png", ".css", ".js", ".ipynb", ".cff", ".yaml", "LICENSE")
NOTEBOOK = "docs/first_steps.ipynb"
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
    rendered = render_notebook((ROOT / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=rendered))
    return files


def render_notebook(text: str) -> str:
    """Return a notebook as Markdown: its texts, code, and stored outputs with their pictures."""
    lines = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            printed = "".join(output.get("text", data.get("text/plain", [])))
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                lines.append(f'<img alt="figure" src="data:image/png;base64,{picture}">')
            elif printed:
                lines.append(f"```\n{printed.rstrip()}\n```")
    return "\n\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with an empty line above each list, which Python-Markdown wants.

    The page of the public names gets what mkdocstrings reads from signatures and docstrings.
    """
    if page.file.src_uri == "docs/api.md":
        return "\n".join([markdown, *write_public_names()])
    markdown = markdown.replace("first_steps.ipynb)", "first_steps.ipynb.md)")
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


def write_public_names() -> Iterator[str]:
    """Yield a heading per public name, and per member of a public module or family."""
    for name in moecore.__all__:
        value = getattr(moecore, name)
        yield from write_name(f"moecore.{name}", value, 2)
        for member, part in public_members(value).items():
            yield from write_name(f"moecore.{name}.{member}", part, 3)


def write_name(name: str, value: Any, level: int) -> Iterator[str]:
    """Yield the heading of a public name, and its text or a directive for mkdocstrings."""
    if isinstance(value, (ModuleType, str)):
        text = "The installed version." if isinstance(value, str) else inspect.getdoc(value)
        yield f"{'#' * level} `{name}`\n\n{text}\n"
        return
    options = {"heading": name, "toc_label": name, "heading_level": level, **shown_members(value)}
    yield f"::: {value.__module__}.{value.__qualname__}\n    options: {json.dumps(options)}\n"


def shown_members(value: Any) -> dict[str, Any]:
    """Return mkdocstrings' options: a record's fields, or a part's settings and abstract methods.

    Other classes get no options, so that all members with a docstring are shown.
    """
    if hasattr(value, "_fields"):
        return {"members": list(value._fields), "show_if_no_docstring": True}
    if not is_part(value):
        return {}
    settings = [field for field in value.model_fields if field != "kind"]
    shown = [*settings, *sorted(value.__abstractmethods__)]
    return {"members": shown or False, "show_if_no_docstring": True}


def public_members(value: Any) -> dict[str, Any]:
    """Return name → public member of a module or family: parts, checks, base classes."""
    if not isinstance(value, ModuleType):
        return {}
    members = {
        name: member
        for name, member in inspect.getmembers(value)
        if not name.startswith("_") and getattr(member, "__module__", "").startswith("moecore")
    }
    if value in (moecore.lens, moecore.parts):
        return members
    is_offered = inspect.isfunction if value is moecore.testing else is_part
    return {name: member for name, member in members.items() if is_offered(member)}


def is_part(value: Any) -> bool:
    """Return whether ``value`` is the settings class of a part or measurement."""
    return inspect.isclass(value) and issubclass(value, Config)


class ClassAttributes(griffe.Extension):
    """Runs before griffe_pydantic, which lists an attribute without annotation as a field."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Label the attribute as one that instances do not have."""
        if attr.annotation is None and attr.parent is not None and attr.parent.is_class:
            attr.labels.discard("instance-attribute")
