"""Paths of source files and projects, and imports from packages that a project allows."""

import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

from moecore.core.files import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("moecore", "moecore/stages", "moecore/conformance")  # two are links in a clone
STAGES_PREFIX = "moecore.stages."  # prefix of a stage's module
SHIPPED = ROOT / "moecore/pipeline/shipped"  # params.yaml, dvc.yaml, studies of this version
RUNS = ".runs"  # in a project: folders in which the questions of pipelines/ run
PROJECT_ANSWERS_FILE = ".moecore.json"  # in a project: with which `moecore new` began it
HASHES_DIR = Path("artifacts/code")  # hashes of source files, written by the stage `code`
FAMILY_FOLDERS = (  # folders of parts
    "nn/routers",
    "nn/experts",
    "nn/backbones",
    "data/sources",
    "attacks",
    "tasks",
    "training/regularizers",
    "training/teachers",
    "measure/calibrators",
)
PUBLIC_FAMILIES = (  # packages of moecore with a .pyi, which `python -m tools.stubs` writes
    *("routers", "experts", "balances", "backbones", "regularizers", "teachers"),
    *("sources", "attacks", "tasks", "measure", "calibrators"),
)
OUR_PACKAGE = "moecore"
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_ALLOWED_PACKAGES: ContextVar[tuple[str, ...]] = ContextVar("allowed packages", default=())

SOURCE_TREE_VERSION = "source tree"  # instead of a version, of a package that is not installed


def list_dvc_files(folder: Path, name: str = "dvc.yaml") -> list[Path]:
    """Return the existing files ``name`` of a project: at its top and in ``steps/*/``."""
    files = [folder / name, *sorted(folder.glob(f"steps/*/{name}"))]
    return [file for file in files if file.is_file()]


def project_of_run_folder(folder: Path) -> Path:
    resolved = folder.resolve()
    if resolved.parent.name == RUNS:
        return resolved.parents[1]
    return resolved


def find_paper_folder_and_project(folder: Path) -> tuple[Path, ...]:
    """Return (PROJECT/pipelines/PAPER, PROJECT) for a folder PROJECT/.runs/PAPER.…, else ()."""
    resolved = folder.resolve()
    if resolved.parent.name != RUNS:
        return ()
    project = resolved.parents[1]
    return (project / "pipelines" / resolved.name.partition(".")[0], project)


def moecore_source_hash(root: Path = ROOT) -> str:
    digest = hashlib.sha256()
    files = {file for name in SOURCE_FOLDERS for file in (root / name).rglob("*.py")}
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def run_git(folder: Path, *arguments: str, timeout: float | None = None) -> str | None:
    """Run git in ``folder`` and return its output; None if it fails or is not installed."""
    # A git hook sets GIT_DIR and others, which would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = {"cwd": folder, "env": env, "stderr": subprocess.DEVNULL, "timeout": timeout}
    try:
        return subprocess.check_output(["git", *arguments], text=True, **options).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def refuse_other_checkout(folder: Path = Path()) -> None:
    """Raise UserError if ``folder`` is in a clone of moecore whose code differs from this one."""
    checkout = project_of_run_folder(folder)
    if not (checkout / "moecore/core/source_layout.py").is_file() or checkout.samefile(ROOT):
        return
    if moecore_source_hash(checkout) != moecore_source_hash():
        other = f"{checkout}: has other code of moecore than {ROOT}, which would run here"
        raise UserError(f"{other}; activate this checkout's own environment (`make setup`)")


def allow_packages(names: Iterable[str], folders: Iterable[Path]) -> None:
    """Allow imports from these packages only, and append ``folders`` and their src/ to sys.path."""
    _ALLOWED_PACKAGES.set(tuple(name for name in names if _is_outside_package_name(name)))
    for folder in folders if allowed_packages() else ():
        for path in (folder.resolve(), folder.resolve() / "src"):
            if path.is_dir() and str(path) not in sys.path:
                sys.path.append(str(path))


