"""The house: imports go down, siblings stay apart, a part is a file, nothing is unpickled."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.sources import FAMILIES, ROOT

FLOORS = {  # every module and package of moecore, by name
    0: ["config", "records", "files", "tensors", "yaml12", "problems", "params", "sources", "code_hashes", "selection", "grouped", "dispatch", "correspondence", "bases", "expert_map", "spread"],
    1: ["routers", "experts", "regularizers", "attacks", "evaluation", "calibration", "data"],
    2: ["layers", "training"],
    3: ["backbones"],
    4: ["artifacts", "teachers", "history_file", "history", "tracking", "progress", "kept", "resume", "stage", "supervise", "epochs", "checks", "study", "plan", "parallel",
        "finetuning", "parameters", "attacked", "audit", "sweeps", "augmentations", "costs", "report",
        "audit_errors", "calibrated_ages", "checks_cohort", "folds", "model_card", "new_volumes", "predictions", "reference", "refusals", "region_probe"],
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
FILES = sorted((ROOT / "moecore").rglob("*.py")) + sorted((ROOT / "stages").glob("*.py"))
PARTS = [file for family in FAMILIES for file in sorted((ROOT / "moecore" / family).glob("[a-z]*.py"))]


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
            assert node.level == 0, f"{relative(file)}:{node.lineno}: a relative import; write it in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_only_go_down(file):
    words = file.relative_to(ROOT).with_suffix("").parts
    if words[0] == "stages":
        assert not [name for name in imported(file) if name.startswith("stages.")], "stages share only files on disk"
        return
    if words[1] == "__init__":
        return
    here = words[1]
    for name in imported(file):
        if not name.startswith(("moecore.", "stages.")) or (there := name.split(".")[1]) == here:
            continue
        assert name.startswith("moecore."), f"{relative(file)} imports {name}, which is on floor 5"
        assert FLOOR[there] < FLOOR[here] or FLOOR[there] == FLOOR[here] != 1, f"{relative(file)} (floor {FLOOR[here]}) imports {name} (floor {FLOOR[there]})"


def test_no_circles():
    graph = {relative(file): {name for name in imported(file) if name.startswith("moecore.")} for file in FILES}
    modules = {relative(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."): relative(file) for file in FILES}
    edges = {file: {modules[name] for full in names for name in (full, full.rpartition(".")[0]) if name in modules} - {file} for file, names in graph.items()}
    while leaves := [file for file, targets in edges.items() if not targets]:
        edges = {file: targets - set(leaves) for file, targets in edges.items() if file not in leaves}
    packages = {file for file in edges if file.endswith("__init__.py")}
    assert not set(edges) - packages, f"imports go round in a circle: {sorted(edges)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_lists_its_parts_and_nothing_else(family):
    file = ROOT / "moecore" / family / "__init__.py"
    for node in tree_of(file).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)), f"{relative(file)}:{node.lineno}: only imports and the union"
    assert sum(isinstance(node, ast.Assign) for node in tree_of(file).body) == 1


@pytest.mark.parametrize("file", PARTS, ids=relative)
def test_file_kind_and_class_have_one_name(file):
    for node in tree_of(file).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("Fitted"):  # the result of a calibrator names the one it came from
            continue
        kinds = [ast.literal_eval(line.value) for line in node.body if isinstance(line, ast.AnnAssign) and getattr(line.target, "id", "") == "kind" and line.value]
        for kind in kinds:
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower()
            assert kind == file.stem and snake.replace("_", "") == kind.replace("_", ""), f"{relative(file)}: class {node.name} has kind {kind}"
            union = (file.parent / "__init__.py").read_text(encoding="utf-8")
            assert re.search(rf"\b{node.name}\b", union), f"{node.name} is not in {file.parent.name}/__init__.py"


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_only_tracking_imports_mlflow(file):
    if "tracking" not in file.parts:
        assert not [name for name in imported(file) if name.split(".")[0] == "mlflow"]


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_unpickles(file):
    assert not {name.split(".")[0] for name in imported(file)} & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            call = f"{node.func.value.id}.{node.func.attr}"
            assert call != "torch.load" or given.get("weights_only") is True, f"{relative(file)}:{node.lineno}: torch.load without weights_only=True"
            assert call not in ("np.load", "numpy.load") or given.get("allow_pickle") is not True, f"{relative(file)}:{node.lineno}: allow_pickle"


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_files_are_short(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_is_done_at_import(file):
    """No loops, calls or context managers at module level, but for constants, the main guard and a logged model's code."""
    if file.name in ("yaml12.py", "pyfunc.py"):  # tables of PyYAML; MLflow's set_model
        return
    for node in tree_of(file).body:
        main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        assert main or typing or not call and not isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)), f"{relative(file)}:{node.lineno}"
