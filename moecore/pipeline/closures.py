"""Which source files decide a result, found by reading imports, never by running them.

Python is hashed by its syntax tree: comments and formatting rerun nothing; the rest by bytes.

DVC does not follow imports. So the stage ``code`` hashes the files that a script's imports reach,
and those of the parts that params.yaml names by ``kind``, and other stages depend on these hashes.
Imports are followed in moecore and in the packages that may be imported from by name.
"""

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.outside_packages import OUR_PACKAGE, allowed_packages
from moecore.core.source_layout import FAMILIES, ROOT
from moecore.run.inputs import (
    hash_source_file,
    hash_syntax,
    locate_source,
    parse_source,
    read_source_text,
    wheel_record,
)

DECIDING = (  # the rooms whose code decides a result; an edit of the others reruns nothing
    "core",
    "statistics",
    "tasks",
    "nn",
    "data",
    "attacks",
    "training",
    "measure",
    "brain",
)
OUTSIDE = "outside"  # in the place of a room: of packages that params.yaml lists
BY_NAME = Path("moecore/face/family_parts.py")  # offers all parts of families, and imports none
PASSED_THROUGH = ("run", "face")  # decide none either, but what they import does
PUBLIC_MODULES = {  # what only passes names on, which live elsewhere
    "moecore": Path("moecore/face/__init__.py"),
    "moecore/parts": Path("moecore/parts/__init__.py"),
    "moecore/pages": Path("moecore/pages/__init__.py"),
}
FAMILY_AT_KEY = {  # the family of a part at this key, where two families have a kind of that name
    "router": "routers",
    "calibrator": "calibrators",
    "model": "backbones",
    "teacher": "teachers",
}


def import_closure(
    path: str | Path, root: Path = ROOT, rooms: Collection[str] = DECIDING
) -> set[Path]:
    """Return the files of ``rooms`` that importing ``path`` reaches, itself too, below ``root``.

    Files of ``PASSED_THROUGH`` are left out, those of ``rooms`` that they import are not.
    Of a family only its base class is reached: which part it is stands in params.yaml. ``__init__``
    files that hold nothing but a docstring are left out. Files that lie beside a module without
    being Python (an atlas, a template) belong to it.
    """
    reached: set[Path] = set()
    waiting = [Path(path)]
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting.extend(
                file
                for file in _imported_files(file, root, allowed_packages())
                if _room(file) in (*rooms, "stages", *PASSED_THROUGH, OUTSIDE)
            )
    reached = {file for file in reached if _room(file) not in PASSED_THROUGH}
    return reached.union(
        *(_data_files(folder, root) for folder in {file.parent for file in reached})
    )


def part_files(section: Any, root: Path = ROOT, under: str = "") -> set[Path]:
    """The files of every part that ``section`` names (mappings with ``kind: x``), with closures.

    under: the key at which ``section`` sits; it decides where two families have a part of that
    name. A ``kind`` without a file in a family (a plain choice) adds nothing: imports reach it.
    """
    if isinstance(section, dict):
        files = set().union(*(part_files(value, root, str(key)) for key, value in section.items()))
        for file in _kind_files(section.get("kind"), under, root):
            files |= import_closure(file, root)
        return files
    if isinstance(section, list):
        return set().union(*(part_files(value, root, under) for value in section))
    return set()


def outside_module_files(name: str, root: Path = ROOT) -> list[Path]:
    """Return the file of a module of a package that may be imported from; none of another name."""
    allowed = name.partition(".")[0] in allowed_packages()
    file = _module_file(name.replace(".", "/"), root) if allowed else None
    return [file] if file else []


def hash_files(files: Iterable[Path], root: Path = ROOT, shown: bool = False) -> dict[str, str]:
    """Return path → sha256 of each file, sorted by path; shown: with the words of metrics.

    Raises UserError for a file that is gone, or is no Python though it is named so.
    """
    return {file.as_posix(): _sha256(file, root, shown) for file in sorted(files)}


@cache
def _sha256(file: Path, root: Path, shown: bool) -> str:
    if file.suffix != ".py" or (shown and _read_source(file, root).has_metrics):
        return hash_source_file(file, root, shown)
    return _read_source(file, root).syntax


def _room(file: Path) -> str:
    top, *others = file.parts
    if top != OUR_PACKAGE:
        return OUTSIDE
    return others[0]


