"""Packages from outside whose modules may be imported by name: those that somebody listed.

A params.yaml lists them under ``packages``, a caller of ``load_model`` in its argument.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

from moecore.core.files import UserError

OUR_PACKAGE = "moecore"
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_ALLOWED: ContextVar[tuple[str, ...]] = ContextVar("allowed packages", default=())

SOURCE_TREE = "source tree"  # in the place of the version of what is not installed


def allow_packages(names: Iterable[str], folders: Iterable[Path]) -> None:
    """Allow the packages of these names, and no others, from now on.

    folders: of the params.yaml that lists them; there and in their src/ Python looks last.
    """
    _ALLOWED.set(tuple(name for name in names if _is_outside_name(name)))
    for folder in folders if allowed_packages() else ():
        for path in (folder.resolve(), folder.resolve() / "src"):
            if path.is_dir() and str(path) not in sys.path:
                sys.path.append(str(path))


@contextmanager
def more_packages(names: Iterable[str]) -> Iterator[None]:
    """Allow the packages of these names too, within the block; UserError for other names."""
    try:
        names = [check_package_name(name) for name in names]
    except ValueError as error:
        raise UserError(f"packages: {error}") from None
    token = _ALLOWED.set((*_ALLOWED.get(), *names))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def allowed_packages() -> tuple[str, ...]:
    """Return the names of the packages that may be imported from."""
    return _ALLOWED.get()


def check_package_name(name: str) -> str:
    """Return a name that may be listed, of a package or none. Raises ValueError for any other."""
    if name == OUR_PACKAGE:
        raise ValueError(f"found {name}, whose parts have short kinds; allowed: other packages")
    if not _is_outside_name(name):
        allowed = "the name of an installed package, without dots, that is not Python's own"
        raise ValueError(f"found {name}; allowed: {allowed}")
    return name


def package_folder(name: str) -> Path:
    """Return the folder of a package, which is not imported. Raises ValueError without one."""
    if folder := _find_folder(name):
        return folder
    allowed = "a package that Python finds, or that lies beside params.yaml or in its src/"
    raise ValueError(f"found {name}, which is not installed; allowed: {allowed}")


def _is_outside_name(name: str) -> bool:
    """Return whether a package may be called so; what has dots would be imported to be found."""
    return name.isidentifier() and name not in (OUR_PACKAGE, *sys.stdlib_module_names)


def _find_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def import_module_of_package(name: str) -> ModuleType:
    """Return a module of an allowed package. Raises ValueError, a line, where there is none."""
    top = name.partition(".")[0]
    if top not in allowed_packages():
        listed = ", ".join((*allowed_packages(), top))
        raise ValueError(f"{name} is of a package that is not listed; write packages: [{listed}]")
    folder = package_folder(top)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and not _has_twin(spec):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be imported: {last_traceback_line(error)}") from error
    if spec is not None:
        raise ValueError(f"found {name}, of which {folder} has a file and a folder; allowed: one")
    raise ValueError(f"found {name}, but {folder} has no such module")


def _has_twin(spec: ModuleSpec) -> bool:
    """Return whether a file of its name lies beside a module that is a folder; Python skips it."""
    folders = spec.submodule_search_locations or ()
    return any(Path(folder).with_suffix(".py").is_file() for folder in folders)


def outside_kinds_in_settings(value: Any) -> Iterator[str]:
    """Yield the kinds of parts from outside that settings name, as JSON has them."""
    if isinstance(value, dict):
        kind = value.get("kind")
        if isinstance(kind, str) and DOTTED_NAME.fullmatch(kind):
            yield kind
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from outside_kinds_in_settings(inner)


def list_allowed_modules(holds: Callable[[Path], bool]) -> list[str]:
    """Return the dotted names of modules of the allowed packages, by what their files hold."""
    folders = {top: folder for top in allowed_packages() if (folder := _find_folder(top))}
    return [
        ".".join((top, *file.relative_to(folder).with_suffix("").parts))
        for top, folder in folders.items()
        for file in sorted(folder.rglob("[a-z]*.py"))
        if holds(file)
    ]


def last_traceback_line(error: BaseException, folder: Path | None = None) -> str:
    """Return the last line of a traceback, with the file and line of the code that raised it: the
    last in the user's ``folder``, or of an allowed package, where there is one.
    """
    said = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError):
        return f"{said} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    folders = tuple(f"{_find_folder(top)}/" for top in allowed_packages())
    theirs = [
        frame
        for frame in frames
        if frame.filename.startswith(folders) or _lies_in(frame.filename, folder)
    ]
    others = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    place = (theirs or others)[-1]
    return f"{said} ({place.filename}:{place.lineno})"


def _lies_in(file: str, folder: Path | None) -> bool:
    """Return whether a file of a traceback lies in a folder, but not in packages there."""
    if folder is None or file.startswith("<") or "site-packages" in file:
        return False
    return Path(file).resolve().is_relative_to(folder.resolve())


def package_versions(outside: Iterable[str]) -> dict[str, str]:
    """Return the versions of moecore, torch and packages from outside, by name."""
    versions = {name: _distribution_version(name) for name in ("moecore", "torch")}
    for name in outside:
        distributions = packages_distributions().get(name, [name])
        versions[name] = _distribution_version(distributions[0])
    return versions


def _distribution_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return SOURCE_TREE
