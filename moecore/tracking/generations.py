"""Which parent run a history belongs to: one a method and seed, and anew when a training is.

The stages of a method and a seed are children of one run. A training that runs again begins a new
one, which stands beside the old one in every chart; a measurement that runs again only changes the
numbers of the one that there is. What belongs to no single model (data, teachers, transfer of
attacks) has one run for all.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moecore.tracking.known import LEVEL, PARENT, Known
from moecore.tracking.names import PHASES

FAMILY = "moecore.family"  # of a parent: "vmoe/0", or SHARED
SHARED = "shared"
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
