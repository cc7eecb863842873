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
from pathlib import Path
from types import ModuleType

OUR_PACKAGE = "moecore"
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_ALLOWED: ContextVar[tuple[str, ...]] = ContextVar("allowed packages", default=())


def allow_packages(names: Iterable[str], folders: Iterable[Path]) -> None:
    """Allow the packages of these names, and no others, from now on.

    folders: of the params.yaml that lists them; there and in their src/ Python looks last.
    """
    _ALLOWED.set(tuple(names))
    for folder in folders if allowed_packages() else ():
        for path in (folder.resolve(), folder.resolve() / "src"):
            if path.is_dir() and str(path) not in sys.path:
                sys.path.append(str(path))


@contextmanager
def more_packages(names: Iterable[str]) -> Iterator[None]:
    """Allow the packages of these names too, within the block."""
    token = _ALLOWED.set((*_ALLOWED.get(), *names))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def allowed_packages() -> tuple[str, ...]:
    """Return the names of the packages that may be imported from."""
    return _ALLOWED.get()


def check_package_name(name: str) -> str:
    """Return the name of a package that may be listed. Raises ValueError for any other."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        raise ValueError(f"found {name}; allowed: the name of an installed package, without dots")
    if name == OUR_PACKAGE:
        raise ValueError(f"found {name}, whose parts have short kinds; allowed: other packages")
    package_folder(name)
    return name


def package_folder(name: str) -> Path:
    """Return the folder of a package, which is not imported. Raises ValueError without one."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        allowed = "a package that Python finds, or that lies beside params.yaml or in its src/"
        raise ValueError(f"found {name}, which is not installed; allowed: {allowed}")
    return Path(next(iter(spec.submodule_search_locations)))


def import_module_of_package(name: str) -> ModuleType:
    """Return a module of an allowed package. Raises ValueError, a line, where there is none."""
    top = name.partition(".")[0]
    if top not in allowed_packages():
        listed = ", ".join((*allowed_packages(), top))
        raise ValueError(f"{name} is of a package that is not listed; write packages: [{listed}]")
    folder = package_folder(top)
    try:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be imported: {_last_line(error)}") from error
    raise ValueError(f"found {name}, but {folder} has no such module")


def list_modules(holds: Callable[[Path], bool]) -> list[str]:
    """Return the dotted names of modules of the allowed packages, by what their files hold."""
    return [
        ".".join((top, *file.relative_to(folder).with_suffix("").parts))
        for top in allowed_packages()
        for folder in (package_folder(top),)
        for file in sorted(folder.rglob("[a-z]*.py"))
        if holds(file)
    ]


def _last_line(error: BaseException) -> str:
    """Return the last line of a traceback, with the file and line of the code that raised it."""
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{said} ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})"
