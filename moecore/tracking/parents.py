"""The parent runs of one experiment: each carries the headline numbers of all its children.

The stages of a method and a seed are children of one run. A training that runs again begins a new
one, which stands beside the old one in every chart; a measurement that runs again only changes the
numbers of the one that there is. What belongs to no single model (data, teachers, transfer of
attacks) has one run for all.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moecore.tracking.known import COLOUR, LEVEL, PARENT, Known
from moecore.tracking.mirror import Sender, state
from moecore.tracking.names import PHASES, curves

FAMILY = "moecore.family"  # of a parent: "vmoe/0", or SHARED
SHARED = "shared"
ROUTERS = "teacher_router"
CURRENT = "dvc.current"


class Family(NamedTuple):
    """The histories on disk of one method and seed, by their headers."""

    name: str
    headers: list[dict]

    @property
    def trainings(self) -> dict[str, dict]:
        """Phase → header of its training; a fine-tuning from before the pretraining is left out."""
        if self.name == SHARED:
            return {}
        found = {header["stage"]: header for header in self.headers if header["stage"] in PHASES}
        first = found.get("pretrain")
        return {
            stage: header
            for stage, header in found.items()
            if first is None or header["t"] >= first["t"]
        }

    def tags(self) -> dict[str, str]:
        """What tells its parent from those of other generations."""
        return {f"moecore.{stage}": header["uid"] for stage, header in self.trainings.items()}

    def outdated(self, header: Mapping[str, Any]) -> bool:
        """Whether it is of a model that was trained anew since; its stage has not run again yet."""
        trainings = self.trainings
        if header["stage"] == ROUTERS:  # they come before the trainings that they guide
            return False
        if header["stage"] in PHASES:
            return bool(trainings) and header["stage"] not in trainings
        trained = trainings.get(header["phase"]) or trainings.get("pretrain")
        return trained is not None and header["t"] < trained["t"]


def families(headers: Iterable[dict]) -> list[Family]:
    """The histories by method and seed; what belongs to no single model comes last."""
    found = defaultdict(list)
    for header in headers:
        name = SHARED
        if header["method"] is not None and header["seed"] is not None:
            name = f"{header['method']}/{header['seed']}"
        found[name].append(header)
    return [Family(*entry) for entry in sorted(found.items(), key=lambda entry: entry[0] == SHARED)]


def parent_of(family: Family, parents: Iterable[Known]) -> Known | None:
    """The family's parent in the store; None where its trainings are others than every one's."""
    tags = family.tags()

    def fits(run: Known) -> bool:
        same = run.tags.get(FAMILY) == family.name
        return same and all(run.tags.get(name, uid) == uid for name, uid in tags.items())

    def likeness(run: Known) -> tuple[int, bool, float]:
        equal = sum(run.tags.get(name) == uid for name, uid in tags.items())
        return equal, run.tags.get(CURRENT) == "true", run.started

    return max(filter(fits, parents), key=likeness, default=None)


def is_parent(run: Known) -> bool:
    """Whether it stands for a whole family."""
    return run.tags.get(LEVEL) in ("method", SHARED) and FAMILY in run.tags


def kept_parent(run: Known | None, parents: Mapping[str, Known]) -> Known | None:
    """The parent that a run in the store has already."""
    return parents.get(run.tags.get(PARENT, "")) if run is not None else None


DRAWN = ("loss/total", "loss/task")  # of the losses; and all of train/, validation/ but the pace
DENSE = "dense"  # the report's, whose rooms bring torch
NOTE = (
    "Headline numbers of all stages, as in the report, and the curves of the trainings. The stages "
    "are the child runs, with their settings, numbers, figures and models."
)
PACE = ("train/epoch", "train/learning_rate", "train/images_per_second", "train/memory_mb")


class Child(NamedTuple):
    """A history whose run was changed, and its lines."""

    header: dict
    lines: list[dict]


class Parents:
    """Finds or makes the parent of each history, and sends it what its children found."""

    def __init__(self, client: Any, experiment: str, study: Path, known: list[Known]) -> None:
        self.client = client
        self.experiment = experiment
        self.study = study
        self.runs = {run.id: run for run in known if is_parent(run)}
        self._senders: dict[str, Sender] = {}

    def places(self, headers: list[dict], known: Mapping[str, Known]) -> dict[str, Known]:
        """By uid, the parent of every history on disk; those that are missing are made.

        known: by uid, the runs of histories.
        """
        found = {}
        current = set()
        for family in families(headers):
            parent = parent_of(family, self.runs.values()) or self._made(family)
            current.add(parent.id)
            parent.tag(self.client, family.tags())
            for header in family.headers:
                kept = None
                if family.outdated(header):
                    kept = kept_parent(known.get(header["uid"]), self.runs)
                found[header["uid"]] = kept or parent
        for run in self.runs.values():
            run.tag(self.client, {CURRENT: str(run.id in current).lower()})
            if run.id not in current and run.status == "RUNNING":
                run.set_status(self.client, "KILLED", time.time())
        return found

    def update(self, parent: Known, children: list[Child]) -> None:
        """Send what changed; ``children``: the histories that did."""
        sender = self._sender(parent)
        for child in children:
            stage = child.header["stage"]
            if stage in PHASES and parent.tags[LEVEL] != SHARED:
                sender.points(_drawn(child.lines, stage))
                sender.params(child.header["params"])
        if any("status" in child.lines[-1] for child in children):
            self._send_headline(parent, sender)
        sender.flush()
        self._send_state(parent, children)

    def refresh(self, changed: Collection[str]) -> None:
        """Send the numbers that are relative to the dense model, where it is what changed.

        changed: the ids of the parents that were updated.
        """
        methods = {self.runs[parent].tags.get("method") for parent in changed}
        if DENSE not in methods:
            return
        for run in self.runs.values():
            if run.id not in changed and run.tags.get(CURRENT) == "true":
                sender = self._sender(run)
                self._send_headline(run, sender)
                sender.flush()

    def _send_headline(self, parent: Known, sender: Sender) -> None:
        if parent.tags[LEVEL] == SHARED:
            return
        # Here, as it brings torch, which a running training's points do not need.
        from moecore.tracking.headline import Trained, colour, numbers_of

        method, seed = parent.tags["method"], int(parent.tags["seed"])
        found = numbers_of(Trained(self.study, method, seed))
        sender.numbers(found.metrics, int(time.time() * 1000))
        sender.params(found.params)
        sender.tags({COLOUR: colour(self.study, method)})

    def _send_state(self, parent: Known, children: list[Child]) -> None:
        """RUNNING while any child is; else as the last one that ended."""
        states = [state(child.lines) for child in children]
        status, when = max(states, key=lambda found: (found[0] == "RUNNING", found[1]))
        if parent.ended is not None and status != "RUNNING":
            when = max(when, parent.ended)
        parent.set_status(self.client, status, when)

    def _sender(self, parent: Known) -> Sender:
        if parent.id not in self._senders:
            self._senders[parent.id] = Sender(self.client, parent)
        return self._senders[parent.id]

    def _made(self, family: Family) -> Known:
        from moecore.tracking.headline import colour

        first = min(family.headers, key=lambda header: header["t"])
        tags = {FAMILY: family.name, LEVEL: SHARED}
        name = "data and teachers"
        if family.name != SHARED:
            method, seed = first["method"], str(first["seed"])
            tags |= {LEVEL: "method", "method": method, "seed": seed}
            tags |= {COLOUR: colour(self.study, method), "mlflow.note.content": NOTE}
            name = f"{method} seed {seed}"
        created = self.client.create_run(
            self.experiment, int(first["t"] * 1000), tags=tags, run_name=name
        )
        run = Known.of(created)
        self.runs[run.id] = run
        self._senders[run.id] = Sender(self.client, run, new=True)
        return run


def _drawn(lines: list[dict], stage: str) -> list[tuple[str, float, int, int]]:
    """The curves of a training that are compared, ``validation/pretrain accuracy``."""
    return [
        (name.replace("/", f"/{stage} ", 1), value, at, step)
        for name, value, at, step in curves(lines)
        if name in DRAWN or (not name.startswith("loss/") and name not in PACE)
    ]
