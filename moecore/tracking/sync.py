"""All histories into MLflow, idempotently: what it has is left alone, what it lacks is added."""

import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moecore.core.files import FullDisk, UserError, read_json, write_json
from moecore.run.history_file import NAME
from moecore.tracking.answers import answering
from moecore.tracking.database import check_same, file_of
from moecore.tracking.figures import Drawings, drawings
from moecore.tracking.store import alone, connect, home, stamp, uri
from moecore.tracking.study import Counts, Study, histories

# What an import reads beside the histories.
FILES = ("dvc.lock", "dvc.yaml", "params.yaml")
# Bytes of MLflow's file: its empty tables, and its rows and indices for one of a history, which
# were 8.7 in a file of 17 runs and 8.9 in one of 95.
EMPTY, OF_A_BYTE = 1_000_000, 9


class Importer:
    """Imports the main pipeline and every study, again and again, sending only what is new."""

    def __init__(self, drawings: Drawings | None = None) -> None:
        self.name = uuid.uuid4().hex
        self.drawings = drawings or Drawings()
        self._forget()

    def update(self) -> Counts:
        """Import once; returns the sums. Raises UserError where the store does not answer."""
        with alone("import.lock") as lock:
            lock.seek(0)
            if lock.read() != self.name:  # another process imported: what was remembered is stale
                self._forget()
                lock.truncate(0)
                lock.write(self.name)
                lock.flush()
            try:
                with answering(uri()):
                    return self._update()
            except BaseException as error:
                self._forget()  # what arrived is asked of the store the next time
                store = file_of(uri())
                if isinstance(error, FullDisk) and store is not None:
                    whole = f"with all histories on disk, {store} takes about {takes():,} bytes"
                    raise FullDisk(f"{error}; {whole}") from error
                raise

    @property
    def running(self) -> bool:
        """Whether any history has not ended: its process may end without a word."""
        return any(study.running for study in self.studies.values())

    def _forget(self) -> None:
        self.client: Any = None
        self.studies: dict[Path, Study] = {}

    def _update(self) -> Counts:
        store = file_of(uri())
        if store is not None:
            check_same(store)
        if self.client is None:
            self.client = connect()
        counts = Counts()
        for folder in studies():
            if folder not in self.studies and any(histories(folder)):
                self.studies[folder] = Study(self.client, folder, self.drawings)
            if folder in self.studies:
                counts = counts.plus(self.studies[folder].update())
        return counts


def studies() -> list[Path]:
    """The folders whose histories are imported: the main pipeline and every study."""
    return [home(), *sorted((home() / "pipelines").glob("*"))]


def takes() -> int:
    """About how many bytes MLflow's file has with all histories on disk; pictures and models lie
    beside it.
    """
    stamps = [stamp(folder / NAME) for study in studies() for folder in histories(study)]
    return EMPTY + OF_A_BYTE * sum(found[0] for found in stamps if found is not None)


def sync() -> str:
    """Import once; returns what was done, in words."""
    # Asking MLflow takes seconds: where neither the disk nor the store has changed, it is not.
    current = last(mark(studies()))
    if current is not None:
        return f"{uri()}: nothing is new; {current} are current"
    with drawings(changed(studies())) as drawn:
        importer = Importer(drawn)
        counts = importer.update()
    if not importer.running:
        keep(mark(studies()), counts.current)
    return told(counts)


def told(counts: Counts) -> str:
    """What an import did, in words."""
    return (
        f"{uri()}: {counts.added} runs added, {counts.updated} updated, {counts.ended} ended; "
        f"{counts.current} are current"
    )


def place() -> Path:
    """Where the last import left its mark."""
    return home() / ".state" / "imported.json"


def mark(studies: Iterable[Path]) -> str | None:
    """One word for all that an import reads; None where the store is not a file."""
    address = uri()
    store = file_of(address)
    if store is None:
        return None
    read = [store]
    for study in studies:
        read += [study / name for name in FILES]
        read += [folder / NAME for folder in histories(study)]
    stamps = [(str(path), stamp(path)) for path in read]
    return hashlib.sha256(json.dumps([address, stamps]).encode()).hexdigest()


def changed(studies: Iterable[Path]) -> int:
    """How many histories are younger than the store: about as many as have to be imported."""
    files = [folder / NAME for study in studies for folder in histories(study)]
    store = file_of(uri())
    known = stamp(store) if store is not None else None
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
