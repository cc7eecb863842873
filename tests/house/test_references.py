"""Every file, module, function and key that a docstring, a comment or a page names exists."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.project import ROOT, source_files, syntax_trees

QUOTED = re.compile(r"``([^`\n]+)``|`([^`\n]+)`")
NAME = re.compile(r"[A-Za-z_][\w.]*\w")
PATH = re.compile(
    r"(?<![\w/.-])(?:moecore|stages|tests|tools|benchmarks|docs|pipelines)/[\w/.-]*\w"
)
PAGES = ("*.md", "docs/**/*.md", "pipelines/*.md", "pipelines/*/README.md", "benchmarks/*.md")
CODE = ("*.py", "*.yaml", "*.toml", "Makefile", "*.js", "*.jinja", "*.sh")
DATA_FILE = re.compile(r".*\.(npy|txt|csv|json|safetensors)")
A_USERS_OWN = re.compile(r"(^|/)(my_\w+|NAME)\b")
OF_OTHERS = {  # names in the papers' public code, and of torch
    "analyze_routing_predictability.py",
    "data_ptr",
    "fixed_gain",
    "sigmoid_xent",
    "synthetic_data_s3",
}


def docstring_nodes(tree: ast.AST) -> set[ast.Constant]:
    """The string constants that are docstrings, of any statement that is only a string."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@cache
def words_of_code() -> frozenset[str]:
    """Every identifier and every word of a string in the code of the repository, and in its YAML.

    Docstrings, comments and pages are not among them: a name that only these have is dead.
    """
    words: set[str] = set()
    for folder in ("moecore", "stages", "tests", "tools", "benchmarks", "pipelines", "."):
        deep = "" if folder == "." else "**/"
        for pattern in CODE:
            for file in {*(ROOT / folder).glob(deep + pattern)} - {Path(__file__)}:
                text = file.read_text("utf-8", errors="replace")
                if file.suffix != ".py":
                    words |= set(re.findall(r"\w+", text))
                    continue
                tree = ast.parse(text)
                words |= set(file.relative_to(ROOT).with_suffix("").parts)
                described = docstring_nodes(tree)
                for node in ast.walk(tree):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        if node not in described:
                            words |= set(re.findall(r"\w+", node.value))
                    for field in ("id", "attr", "arg", "name", "asname", "module"):
                        name = getattr(node, field, None)
                        if isinstance(name, str):
                            words |= set(name.split("."))
    return frozenset(words)


def described_texts() -> Iterator[tuple[str, str]]:
    """Pairs of place and text: docstrings and comments of the code, and pages."""
    for path, text in source_files().items():
        for node in docstring_nodes(syntax_trees()[path]):
            if isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield f"{path}:{token.start[0]}", token.string
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            if page.name != "CHANGELOG.md":  # it names what is gone
                yield page.relative_to(ROOT).as_posix(), page.read_text("utf-8")


def dead_references(text: str) -> Iterator[str]:
    """Yield what ``text`` names that is not there."""
    for path in PATH.findall(text):
        if A_USERS_OWN.search(path) or DATA_FILE.fullmatch(path):
            continue
        if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}*")):
            yield path
    for pair in QUOTED.findall(re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
        quoted = "".join(pair)
        if not NAME.fullmatch(quoted) or "_" not in quoted.rstrip("_"):
            continue
        if quoted not in OF_OTHERS and not DATA_FILE.fullmatch(quoted):
            if any(word not in words_of_code() for word in quoted.split(".")):
                yield quoted


def test_what_is_named_exists():
    dead = [
        f"{place}: {name}" for place, text in described_texts() for name in dead_references(text)
    ]
    assert dead == []


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("See moecore/no_such.py and moecore/core/files.py.", ["moecore/no_such.py"]),
        ("Uses ``no_such_function`` after ``describe_refusal``.", ["no_such_function"]),
        ("Uses `core.no_such_one` after `core.files`.", ["core.no_such_one"]),
    ],
)
def test_a_dead_reference_is_seen(text, dead):
    assert list(dead_references(text)) == dead
