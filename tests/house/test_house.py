"""The house: parts, lengths, imports, names, public names, and all that texts name exists."""

# That imports go down the rooms, and what may not be imported, hold import-linter and ruff
# (pyproject.toml; ``make lint``).

import ast
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import moecore
from moecore.core.source_layout import FAMILY_FOLDERS, ROOT
from tests.house.names import list_exceptions
from tests.project import source_files, syntax_trees
from tools.public_names import render_public_names

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
AT_IMPORT = (ast.If, ast.For, ast.While, ast.With, ast.Try)
# MLflow's set_model; an old name; and what hands a stage to a cluster before torch is imported
ACTING = ("moecore/tracking/pyfunc.py", "stages/__init__.py")
LABELS = r"\breal\(|\bis_real\b|(?<!tasks)\.multi_label\b|\blabels\.(dtype|is_floating_point)"
UNNAMED = r"# pyrefly: ignore(?!\[)|# fmt: |\b__import__\(|allow_pickle=True"


def list_offenders(is_wrong: Callable[[str, ast.AST], bool]) -> list[str]:
    return [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, tree in syntax_trees().items()
        for node in ast.walk(tree)
        if is_wrong(path, node)
    ]


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_lies_loose():
    files = sorted(file.name for file in (ROOT / "moecore").glob("*.py"))
    assert files == ["__init__.py", "parts.py"]


