"""All histories of one study into one experiment: what is new is added, what is stale is ended."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moecore.run.history_file import NAME, Growing, read_lines
from moecore.tracking.figures import Drawings
from moecore.tracking.known import COLOUR, COMPLETE, PARENT, TOLD, UID, Known, known_runs
from moecore.tracking.mirror import Mirror
from moecore.tracking.model import point_to
from moecore.tracking.parents import Child, Parents
from moecore.tracking.store import Locked, Stamp, experiment, experiment_name, stamp

PLACES = ("artifacts/history", ".state")  # published histories, and those of runs under way


class Counts(NamedTuple):
    """What an import did, in runs."""

    added: int = 0
    updated: int = 0
    current: int = 0
    ended: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """The sums."""
        return Counts(*(one + two for one, two in zip(self, other, strict=True)))


class Found(NamedTuple):
    """A history on disk; ``stamp`` tells whether its file has changed."""

    folder: Path
    stamp: Stamp
    header: dict
    t: float  # of its last line
    ended: bool
    lines: list[dict]

    @property
    def uid(self) -> str:
        return self.header["uid"]


class Study:
    """The histories of a folder and the runs that MLflow has of them, both remembered."""

    def __init__(self, client: Any, folder: Path, drawings: Drawings) -> None:
        self.client = client
        self.drawings = drawings
        self.folder = folder
        self.experiment = experiment(client, experiment_name(folder))
        every = known_runs(client, self.experiment)
        self.known = once(client, [run for run in every if UID in run.tags])
        self.parents = Parents(client, self.experiment, folder, every)
        self.lock = Locked(folder)
        self._growing: dict[Path, Growing] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._imported: dict[Path, Found] = {}  # complete ones, without their lines

    def update(self) -> Counts:
        """Import what is new on disk since the last time."""
        counts = Counts()
        newest = self._newest()
        for found in newest.values():
            run = self.known.get(found.uid)
            if found.ended and (run is None or not run.complete):
                self.drawings.announce(self.folder, found.header)
        locked = self.lock.histories()
        places = self.parents.places([found.header for found in newest.values()], self.known)
        changed: dict[str, list[Child]] = {}  # by the parent's id
        for found in newest.values():
            parent = places[found.uid]
            done = self._import(found, parent, locked)
            counts = counts.plus(done)
            if done.added or done.updated:
                lines = found.lines or read_lines(found.folder)
                changed.setdefault(parent.id, []).append(Child(found.header, lines))
        for parent_id, children in changed.items():
            self.parents.update(self.parents.runs[parent_id], children)
            for child in children:
                if "status" in child.lines[-1]:
                    done = {COMPLETE: "true", TOLD: parent_id}
                    self.known[child.header["uid"]].tag(self.client, done)
        self.parents.refresh([parent for parent, children in changed.items() if ended(children)])
        return counts.plus(self._end(newest))

    @property
    def running(self) -> bool:
        """Whether any history has no last line yet."""
        return any(run.status == "RUNNING" for run in self.known.values())

    def _end(self, newest: dict[str, Found]) -> Counts:
        """Runs whose histories have gone: another took its place, or its stage is no more."""
        ended = 0
        for uid, run in self.known.items():
            if uid in newest:
                continue
            if "dvc.current" in run.tags:
                run.tag(self.client, {"dvc.current": "false"})
            if run.abandoned():
                self.client.set_terminated(run.id, "KILLED")
                run.status = "KILLED"
                ended += 1
        return Counts(ended=ended)

    def _import(
        self, found: Found, parent: Known, locked: dict[str, dict[str, str]] | None
    ) -> Counts:
        entry = {}
        current = found.ended
        if locked is not None:
            item = found.folder.relative_to(self.folder).as_posix()
            entry = locked.get(item, {})
            current = found.ended and item in locked
        tags = {"dvc.current": str(current).lower(), PARENT: parent.id, **entry}
        if COLOUR in parent.tags:
            tags[COLOUR] = parent.tags[COLOUR]
        run = self.known.get(found.uid)
        if run is not None and run.complete and found.ended:
            run.tag(self.client, tags)
            point_to(self.client, run, current)
            told = run.tags.get(TOLD) == parent.id
            if told:
                self._settle(found)
            return Counts(current=current, updated=not told)
        mirror = self._mirrors.get(found.uid)
        if mirror is None:
            header = found.header
            mirror = Mirror(
                self.client, self.experiment, self.folder, header, run, tags, self.drawings
            )
            self._mirrors[found.uid] = mirror
            self.known[found.uid] = mirror.run
        mirror.update(found.lines, found.folder)
        mirror.run.tag(self.client, tags)
        point_to(self.client, mirror.run, current)
        return Counts(added=run is None, updated=run is not None, current=current)

    def _settle(self, found: Found) -> None:
        """Its lines are read again only where the file changes."""
        self._imported[found.folder] = found._replace(lines=[])
        self._growing.pop(found.folder, None)
        self._mirrors.pop(found.uid, None)

    def _newest(self) -> dict[str, Found]:
        """By uid, the history that says most: a resumed run's published one may be older."""
        newest: dict[str, Found] = {}
        for folder in histories(self.folder):
            found = self._read(folder)
            if found and (found.uid not in newest or found.t > newest[found.uid].t):
                newest[found.uid] = found
        return newest

    def _read(self, folder: Path) -> Found | None:
        now = stamp(folder / NAME)
        before = self._imported.get(folder)
        if before is not None and before.stamp == now:
            return before
        lines = self._growing.setdefault(folder, Growing(folder)).read()
        if not lines:
            return None
        end = lines[-1]
        return Found(folder, now, lines[0], end["t"], "status" in end, lines)


def once(client: Any, runs: list[Known]) -> dict[str, Known]:
    """The runs by uid.

    A server that is too slow to answer makes a run all the same, and is asked for it again. Such
    a second one goes to MLflow's bin, where `mlflow gc` finds it; the complete one is kept.
    """
    found: dict[str, Known] = {}
    for run in sorted(runs, key=lambda run: (not run.complete, run.id)):
        kept = found.setdefault(run.tags[UID], run)
        if kept is not run and not run.complete:
            client.delete_run(run.id)
    return found


def ended(children: list[Child]) -> bool:
    """Whether any of these histories has its last line."""
    return any("status" in child.lines[-1] for child in children)


def histories(study: Path) -> Iterator[Path]:
    """The folders of a study that hold a history, published ones first."""
    for place in PLACES:
        for folder, inner, files in os.walk(study / place):
            # what is being written, or being removed, is not there
            inner[:] = sorted(n for n in inner if not n.endswith((".part", ".removed")))
            if NAME in files:
                inner.clear()
                yield Path(folder)
