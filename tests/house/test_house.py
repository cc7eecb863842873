"""The house: imports go down, siblings stay apart, a part is a file, nothing is unpickled."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.core.sources import FAMILIES, ROOT

ROOMS = (  # from the ground up (imports go down this list)
    "core",
    "statistics",
    "tasks",
    "nn",
    "data",
    "attacks",
    "training",
    "measure",
    "brain",
    "study",
    "report",
    "run",
    "tracking",
    "pipeline",
)
LEVEL = {room: level for level, room in enumerate(ROOMS)}
FILES = sorted((ROOT / "moecore").rglob("*.py")) + sorted((ROOT / "stages").glob("*.py"))
PARTS = [
    file for family in FAMILIES for file in sorted((ROOT / "moecore" / family).glob("[a-z]*.py"))
]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, at the top or inside functions."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{relative(file)}:{node.lineno}: a relative import; write it in full"
            )
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_only_go_down(file):
    words = file.relative_to(ROOT).with_suffix("").parts
    if words == ("stages", "server"):  # it forks them; none imports it
        return
    if words[0] == "stages":
        assert not [name for name in imported(file) if name.startswith("stages.")], (
            "stages share only files on disk"
        )
        return
    if words[1] == "__init__":
        return
    here = words[1]
    for name in imported(file):
        if not name.startswith(("moecore.", "stages.")):
            continue
        assert name.startswith("moecore."), (
            f"{relative(file)} imports {name}: stages are above every room"
        )
        there = name.split(".")[1]
        assert LEVEL[there] <= LEVEL[here], (
            f"{relative(file)} (room {here}) imports {name} (room {there}), which is above it"
        )


def test_nothing_lies_loose():
    assert [file.name for file in (ROOT / "moecore").glob("*.py")] == ["__init__.py"]
    assert {
        folder.name
        for folder in (ROOT / "moecore").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    } == set(ROOMS)


def test_no_circles():
    graph = {
        relative(file): {name for name in imported(file) if name.startswith("moecore.")}
        for file in FILES
    }
    modules = {
        relative(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."): relative(
            file
        )
        for file in FILES
    }
    edges = {
        file: {
            modules[name]
            for full in names
            for name in (full, full.rpartition(".")[0])
            if name in modules
        }
        - {file}
        for file, names in graph.items()
    }
    while leaves := [file for file, targets in edges.items() if not targets]:
        edges = {
            file: targets - set(leaves) for file, targets in edges.items() if file not in leaves
        }
    packages = {file for file in edges if file.endswith("__init__.py")}
    assert not set(edges) - packages, f"imports go round in a circle: {sorted(edges)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_lists_its_parts_and_nothing_else(family):
    file = ROOT / "moecore" / family / "__init__.py"
    for node in tree_of(file).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)), (
            f"{relative(file)}:{node.lineno}: only imports and the union"
        )
    assert sum(isinstance(node, ast.Assign) for node in tree_of(file).body) == 1


@pytest.mark.parametrize("file", PARTS, ids=relative)
def test_file_kind_and_class_have_one_name(file):
    for node in tree_of(file).body:
        # the result of a calibrator names the one it came from
        if not isinstance(node, ast.ClassDef) or node.name.startswith("Fitted"):
            continue
        kinds = [
            ast.literal_eval(line.value)
            for line in node.body
            if isinstance(line, ast.AnnAssign)
            and getattr(line.target, "id", "") == "kind"
            and line.value
        ]
        for kind in kinds:
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower()
            assert kind == file.stem and snake.replace("_", "") == kind.replace("_", ""), (
                f"{relative(file)}: class {node.name} has kind {kind}"
            )
            union = (file.parent / "__init__.py").read_text(encoding="utf-8")
            assert re.search(rf"\b{node.name}\b", union), (
                f"{node.name} is not in {file.parent.name}/__init__.py"
            )


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_only_tracking_imports_mlflow(file):
    if "tracking" not in file.parts:
        assert not [name for name in imported(file) if name.split(".")[0] == "mlflow"]


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_unpickles(file):
    assert not {name.split(".")[0] for name in imported(file)} & {
        "pickle",
        "cloudpickle",
        "dill",
        "joblib",
        "shelve",
        "marshal",
    }
    for node in ast.walk(tree_of(file)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            call = f"{node.func.value.id}.{node.func.attr}"
            assert call != "torch.load" or given.get("weights_only") is True, (
                f"{relative(file)}:{node.lineno}: torch.load without weights_only=True"
            )
            assert call not in ("np.load", "numpy.load") or given.get("allow_pickle") is not True, (
                f"{relative(file)}:{node.lineno}: allow_pickle"
            )


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_files_and_functions_are_short(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= (60 if file.parent.name == "stages" else 250)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            words = ast.get_docstring(node, clean=False) or ""
            length = node.end_lineno - node.lineno + 1 - len(words.splitlines())
            assert length <= 40, f"{relative(file)}:{node.lineno}: {node.name} has {length} lines"


def test_the_pipeline_fits_on_a_few_screens():
    assert len((ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_is_imported_by_a_computed_name(file):
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree_of(file))}
    assert not names & {"import_module", "__import__", "exec_module", "run_module", "run_path"}


LABELS = re.compile(
    r"\breal\(|\bis_real\b|(?<!tasks)\.multi_label\b|\blabels\.(dtype|is_floating_point)"
)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_only_tasks_look_at_what_labels_are(file):
    if file.relative_to(ROOT).parts[1] != "tasks":
        assert not LABELS.search(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_a_conditional_expression_has_no_other_inside(file):
    for node in ast.walk(tree_of(file)):
        inner = list(ast.walk(node))[1:] if isinstance(node, ast.IfExp) else []
        assert not [other for other in inner if isinstance(other, ast.IfExp)], (
            f"{relative(file)}:{node.lineno}"
        )


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_what_is_ignored_is_named(file):
    """No ``# noqa`` or ``# type: ignore`` without a rule, no ``# fmt: skip``."""
    blanket = re.compile(r"# noqa(?!: )|# type: ignore(?!\[)|# pyrefly: ignore(?!\[)|# fmt: ")
    assert not blanket.search(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_is_done_at_import(file):
    """No loops, calls or context managers at module level, but for constants, the main guard and a
    logged model's code.
    """
    # MLflow's set_model; and what hands a stage over to a cluster before torch is imported
    if relative(file) in ("moecore/tracking/pyfunc.py", "stages/__init__.py"):
        return
    for node in tree_of(file).body:
        main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        assert (
            main
            or typing
            or not call
            and not isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try))
        ), f"{relative(file)}:{node.lineno}"
