"""Results of a study as objects: by phase, method and seed."""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from moecore.attacks.base import Attack
from moecore.core.config import Config
from moecore.measure import base, pixel_baselines
from moecore.measure.training import Trained, get_outcome
from moecore.measure.values import Found, Value
from moecore.study.run_and_claims import RunSelection
from moecore.study.stages import MEASURE
from moecore.study.yaml_document import parse_yaml_document
from moecore.tasks.base import Task
from moecore.training.outcome import Outcome
from moecore.training.regularizers.group_sparsity import GroupSparsity

V = TypeVar("V")
Kinds = Mapping[type[Config], Any]
NO_RESULTS: Kinds = MappingProxyType({})
UNLEARNED = ("hash", "teacher_routed", "told")  # routers that the model does not train


class ModelResults(NamedTuple):
    results: Kinds = NO_RESULTS
    skipped: tuple[str, ...] = ()  # measurements that do not apply, and why

    def of(self, kind: type[base.MeasuredPart]) -> Found | None:
        return self.results.get(kind)

    @property
    def outcome(self) -> Outcome | None:
        trained = self.of(Trained)
        return None if trained is None else get_outcome(trained)


Models = Mapping[str, Mapping[int, ModelResults]]  # method → seed → model


class PhaseResults(NamedTuple):
    """The results of all models of one phase, and the card of its data."""

    name: str
    card: Mapping[str, Any]
    task: Task
    models: Models
    together: Kinds = NO_RESULTS  # results of all methods at once, such as transfer

    @property
    def seeds(self) -> int:
        return len(next(iter(self.models.values())))

    @property
    def seed_note(self) -> str:
        """The caption's end " First seed." if there are several seeds, else ""."""
        return " First seed." if self.seeds > 1 else ""

    @property
    def all_models(self) -> list[ModelResults]:
        return [model for seeds in self.models.values() for model in seeds.values()]

    @property
    def baselines(self) -> dict[str, Value]:
        """Test score of each classifier on pixels, by its name; {} if none was fitted."""
        fitted = self.together.get(pixel_baselines.Baselines, Found(values=()))
        return {str(value.at["classifier"]): value for value in fitted.all("baseline")}

    def results(self, kind: type[base.MeasuredPart]) -> list[Found]:
        return list_without_none(model.of(kind) for model in self.all_models)

    def of(self, kind: type[base.MeasuredPart]) -> dict[str, list[Found]]:
        """Return method → one result per seed; [] if any seed lacks it."""
        results = {}
        for method, seeds in self.models.items():
            of_seeds = list_without_none(model.of(kind) for model in seeds.values())
            results[method] = of_seeds if len(of_seeds) == len(seeds) else []
        return results

    def first(self, kind: type[base.MeasuredPart]) -> dict[str, Found]:
        """Return method → the result of its first seed; methods without one are left out."""
        results = {name: next(iter(seeds.values())).of(kind) for name, seeds in self.models.items()}
        return {method: result for method, result in results.items() if result is not None}

    @property
    def outcomes(self) -> dict[str, list[Outcome]]:
        return {k: list(map(get_outcome, v)) for k, v in self.of(Trained).items()}

    @property
    def first_outcomes(self) -> dict[str, Outcome]:
        return {k: get_outcome(trained) for k, trained in self.first(Trained).items()}


class StudyResults(NamedTuple):
    phases: Mapping[str, PhaseResults]
    settings: str = ""  # the text of params.yaml
    calculations: Mapping[str, Found] = MappingProxyType({})  # by name: without a trained model

    @property
    def methods(self) -> list[str]:
        return next((list(phase.models) for phase in self.phases.values()), [])

    @property
    def controls(self) -> frozenset[str]:
        """Names of control methods, which are neither marked as best nor compared."""
        # With ``permuted: true`` training labels are shuffled, so nothing can be learned. A router
        # that is fixed, another model's, or given the truth is steady without deciding anything.
        return frozenset(
            name
            for name, settings in self._settings.items()
            if settings.get("permuted") or (settings.get("router") or {}).get("kind") in UNLEARNED
        )

    @property
    def without_experts(self) -> frozenset[str]:
        """Names of methods without a router, if the study also has methods with one."""
        dense = {name for name, settings in self._settings.items() if "router" not in settings}
        if dense < set(self._settings):
            return frozenset(dense)
        return frozenset()

    @property
    def sigma_schedules(self) -> dict[str, GroupSparsity]:
        """Group sparsity settings of each method that uses MoGE's Gaussian filter."""
        return {
            name: sparsity
            for name, settings in self._settings.items()
            for regularizer in settings.get("regularizers") or ()
            if regularizer.get("kind") == "group_sparsity"
            and (sparsity := GroupSparsity.model_validate(regularizer)).filter == "gaussian"
        }

    @property
    def attacks(self) -> dict[str, Attack]:
        section = parse_params_as_mapping(self.settings).get("robustness") or {}
        attacks = map(Attack.model_validate, section.get("attacks") or ())
        return {attack.name: attack for attack in attacks}

    @property
    def _settings(self) -> dict[str, Mapping[str, Any]]:
        methods = parse_params_as_mapping(self.settings).get("methods") or {}
        return {name: methods[name] or {} for name in self.methods if name in methods}


@cache
def parse_params_as_mapping(settings: str) -> Mapping[str, Any]:
    return parse_yaml_document(settings).data or {}


def add_measurements_to_stages(stages: Collection[str], run: RunSelection) -> set[str]:
    if MEASURE in stages:
        return {*stages, *run.measurements}
    return set(stages)


def list_without_none(values: Iterable[V | None]) -> list[V]:
    return [value for value in values if value is not None]
