"""The class ``Study``: all of params.yaml as one typed object."""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model

from moecore.core.config import Config, find_class
from moecore.core.source_layout import allow_packages, check_package_name, package_folder
from moecore.data.sources.base import Source
from moecore.measure import calibration, transfer_attacks
from moecore.measure.base import Measurement, builtin_measurements
from moecore.measure.robustness import Robustness
from moecore.measure.routing import Routing
from moecore.nn.backbones.base_model import Backbone
from moecore.study.params_reader import validate_document
from moecore.study.run_and_claims import Claim, PhaseName, Question, RunSelection
from moecore.study.stages import (
    CALCULATE,
    CODE_STAGE,
    LAST_STAGES,
    MEASURE,
    STAGE_ROWS,
    STAGE_SECTIONS,
    TRAINING_PHASES,
)
from moecore.study.yaml_document import YamlDocument, dict_or_empty, list_or_empty
from moecore.training.method import Method
from moecore.training.monitor import MonitorSettings
from moecore.training.settings import Finetuning, TeacherRouterFit, Training
from moecore.training.teachers.base import Teacher

Misfits = Iterator[tuple[tuple, str]]  # (keys, message) pairs that rules yield

# read by the stage `measure`
MEASURED_SECTIONS = tuple(name for name in builtin_measurements() if name not in STAGE_SECTIONS)
# complete by their defaults
OPTIONAL_SECTIONS = ("claims", "questions", "monitor", "out_of_fold", "transfer", "packages")


def stage_by_section(stages: Iterable[str], run: Mapping[str, Any]) -> dict[str, str]:
    """Return section → first of ``stages`` that reads it; run: the section ``run``."""
    readers = {"run": LAST_STAGES[0], "packages": CODE_STAGE}
    for stage in stages:
        if stage in TRAINING_PHASES:
            readers.setdefault("monitor", stage)
        for section in STAGE_SECTIONS.get(stage, ()):
            readers.setdefault(section, stage)
        if stage in (MEASURE, CALCULATE):
            named = list_or_empty(run.get("measurements" if stage == MEASURE else "calculations"))
            readers |= {name: stage for name in named if name in MEASURED_SECTIONS}
            outside = [name for name in named if isinstance(name, str) and "." in name]
            readers |= {name.partition(".")[0]: stage for name in outside}
    return readers


# One section per measurement of the table
MEASUREMENT_FIELDS: dict[str, Any] = {
    name: (measurement | None, None) for name, measurement in builtin_measurements().items()
}
STAGE_FIELDS: dict[str, Any] = {  # one section per stage whose row names a settings class
    stage.name: (pkgutil.resolve_name(stage.settings) | None, None)
    for stage in STAGE_ROWS
    if stage.settings
}
StageSections = create_model("StageSections", __base__=Config, **MEASUREMENT_FIELDS, **STAGE_FIELDS)


def _check_package(name: str) -> str:
    # The settings of a package's measurements are in a section with the package's name.
    if name in Study.model_fields:
        raise ValueError(f"found {name}, the name of a section; allowed: packages of other names")
    package_folder(check_package_name(name))
    return name


def _check_listed_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"found {', '.join(twice)} twice; allowed: each package once")
    return names


class Study(StageSections):
    """params.yaml: what is computed (``run``), and the settings of every stage.

    Sections that are None are not in the file; a study needs the sections that its stages read.
    """

    packages: Annotated[
        tuple[Annotated[str, AfterValidator(_check_package)], ...],
        AfterValidator(_check_listed_once),
    ] = Field((), description="Packages with parts, kind: package.module; others are refused.")
    run: RunSelection
    data: dict[PhaseName, Source] = {}
    model: Backbone | None = None
    methods: dict[str, Method] = Field({}, description="Every entry may be named in run.methods.")
    teacher: Teacher | None = None
    teacher_router: TeacherRouterFit | None = None
    pretrain: Training | None = None
    finetune: Finetuning | None = None
    monitor: MonitorSettings | None = Field(None, description="How routing is watched; null: not.")
    calibrate: calibration.Calibrate | None = None
    robustness: Robustness | None = None
    transfer: transfer_attacks.Transfer | None = None
    routing: Routing | None = None
    claims: tuple[Claim, ...] = Field((), description="Papers' claims, tested on these runs.")
    questions: tuple[Question, ...] = Field(
        (), description="Questions about two methods that no paper answers, asked of these runs."
    )


def read_study(document: YamlDocument) -> Study:
    # Outside measurements have their settings under the name of their package: ``my_lab:
    # {brightness: {images: 8}}``. Afterwards the process may import parts of the listed packages.
    allow_packages(document.packages, document.folders)
    measurements = {}
    for package in document.packages:
        for name in dict_or_empty(document.data.get(package)):
            try:
                measurements[f"{package}.{name}"] = find_class(Measurement, f"{package}.{name}")
            except ValueError as error:
                raise document.error((package, name), str(error)) from None
    return validate_document(build_study_class(measurements), document)


def build_study_class(measurements: Mapping[str, type[Measurement]]) -> type[Study]:
    """Return ``Study`` with one more section for each outside package with measurements."""
    if not measurements:
        return Study
    sections: dict[str, dict[str, Any]] = {}
    for name, measurement in measurements.items():
        package, _, module = name.partition(".")
        sections.setdefault(package, {})[module] = (measurement | None, None)
    fields: dict[str, Any] = {
        package: (create_model(package, __base__=Config, **modules) | None, None)
        for package, modules in sections.items()
    }
    return create_model("Study", __base__=Study, __doc__=Study.__doc__, **fields)
