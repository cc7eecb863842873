"""The sqlite file that MLflow keeps its runs in: what is wrong with it is said before MLflow tries.

MLflow tries a file that it cannot open for 100 s, and prints a traceback for one that is damaged.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from moecore.core.files import UserError

SQLITE = "sqlite:///"
WAIT = 10.0  # seconds, for another program's lock
ANEW = (
    "move it away (and its -journal, -wal) and run `moecore sync`: all runs are imported anew "
    "from artifacts/history"
)


def file_of(address: str) -> Path | None:
    """The file of a sqlite store; None where the store is not a file."""
    if not address.startswith(SQLITE) or address == f"{SQLITE}:memory:":
        return None
    return Path(address.removeprefix(SQLITE).split("?")[0])


_inodes: dict[Path, int] = {}  # MLflow keeps a file open for as long as the process lives


def opened(file: Path) -> None:
    """Remember the file that MLflow has opened."""
    _inodes[file] = file.stat().st_ino


def check_same(file: Path) -> None:
    """Raises UserError where MLflow would write on into a file that was moved away."""
    before = _inodes.get(file)
    if before is None or (file.exists() and file.stat().st_ino == before):
        return
    raise UserError(
        f"{file}: moved away, or another one, since MLflow opened it; end `moecore ui` and start "
        "it again: all runs are imported anew from artifacts/history"
    )


def check(file: Path) -> None:
    """Raises UserError where MLflow cannot keep its runs in ``file``, saying what to do."""
    check_same(file)
    if file.is_dir():
        raise UserError(f"{file}: a folder, not MLflow's database; {ANEW}")
    if file.exists():
        _check_content(file)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_unwritable(file, error.strerror or str(error))) from error
    if not os.access(file.parent, os.W_OK):
        raise UserError(_unwritable(file, "its folder is read-only"))


def create(file: Path, make: Callable[[Path], object]) -> None:
    """Let ``make`` write a database that is there whole or not at all, also after a kill."""
    part = file.with_name(f"{file.name}.part")
    _remove(part)  # of a process that was killed
    try:
        make(part)
        os.replace(part, file)
    finally:
        _remove(part)


def _remove(part: Path) -> None:
    for left in (part, part.with_name(f"{part.name}-journal")):
        left.unlink(missing_ok=True)


def _check_content(file: Path) -> None:
    try:
        with closing(_opened(file)) as database:
            database.execute("BEGIN IMMEDIATE")  # as an import does
            database.execute("ROLLBACK")
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in rows}
            [found] = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise UserError(_trouble(file, error)) from error
    if found != "ok":
        where = found.splitlines()[-1]
        raise UserError(f"{file}: MLflow's database is damaged ({where}); {ANEW}")
    if tables and "experiments" not in tables:
        named = ", ".join(sorted(tables)[:3])
        raise UserError(
            f"{file}: the database of another program, with the tables {named}; name another file "
            "by $MLFLOW_TRACKING_URI, such as sqlite:////folder/mlflow.db"
        )


def _opened(file: Path) -> sqlite3.Connection:
    # "rw": a file that is gone meanwhile is not made
    address = f"file:{quote(str(file))}?mode=rw"
    return sqlite3.connect(address, timeout=WAIT, isolation_level=None, uri=True)


def _trouble(file: Path, error: sqlite3.DatabaseError) -> str:
    kind = getattr(error, "sqlite_errorname", "")
    if kind.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return (
            f"{file}: locked by another program for {WAIT:.0f} s; end it (`fuser {file}` says "
            "which) and run `moecore sync`"
        )
    if kind.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return _unwritable(file, str(error))
    return f"{file}: MLflow's database is damaged ({error}); {ANEW}"


def _unwritable(file: Path, why: str) -> str:
    return (
        f"{file}: MLflow's database cannot be written there ({why.lower()}); mend that, or name "
        "another file by $MLFLOW_TRACKING_URI"
    )
