"""The source files that the tests of the house read, each parsed once."""

import ast
from functools import cache

from moecore.core.source_layout import ROOT


@cache
def source_files() -> dict[str, str]:
    """Return path → text of every file of moecore and stages."""
    files = [*(ROOT / "moecore").rglob("*.py"), *(ROOT / "stages").glob("*.py")]
    return {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in sorted(files)}


@cache
def syntax_trees() -> dict[str, ast.Module]:
    """Return path → syntax tree of every file."""
    return {path: ast.parse(text, path) for path, text in source_files().items()}