def import_optional_library(name: str, extra: str) -> Any:
    """Import an optional library; if it is missing, UserError names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(f"{name} is not installed: pip install 'moecore[{extra}]'") from None


@contextmanager
def allowing_packages(names: Iterable[str]) -> Iterator[None]:
    """Allow imports from more packages in the ``with`` block; UserError for an invalid name."""
    try:
        names = [check_package_name(name) for name in names]
    except ValueError as error:
        raise UserError(f"packages: {error}") from None
    token = _ALLOWED_PACKAGES.set((*_ALLOWED_PACKAGES.get(), *names))
    try:
        yield
    finally:
        _ALLOWED_PACKAGES.reset(token)


def allowed_packages() -> tuple[str, ...]:
    return _ALLOWED_PACKAGES.get()


def check_package_name(name: str) -> str:
    """Return ``name`` if it is a valid entry of ``packages``, installed or not; else ValueError."""
    if name == OUR_PACKAGE:
        raise ValueError(f"found {name}, whose parts have short kinds; allowed: other packages")
    if not _is_outside_package_name(name):
        allowed = "the name of an installed package, without dots, that is not Python's own"
        raise ValueError(f"found {name}; allowed: {allowed}")
    return name


def package_folder(name: str) -> Path:
    """Return the folder of a package, without importing it; ValueError if it is not found."""
    if folder := _find_package_folder(name):
        return folder
    allowed = "a package that Python finds, or in the folder of params.yaml or its src/"
    raise ValueError(f"found {name}, which is not installed; allowed: {allowed}")


def _is_outside_package_name(name: str) -> bool:
    # To find a name with dots, Python would import its parent.
    return name.isidentifier() and name not in (OUR_PACKAGE, *sys.stdlib_module_names)


def _find_package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def import_module_of_package(name: str) -> ModuleType:
    """Import and return a module of an allowed package; ValueError with one line if that fails."""
    top = name.partition(".")[0]
    if top not in allowed_packages():
        listed = ", ".join((*allowed_packages(), top))
        raise ValueError(f"{name} is of a package that is not listed; write packages: [{listed}]")
    folder = package_folder(top)
    try:
        spec = importlib.util.find_spec(name)
        # A package hides a .py file of its name.
        folders = spec.submodule_search_locations or () if spec else ()
        is_hidden = any(Path(folder).with_suffix(".py").is_file() for folder in folders)
        if spec is not None and not is_hidden:
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be imported: {format_error_with_line(error)}") from error
    if spec is not None:
        both = f"{folder} has a file and a folder of this name"
        raise ValueError(f"found {name}, but {both}; allowed: one")
    # The packages' names are equal and do not count.
    modules = {module.rpartition(".")[2]: module for module in list_allowed_modules(lambda _: True)}
    close = get_close_matches(name.rpartition(".")[2].lower(), modules, 1)
    hint = f", did you mean {modules[close[0]]!r}?" if close else ""
    raise ValueError(f"found {name}, but {folder} has no such module{hint}")


def outside_kinds_in_settings(value: Any) -> Iterator[str]:
    """Yield the dotted kinds (``my_lab.cosine``) in nested settings that were read from JSON."""
    if isinstance(value, dict):
        kind = value.get("kind")
        if isinstance(kind, str) and DOTTED_NAME.fullmatch(kind):
            yield kind
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from outside_kinds_in_settings(inner)


def list_allowed_modules(holds: Callable[[Path], bool]) -> list[str]:
    folders = {top: folder for top in allowed_packages() if (folder := _find_package_folder(top))}
    return [
        ".".join((top, *file.relative_to(folder).with_suffix("").parts))
        for top, folder in folders.items()
        for file in sorted(folder.rglob("[a-z]*.py"))
        if holds(file)
    ]


def format_error_with_line(error: BaseException, folder: Path | None = None) -> str:
    """Return ``message (file:line)``: last frame in ``folder`` or allowed packages, else of all."""
    message = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError):
        return f"{message} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    folders = tuple(f"{_find_package_folder(top)}/" for top in allowed_packages())

    def is_outside(file: str) -> bool:
        if file.startswith(folders):
            return True
        if folder is None or file.startswith("<") or "site-packages" in file:
            return False
        return Path(file).resolve().is_relative_to(folder.resolve())

    outside_frames = [frame for frame in frames if is_outside(frame.filename)]
    source_frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    place = (outside_frames or source_frames)[-1]
    return f"{message} ({place.filename}:{place.lineno})"


def package_versions(outside: Iterable[str]) -> dict[str, str]:
    versions = {name: _distribution_version(name) for name in ("moecore", "torch")}
    for name in outside:
        versions[name] = _distribution_version(packages_distributions().get(name, [name])[0])
    return versions


def _distribution_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return SOURCE_TREE_VERSION
