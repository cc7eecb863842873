"""All histories into MLflow, idempotently: what it has is left alone, what it lacks is added."""

import uuid
from pathlib import Path
from typing import Any

from moecore.tracking import remembered
from moecore.tracking.drawings import Drawings, drawings
from moecore.tracking.store import alone, connect, home, uri
from moecore.tracking.study import Counts, Study, histories


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
                return self._update()
            except BaseException:
                self._forget()  # what arrived is asked of the store the next time
                raise

    @property
    def running(self) -> bool:
        """Whether any history has not ended: its process may end without a word."""
        return any(study.running for study in self.studies.values())

    def _forget(self) -> None:
        self.client: Any = None
        self.studies: dict[Path, Study] = {}

    def _update(self) -> Counts:
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


def sync() -> str:
    """Import once; returns what was done, in words."""
    current = remembered.last(remembered.mark(studies()))
    if current is not None:
        return f"{uri()}: nothing is new; {current} are current"
    with drawings(remembered.changed(studies())) as drawn:
        importer = Importer(drawn)
        counts = importer.update()
    if not importer.running:
        remembered.keep(remembered.mark(studies()), counts.current)
    return told(counts)


def told(counts: Counts) -> str:
    """What an import did, in words."""
    return (
        f"{uri()}: {counts.added} runs added, {counts.updated} updated, {counts.ended} ended; "
        f"{counts.current} are current"
    )
