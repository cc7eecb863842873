"""Which stages of a method and seed belong to the model that it has now.

The stages of a method and a seed are children of one run. A training that runs again begins a new
one, beside the old one in every chart; a measurement changes the numbers of the one there is. What
belongs to no single model (data, teachers, transfer of attacks) has one run for all.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from moecore.run.history_file import ExecutionHistory
from moecore.tracking.stored_run import PHASES, StoredRun

FAMILY = "moecore.family"  # of a parent: "vmoe/0", or SHARED
SHARED = "shared"
DENSE = "dense"  # the method that numbers of others are relative to


class ModelHistories(NamedTuple):
    """The histories on disk of one method and seed, and the trainings of its newest model."""

    method: str  # or SHARED
    seed: int
    histories: list[ExecutionHistory]
    trainings: dict[str, ExecutionHistory]  # by phase

    @property
    def family(self) -> str:
        return self.method if self.method == SHARED else f"{self.method}/{self.seed}"

    def training_tags(self) -> dict[str, str]:
        """Return what tells its parent from those of other generations."""
        return {f"moecore.{stage}": one.header["uid"] for stage, one in self.trainings.items()}

    def is_outdated(self, history: ExecutionHistory) -> bool:
        """Whether it is of a model that was trained anew since; its stage has not run again yet."""
        header = history.header
        if header["stage"] in PHASES and self.trainings:
            return history not in self.trainings.values()
        trained = self.trainings.get(header["phase"]) or self.trainings.get("pretrain")
        if trained is None or header["stage"] == "teacher_router":  # which trainings depend on
            return False
        return header["t"] < trained.header["t"]

    def current_histories(self) -> list[ExecutionHistory]:
        """Return the histories of its newest model."""
        return [history for history in self.histories if not self.is_outdated(history)]

    def measured_items(self) -> frozenset[str]:
        """Return the items whose results on disk are of its newest model."""
        current = self.current_histories()
        return frozenset(one.item for one in current if one.run_state()[0] == "FINISHED")

    def choose_parent(self, parents: Iterable[StoredRun]) -> StoredRun | None:
        """Return its run in the store; None where its trainings are others than every one's."""
        tags = self.training_tags()
        fitting = [
            run
            for run in parents
            if run.tags.get(FAMILY) == self.family
            and all(run.tags.get(name, uid) == uid for name, uid in tags.items())
        ]
        known = [(sum(name in run.tags for name in tags), run.started) for run in fitting]
        return fitting[known.index(max(known))] if known else None


def group_by_method_and_seed(histories: Iterable[ExecutionHistory]) -> list[ModelHistories]:
    """Return the histories by method and seed: the dense one first, the shared ones last."""
    groups = defaultdict(list)
    for history in histories:
        method, seed = history.header["method"], history.header["seed"]
        groups[(SHARED, 0) if None in (method, seed) else (method, seed)].append(history)
    generations = [
        ModelHistories(*key, group, {} if key[0] == SHARED else newest_training_by_phase(group))
        for key, group in groups.items()
    ]
    return sorted(generations, key=lambda one: (one.method == SHARED, one.method != DENSE))


def newest_training_by_phase(histories: Iterable[ExecutionHistory]) -> dict[str, ExecutionHistory]:
    """Return phase → its training: that which runs, else the published one.

    A fine-tuning from before the pretraining is left out.
    """

    newest = sorted(
        (one for one in histories if one.header["stage"] in PHASES),
        key=lambda one: (one.run_state()[0] == "RUNNING", one.has_ended, one.header["t"]),
    )
    trainings = {history.header["stage"]: history for history in newest}
    begun = trainings["pretrain"].header["t"] if "pretrain" in trainings else 0.0
    return {stage: one for stage, one in trainings.items() if one.header["t"] >= begun}
