"""What the stages wrote of a study, typed: model by model, phase by phase."""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from moecore.core.config import Config
from moecore.measure.base import MeasuredPart
from moecore.measure.trained import Trained, outcome_of
from moecore.measure.values import Found
from moecore.study.document import parse_yaml_document
from moecore.study.sections import Selection
from moecore.study.stages import MEASURE
from moecore.tasks.base import Task
from moecore.training.outcome import Outcome
from moecore.training.regularizers.group_sparsity import GroupSparsity

V = TypeVar("V")
Kinds = Mapping[type[Config], Any]
NOTHING: Kinds = MappingProxyType({})
UNLEARNED = ("hash", "teacher_routed", "told")  # routers that the model itself does not train


class Measured(NamedTuple):
    """Everything known of one model: its results by their type."""

    results: Kinds = NOTHING
    skipped: tuple[str, ...] = ()  # what does not apply to it, and why

    def of(self, kind: type[MeasuredPart]) -> Found | None:
        """Return the values of a measurement or a part; None where it was not made or applied."""
        return self.results.get(kind)

    @property
    def outcome(self) -> Outcome | None:
        """Return what its training came to; None where it was not trained."""
        trained = self.of(Trained)
        return None if trained is None else outcome_of(trained)


Models = Mapping[str, Mapping[int, Measured]]  # method → seed → model


class Phase(NamedTuple):
    """The models of one phase, and the data that they were trained on and measured with."""

    name: str
    card: Mapping[str, Any]
    task: Task
    models: Models
    together: Kinds = NOTHING  # results of all methods at once, as the transfer of attacks

    @property
    def seeds(self) -> int:
        """How many models a method has."""
        return len(next(iter(self.models.values())))

    @property
    def first_seed(self) -> str:
        """What to say below the picture of one model: which of several it is."""
        return " First seed." if self.seeds > 1 else ""

    @property
    def every(self) -> list[Measured]:
        """All models, method by method."""
        return [model for seeds in self.models.values() for model in seeds.values()]

    def results(self, kind: type[MeasuredPart]) -> list[Found]:
        """Return the values of a measurement of all models that have them."""
        return list_without_none(model.of(kind) for model in self.every)

    def of(self, kind: type[MeasuredPart]) -> dict[str, list[Found]]:
        """Return method → the values of all its seeds; [] where a seed has none."""
        results: dict[str, list[Found]] = {}
        for method, seeds in self.models.items():
            of_seeds = list_without_none(model.of(kind) for model in seeds.values())
            results[method] = of_seeds if len(of_seeds) == len(seeds) else []
        return results

    def first(self, kind: type[MeasuredPart]) -> dict[str, Found]:
        """Return method → the values of its first seed; without the methods that have none."""
        models = {method: next(iter(seeds.values())) for method, seeds in self.models.items()}
        results = {method: model.of(kind) for method, model in models.items()}
        return {method: result for method, result in results.items() if result is not None}

    @property
    def outcomes(self) -> dict[str, list[Outcome]]:
        """Return method → what the trainings of all its seeds came to; [] where one is missing."""
        return {
            method: [outcome_of(trained) for trained in seeds]
            for method, seeds in self.of(Trained).items()
        }

    @property
    def first_outcomes(self) -> dict[str, Outcome]:
        """Return method → what the training of its first seed came to."""
        return {method: outcome_of(one) for method, one in self.first(Trained).items()}


class Results(NamedTuple):
    """A whole study."""

    phases: Mapping[str, Phase]
    settings: str = ""  # the text of params.yaml
    alone: Kinds = NOTHING  # results without a trained model, as the linear experts

    @property
    def methods(self) -> list[str]:
        """The same in every phase; none where nothing is trained."""
        return next((list(phase.models) for phase in self.phases.values()), [])

    @property
    def simulated(self) -> list[str]:
        """Names of the data sets that are simulated."""
        cards = [phase.card for phase in self.phases.values()]
        return [card["name"] for card in cards if card.get("simulated")]

    @property
    def controls(self) -> frozenset[str]:
        """Methods that are no candidates: they are never marked, and need not be beaten.

        With ``permuted: true`` the training labels are dealt out anew, and nothing can be learned;
        a router that is fixed, is another model's, or is told the truth is steady without having
        decided anything.
        """
        return frozenset(
            name
            for name, settings in self._settings.items()
            if settings.get("permuted") or (settings.get("router") or {}).get("kind") in UNLEARNED
        )

    @property
    def without_experts(self) -> frozenset[str]:
        """Dense methods, where others have experts: what those are held against."""
        dense = {name for name, settings in self._settings.items() if "router" not in settings}
        return frozenset(dense) if dense < set(self._settings) else frozenset()

    @property
    def schedules(self) -> dict[str, GroupSparsity]:
        """The methods whose group sparsity has a σ that changes, with its settings."""
        sparsities = {
            name: GroupSparsity.model_validate(one)
            for name, settings in self._settings.items()
            for one in settings.get("regularizers") or ()
            if one.get("kind") == "group_sparsity"
        }
        return {name: one for name, one in sparsities.items() if one.filter == "gaussian"}

    @property
    def _settings(self) -> dict[str, Mapping[str, Any]]:
        """The settings of the methods that were compared, as far as params.yaml has them."""
        methods = parse_methods_section(self.settings)
        return {name: methods[name] or {} for name in self.methods if name in methods}


@cache
def parse_methods_section(settings: str) -> Mapping[str, Any]:
    """The entry ``methods`` of a params.yaml; {} where it has none."""
    return (parse_yaml_document(settings).data or {}).get("methods") or {}


def stages_and_measurements(stages: Collection[str], run: Selection) -> set[str]:
    """Return the stages of a study, and what its stage ``measure`` measures."""
    if MEASURE in stages:
        return {*stages, *run.measurements}
    return set(stages)


def list_without_none(values: Iterable[V | None]) -> list[V]:
    """Those that are not None."""
    return [value for value in values if value is not None]
