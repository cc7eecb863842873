"""Whether what an import reads has changed since the last one: asking MLflow takes seconds.

The store itself counts too: a run that was deleted there is imported again.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from moecore.core.files import UserError, read_json, write_json
from moecore.run.history_file import NAME
from moecore.tracking.locked import stamp
from moecore.tracking.store import home, uri
from moecore.tracking.study import histories

FILES = ("dvc.lock", "dvc.yaml", "params.yaml")
SQLITE = "sqlite:///"


def place() -> Path:
    """Where the last import left its mark."""
    return home() / ".state" / "imported.json"


def mark(studies: Iterable[Path]) -> str | None:
    """One word for all that an import reads; None where the store is not a file."""
    address = uri()
    if not address.startswith(SQLITE):
        return None
    read = [Path(address.removeprefix(SQLITE))]
    for study in studies:
        read += [study / name for name in FILES]
        read += [folder / NAME for folder in histories(study)]
    stamps = [(str(path), stamp(path)) for path in read]
    return hashlib.sha256(json.dumps([address, stamps]).encode()).hexdigest()


def changed(studies: Iterable[Path]) -> int:
    """How many histories are younger than the store: about as many as have to be imported."""
    files = [folder / NAME for study in studies for folder in histories(study)]
    known = stamp(Path(uri().removeprefix(SQLITE)))
    if known is None:
        return len(files)
    stamps = [stamp(file) for file in files]
    return sum(found is not None and found[1] > known[1] for found in stamps)


def last(now: str | None) -> int | None:
    """How many runs were current at the last import; None where anything has changed since."""
    try:
        kept = read_json(place())
    except UserError:
        return None
    if now is None or kept.get("mark") != now:
        return None
    return int(kept["current"])


def keep(now: str | None, current: int) -> None:
    """Remember an import after which nothing was left to do."""
    if now is not None:
        write_json(place(), {"mark": now, "current": current})