@cache
def _data_files(folder: Path, root: Path) -> frozenset[Path]:
    """Return a package's files that are no Python, also in subfolders that hold no module."""
    data_files: set[Path] = set()
    home = locate_source(folder, root)
    for path in home.iterdir():
        if path.name == "__pycache__" or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix != ".py":
            data_files.add(folder / path.name)
        elif path.is_dir() and not any(path.rglob("*.py")):
            data_files |= {
                folder / file.relative_to(home)
                for file in path.rglob("*")
                if file.is_file() and "__pycache__" not in file.parts
            }
    recorded = wheel_record(folder.parts[0])
    return frozenset(data_files & set(recorded) if recorded else data_files)


def _kind_files(kind: Any, under: str, root: Path) -> list[Path]:
    if not isinstance(kind, str):
        return []
    if "." in kind:
        return outside_module_files(kind, root)
    files = [Path("moecore", family, f"{kind}.py") for family in FAMILIES]
    there = [file for file in files if (root / file).is_file()]
    named = [file for file in there if file.parent.name == FAMILY_AT_KEY.get(under, under)]
    return named or there


@cache
def _imported_files(file: Path, root: Path, packages: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of ours, and of ``packages``, that one file imports."""
    if file.suffix != ".py":
        return ()
    files: dict[Path, None] = {}
    if file == BY_NAME:
        folders = [root / "moecore" / family for family in FAMILIES]
        files |= dict.fromkeys(
            part.relative_to(root) for one in folders for part in one.glob("*.py")
        )
    for module, name in _read_source(file, root).imports:
        for package, one in _homes(module, name, root):
            if package.split("/")[0] in (OUR_PACKAGE, *packages):
                files |= dict.fromkeys(_module_files(package, one, root))
    return tuple(files)


def _homes(package: str, name: str, root: Path) -> Sequence[tuple[str, str]]:
    """Return (package, name) of an import; where it lives, of what a public module passes on."""
    if f"{package}/{name}" in PUBLIC_MODULES:
        package, name = f"{package}/{name}", ""
    if package not in PUBLIC_MODULES:
        return [(package, name)]
    imports = _read_source(PUBLIC_MODULES[package], root).imports
    return [one for one in imports if one[1] == name] or imports


def _module_files(package: str, name: str, root: Path) -> Iterator[Path]:
    """The files of ``package``, of those above it, and of ``package/name`` where it is a module."""
    words = [*package.split("/"), name] if name else package.split("/")
    for count in range(1, len(words) + 1):
        if file := _module_file("/".join(words[:count]), root):
            yield file


class _Source(NamedTuple):
    imports: tuple[tuple[str, str], ...]  # path of a module, name taken from it or nothing
    syntax: str  # hash of the syntax tree
    has_code: bool  # more than docstrings
    has_metrics: bool  # whose words are shown


@cache
def _read_source(file: Path, root: Path) -> _Source:
    return _analyse_source(read_source_text(file, root), file)


@cache
def _analyse_source(text: str, file: Path) -> _Source:
    """Return what is needed of a file; its tree itself would slow the garbage collector."""
    tree = parse_source(text, file)
    has_code = any(not isinstance(node, ast.Expr) for node in tree.body)
    imports = tuple(_list_imports(tree, file))
    return _Source(imports, hash_syntax(tree), has_code, "Metric(" in text or "OnPage(" in text)


def _list_imports(tree: ast.AST, file: Path) -> Iterator[tuple[str, str]]:
    """Everything that is imported, as (path of the module, name taken from it or nothing)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = file.parent.parts[: len(file.parent.parts) - node.level + 1]
            words = [*(above if node.level else ()), *([node.module] if node.module else [])]
            imports = [(".".join(words), alias.name) for alias in node.names]
        else:
            continue
        for module, name in imports:
            yield module.replace(".", "/"), name


@cache
def _module_file(name: str, root: Path) -> Path | None:
    """The file of a module, or None for what is no module, or a package without code.

    Of a file and a package of one name Python imports the package.
    """
    module, package = Path(f"{name}.py"), Path(name, "__init__.py")
    if not locate_source(package, root).is_file():
        return module if locate_source(module, root).is_file() else None
    return package if _read_source(package, root).has_code else None
