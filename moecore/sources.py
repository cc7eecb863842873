"""Floor 0: which source files a stage or a part is made of, found by reading imports, never by running them.

DVC does not follow imports. The files that a stage's imports reach, and the parts that a YAML section names by ``kind``, are
hashed by the stage ``code`` into files that stages depend on. So a new part marks nothing stale, and an edited file marks
exactly what uses it.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from moecore.files import StageError

ROOT = Path(__file__).resolve().parents[1]
LOCAL = ("moecore", "stages")
FAMILIES = ("routers", "experts", "regularizers", "attacks", "calibration", "data", "backbones", "teachers")
UNDER = {"router": "routers", "calibrator": "calibration", "model": "backbones", "teacher": "teachers"}


def closure(path: str | Path, root: Path = ROOT) -> set[Path]:
    """The local files that importing ``path`` reaches, itself included, relative to ``root``.

    ``from moecore.routers import Router`` is not followed (which router it is stands in the YAML); ``from
    moecore.data.views import make_views`` is. ``__init__`` files that hold nothing but a docstring are left out.
    """
    reached: set[Path] = set()
    waiting = [Path(path)]
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting.extend(_imports(file, root))
    return reached


def part_files(section: Any, root: Path = ROOT, under: str = "") -> set[Path]:
    """The files of every part that ``section`` names (mappings with ``kind: x``) and their closures.

    under: the key at which ``section`` sits; it decides where two families have a part of that name.
    A ``kind`` without a family file (a plain choice of a section) is reached by the imports of the stage and adds nothing.
    """
    if isinstance(section, dict):
        found = set().union(*(part_files(value, root, str(key)) for key, value in section.items()))
        for file in _candidates(section.get("kind"), under, root):
            found |= closure(file, root)
        return found
    if isinstance(section, list):
        return set().union(*(part_files(value, root, under) for value in section))
    return set()


def fingerprint(files: Iterable[Path], root: Path = ROOT) -> dict[str, str]:
    """Path → sha256 of each file, sorted by path. Raises StageError for a file that is gone."""
    try:
        return {file.as_posix(): hashlib.sha256((root / file).read_bytes()).hexdigest() for file in sorted(files)}
    except FileNotFoundError as error:
        raise StageError(f"{error.filename}: no such file") from None


def _candidates(kind: Any, under: str, root: Path) -> list[Path]:
    if not isinstance(kind, str):
        return []
    files = [Path("moecore", family, f"{kind}.py") for family in FAMILIES]
    there = [file for file in files if (root / file).is_file()]
    named = [file for file in there if file.parent.name == UNDER.get(under, under)]
    return named or there


@cache
def _imports(file: Path, root: Path) -> tuple[Path, ...]:
    try:
        tree = ast.parse((root / file).read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        raise StageError(f"{file}: no such file under {root}") from None
    except SyntaxError as error:
        raise StageError(f"{file}:{error.lineno}: not valid Python: {error.msg}") from None
    return tuple(target for name in _names(tree, file) if (target := _file(name, root)))


def _names(tree: ast.AST, file: Path) -> Iterator[str]:
    """Dotted names of everything imported; for ``from a import b`` both ``a`` and ``a.b`` (b may be a module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = file.parent.parts[: len(file.parent.parts) - node.level + 1] if node.level else ()
            base = ".".join((*here, *([node.module] if node.module else [])))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (prefix for name in names if name.split(".")[0] in LOCAL for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    words = name.split(".")
    yield from (".".join(words[: count + 1]) for count in range(len(words)))


@cache
def _file(name: str, root: Path) -> Path | None:
    """The file of a module, or None for a name that is no module, a family's union, or a package without code."""
    path = Path(*name.split("."))
    if (root / path).with_suffix(".py").is_file():
        return path.with_suffix(".py")
    package = path / "__init__.py"
    if path.parent.name == "moecore" and path.name in FAMILIES or not (root / package).is_file():
        return None
    body = ast.parse((root / package).read_text(encoding="utf-8")).body
    return package if any(not isinstance(node, ast.Expr) for node in body) else None