def test_no_circles():
    """Between files; an ``__init__`` may list what imports it."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in source_files()}
    TopologicalSorter(
        {
            module: {
                name
                for full in imported_names(syntax_trees()[path])
                for name in (full, full.rpartition(".")[0])
                if name in modules and name != module
            }
            for module, path in modules.items()
            if not path.endswith("__init__.py")
        }
    ).prepare()  # raises CycleError with the circle


def test_no_family_lists_its_parts():
    for family in FAMILY_FOLDERS:  # some offer them: `moecore.attacks.Pgd` is public
        names = set(imported_names(syntax_trees()[f"moecore/{family}/__init__.py"]))
        assert names <= {"moecore.core.config.lazy_getattr"}, family


def test_file_kind_and_class_have_one_name():
    for path, tree in syntax_trees().items():
        family, _, stem = path.removeprefix("moecore/").removesuffix(".py").rpartition("/")
        for node in tree.body if family in FAMILY_FOLDERS else ():
            # the result of a calibrator names the one it came from
            if not isinstance(node, ast.ClassDef) or node.name.startswith("Fitted"):
                continue
            lines = "\n".join(map(ast.unparse, node.body))
            for kind in re.findall(r'^kind: .* = ["\'](\w+)', lines, re.MULTILINE):
                assert kind == stem and node.name.lower() == kind.replace("_", ""), path


def test_files_and_functions_are_short():
    limits = {path: 60 if path.startswith("stages/") else 500 for path in source_files()}
    long = [path for path, text in source_files().items() if text.count("\n") > limits[path]]
    assert long == []

    def is_long(path: str, node: ast.AST) -> bool:
        return isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= 60

    assert list_offenders(is_long) == []
    assert (ROOT / "dvc.yaml").read_text(encoding="utf-8").count("\n") <= 170


def test_only_tasks_look_at_what_labels_are():
    others = {path: text for path, text in source_files().items() if "moecore/tasks/" not in path}
    assert [path for path, text in others.items() if re.search(LABELS, text)] == []


def test_what_is_ignored_is_named_and_nothing_is_imported_by_a_computed_name():
    assert [path for path, text in source_files().items() if re.search(UNNAMED, text)] == []


def test_a_conditional_expression_has_no_other_inside():
    def is_nested(path: str, node: ast.AST) -> bool:
        inside = [*ast.walk(node)][1:] if isinstance(node, ast.IfExp) else []
        return any(isinstance(other, ast.IfExp) for other in inside)

    assert list_offenders(is_nested) == []


def test_nothing_is_done_at_import():
    """No loops, calls or conditions at module level, but for the main guard and typing."""
    acting = [
        f"{path}:{node.lineno}"
        for path, tree in syntax_trees().items()
        if path not in ACTING
        for node in tree.body
        if isinstance(node, AT_IMPORT)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        if not re.match(r"if (__name__|(not )?(typing.)?TYPE_CHECKING)", ast.unparse(node))
    ]
    assert acting == []


def test_names_keep_the_rule_but_for_a_list_that_only_shrinks():
    breaches = list_exceptions(syntax_trees())
    listed = (ROOT / "tests/house/names.txt").read_text(encoding="utf-8").splitlines()
    added = sorted(set(breaches) - set(listed))
    assert added == [], "rename these; CONTRIBUTING.md has the rule"
    mended = sorted(set(listed) - set(breaches))
    assert mended == [], "run `python -m tests.house.names > tests/house/names.txt`"


def test_the_rule_by_hand():
    one = '''
def told(x): return x
def read_rows(found): """Of the file."""
def _shown(): pass
def measure(): pass
class Row:
    def kept(self):
        found = 1
'''
    other = "def read_rows(): pass"
    trees = {"one.py": ast.parse(one), "other.py": ast.parse(other)}
    assert list_exceptions(trees) == [
        "one.py:kept: a name `found`",
        "one.py:read_rows: a docstring that begins in mid-sentence",
        "one.py:read_rows: a name `found`",
        "one.py:read_rows: in several files",
        "one.py:told: one word",
        "other.py:read_rows: in several files",
    ]


SAID = "import sys, moecore; print(*dir(moecore)); print(*sys.modules)"


@pytest.mark.parametrize("name", moecore.__all__)
def test_a_public_name_is_there_and_has_a_docstring(name):
    value = getattr(moecore, name)
    parts = dir(value) if inspect.ismodule(value) else []
    for one in (value, *(getattr(value, part) for part in parts if part[:1].isupper())):
        assert isinstance(one, (str, bool)) or (inspect.getdoc(one) or "")[:1].isupper()


def test_families_offer_their_classes_and_renamed_names_alone_warn(monkeypatch):
    from moecore.attacks import Pgd

    assert Pgd is moecore.attacks.Pgd and "Pgd" in dir(moecore.attacks)
    assert {"Router", "TopKSoftmax"} <= set(dir(moecore.routers))
    with pytest.raises(AttributeError, match=r"'moecore\.routers' has no attribute 'Chance'"):
        moecore.routers.Chance  # noqa: B018
    with pytest.raises(AttributeError, match="module 'moecore' has no attribute 'load_modl'"):
        moecore.load_modl  # noqa: B018
    monkeypatch.setitem(moecore.RENAMED, "load_modl", "load_model")
    with pytest.warns(DeprecationWarning, match=r"moecore\.load_modl is now moecore\.load_model"):
        assert moecore.load_modl is moecore.load_model
    with pytest.raises(ImportError, match=r"parts.Shown; allowed: Metric, Values; since 0\.4\.0"):
        moecore.parts.Shown  # noqa: B018


def test_an_import_loads_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SAID], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names, modules = (line.split() for line in done.stdout.splitlines())
    assert names == moecore.__all__
    assert [name for name in modules if name.startswith("moecore")] == ["moecore"]
    assert not {"torch", "numpy", "pydantic"} & set(modules)


def test_the_page_is_what_the_code_says_and_names_what_a_part_may_define():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert page == render_public_names(), "run `python -m tools.public_names`"
    for row in ("sided: bool", "check_causal(key)", "needs: frozenset", "model_refusal(model)"):
        assert f"| `{row}" in page
    assert (
        "| `build(width)` | Return the experts for tokens of this width, d. **Required.** |" in page
    )


def shown_code() -> dict[str, str]:
    """Return the Python that README, tutorials and notebook show, by file."""
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")}
    texts[ROOT / "README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    code = {
        str(file): "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for file, text in texts.items()
    }
    notebook = json.loads((ROOT / "docs/first_steps.ipynb").read_text(encoding="utf-8"))
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return code | {"first_steps.ipynb": "\n".join("".join(cell) for cell in cells)}


def test_what_is_shown_uses_public_names_only():
    for file, code in shown_code().items():
        used = re.findall(r"\bmoecore\.(\w+)", code)
        used += re.findall(r"^from moecore import (.+)", code, re.MULTILINE)
        names = {name.strip() for one in used for name in one.split(",")}
        assert names <= set(moecore.__all__), file


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
    """Every identifier and word of a string in the code, and in its YAML."""
    # Docstrings, comments and pages are not among them: a name that only these have is dead.
    words: set[str] = set()
    rooms = ("moecore", "stages", "conformance", "tests", "tools", "benchmarks", "pipelines", ".")
    for folder in rooms:
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
        ("Uses ``no_such_function`` after ``format_found_and_allowed``.", ["no_such_function"]),
        ("Uses `core.no_such_one` after `core.files`.", ["core.no_such_one"]),
    ],
)
def test_a_dead_reference_is_seen(text, dead):
    assert list(dead_references(text)) == dead
