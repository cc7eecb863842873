"""The whole of params.yaml as one typed object, and which of its sections the stages read."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model

from moecore.brain.out_of_fold import OutOfFold
from moecore.core.config import Config, find_class
from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages, check_package_name, package_folder
from moecore.data.sources.base import Source
from moecore.measure.base import Measurement, builtin_measurements
from moecore.measure.calibration import Calibrate
from moecore.measure.linear_experts import LinearExperts
from moecore.measure.robustness import Robustness
from moecore.measure.routing import Routing
from moecore.measure.sizes import Sizes
from moecore.measure.transfer import Transfer
from moecore.nn.backbones.base_model import Backbone
from moecore.study.document import Document
from moecore.study.sections import Claim, Phase, Question, Selection
from moecore.study.settings import format_error_line, validate_whole
from moecore.training.method import Method
from moecore.training.monitor import Monitor
from moecore.training.settings import AdversarialFinetuning, Finetuning, TeacherRouterFit, Training
from moecore.training.surgery.merge import Merge
from moecore.training.surgery.prune import Prune
from moecore.training.teachers.base import Teacher

Misfits = Iterator[tuple[tuple, str]]  # what rules yield: keys, and what is wrong there

# A test holds this equal to what the scripts under stages/ read.
SECTIONS: dict[str, tuple[str, ...]] = {
    "prepare": ("data",),
    "teacher": ("teacher",),
    "teacher_router": ("model", "methods", "teacher_router"),
    "pretrain": ("model", "methods", "pretrain"),
    "finetune": ("methods", "finetune"),
    "adversarial": ("methods", "adversarial"),
    "prune": ("prune",),
    "merge": ("merge",),
    "out_of_fold": ("model", "methods", "pretrain", "calibrate", "out_of_fold"),
    "calibrate": ("calibrate",),
    "robustness": ("robustness",),
    "transfer": ("run", "transfer"),
    "routing": ("routing",),
    "measure": (),  # those that run.measurements names
    "linear_experts": ("linear_experts",),
    "sizes": ("sizes",),
    "compare": ("run", "claims", "questions"),
}
# by the stage `measure`
MEASURED_SECTIONS = tuple(name for name in builtin_measurements() if name not in SECTIONS)
# their defaults say all
OPTIONAL_SECTIONS = ("claims", "questions", "monitor", "out_of_fold", "transfer", "packages")
TRAINING_PHASES = ("pretrain", "finetune", "adversarial")  # stages that train, on their own data
REDUCING_PHASES = ("prune", "merge")  # stages that give a pretrained model fewer experts


def stage_by_section(stages: Iterable[str], run: Mapping[str, Any]) -> dict[str, str]:
    """Return section → a stage that reads it; run: the section ``run`` of the file."""
    readers = {"run": "compare", "packages": "code"}
    for stage in stages:
        if stage in TRAINING_PHASES:
            readers.setdefault("monitor", stage)
        for section in SECTIONS.get(stage, ()):
            readers.setdefault(section, stage)
        if stage == "measure":
            listed = run.get("measurements")
            named = listed if isinstance(listed, list) else []
            readers |= {name: stage for name in named if name in MEASURED_SECTIONS}
            outside = [name for name in named if isinstance(name, str) and "." in name]
            readers |= {name.partition(".")[0]: stage for name in outside}
    return readers


# A section for each measurement of the table, so that a new one costs no line here.
MEASUREMENT_FIELDS: dict[str, Any] = {
    name: (measurement | None, None) for name, measurement in builtin_measurements().items()
}
Measured = create_model("Measured", __base__=Config, **MEASUREMENT_FIELDS)


def _check_package(name: str) -> str:
    """Return the name of a package, which no section has: its measurements have one of its name."""
    if name in Study.model_fields:
        raise ValueError(f"found {name}, the name of a section; allowed: packages of other names")
    package_folder(check_package_name(name))
    return name


def _check_listed_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"found {', '.join(twice)} twice; allowed: each package once")
    return names


class Study(Measured):
    """params.yaml: what is computed (``run``), and the settings of every stage that computes it.

    Sections that are None are not in the file; a study needs those that its stages read.
    """

    packages: Annotated[
        tuple[Annotated[str, AfterValidator(_check_package)], ...],
        AfterValidator(_check_listed_once),
    ] = Field(
        (), description="Of parts from outside, kind: package.module; other packages are refused."
    )
    run: Selection
    data: dict[Phase, Source] = {}
    model: Backbone | None = None
    methods: dict[str, Method] = Field({}, description="Every entry may be named in run.methods.")
    teacher: Teacher | None = None
    teacher_router: TeacherRouterFit | None = None
    pretrain: Training | None = None
    finetune: Finetuning | None = None
    adversarial: AdversarialFinetuning | None = None
    prune: Prune | None = None
    merge: Merge | None = None
    monitor: Monitor | None = Field(
        None, description="How a training watches its routing, without a change; null: not at all."
    )
    out_of_fold: OutOfFold | None = None
    calibrate: Calibrate | None = None
    robustness: Robustness | None = None
    transfer: Transfer | None = None
    routing: Routing | None = None
    linear_experts: LinearExperts | None = None
    sizes: Sizes | None = None
    claims: tuple[Claim, ...] = Field(
        (), description="What the papers say of two methods, held against these runs."
    )
    questions: tuple[Question, ...] = Field(
        (), description="What no paper says of two methods, asked of these runs."
    )


def read_study(document: Document) -> Study:
    """Return the whole of a params.yaml, validated; UserError with one line per problem.

    Measurements from outside have their settings under the name of their package: ``my_lab:
    {brightness: {images: 8}}``. From then on the process may import parts of the listed packages.
    """
    allow_packages(document.packages, document.folders)
    measurements = {}
    for package in document.packages:
        section = document.data.get(package)
        for name in section if isinstance(section, dict) else ():
            try:
                measurements[f"{package}.{name}"] = find_class(Measurement, f"{package}.{name}")
            except ValueError as error:
                line = format_error_line(document, (package, name), str(error))
                raise UserError(line) from None
    return validate_whole(study_model(measurements), document)


def study_model(measurements: Mapping[str, type[Measurement]]) -> type[Study]:
    """Return ``Study`` with sections of packages; measurements: from outside, by dotted name."""
    sections: dict[str, dict[str, Any]] = {}
    for name, measurement in measurements.items():
        package, _, module = name.partition(".")
        sections.setdefault(package, {})[module] = (measurement | None, None)
    fields: dict[str, Any] = {
        package: (create_model(package, __base__=Config, **modules) | None, None)
        for package, modules in sections.items()
    }
    return create_model("Study", __base__=Study, __doc__=Study.__doc__, **fields)
