"""The house: a part is a file, files are short, labels are for tasks, imports do nothing, and names
keep the rule of CONTRIBUTING.md.

That imports go down the rooms, and what may not be imported, hold import-linter and ruff
(pyproject.toml; ``make lint``).
"""

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter

from moecore.core.source_layout import FAMILIES, ROOT
from tests.house.names import list_exceptions
from tests.project import source_files, syntax_trees

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
AT_IMPORT = (ast.If, ast.For, ast.While, ast.With, ast.Try)
# MLflow's set_model; an old name; and what hands a stage to a cluster before torch is imported
ACTING = ("moecore/tracking/pyfunc.py", "moecore/pages/__init__.py", "stages/__init__.py")
LABELS = r"\breal\(|\bis_real\b|(?<!tasks)\.multi_label\b|\blabels\.(dtype|is_floating_point)"
UNNAMED = r"# pyrefly: ignore(?!\[)|# fmt: |\b__import__\(|allow_pickle=True"


def list_offenders(is_wrong: Callable[[str, ast.AST], bool]) -> list[str]:
    """Return path:line of every node of every file that is wrong."""
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
    for family in FAMILIES:  # some offer them: `moecore.attacks.Pgd` is public
        names = set(imported_names(syntax_trees()[f"moecore/{family}/__init__.py"]))
        assert names <= {"moecore.core.config.offer_classes"}, family


def test_file_kind_and_class_have_one_name():
    for path, tree in syntax_trees().items():
        family, _, stem = path.removeprefix("moecore/").removesuffix(".py").rpartition("/")
        for node in tree.body if family in FAMILIES else ():
            # the result of a calibrator names the one it came from
            if not isinstance(node, ast.ClassDef) or node.name.startswith("Fitted"):
                continue
            for kind in re.findall(r'^kind: .* = ["\'](\w+)', class_lines(node), re.MULTILINE):
                assert kind == stem and node.name.lower() == kind.replace("_", ""), path


def class_lines(node: ast.ClassDef) -> str:
    return "\n".join(ast.unparse(line) for line in node.body)


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
        if not re.match(r"if (__name__|TYPE_CHECKING|typing.TYPE_CHECKING)", ast.unparse(node))
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
