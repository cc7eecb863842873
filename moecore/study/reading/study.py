"""The whole of params.yaml as one typed object, and which of its sections the stages read."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model

from moecore.brain.out_of_fold import OutOfFold
from moecore.core.config import Config
from moecore.core.outside_packages import check_package_name
from moecore.data.sources.base import Source
from moecore.measure import MEASUREMENTS
from moecore.measure.calibration import Calibrate
from moecore.measure.linear_experts import LinearExperts
from moecore.measure.robustness import Robustness
from moecore.measure.routing import Routing
from moecore.measure.sizes import Sizes
from moecore.measure.transfer import Transfer
from moecore.nn.backbones.base_model import Backbone
from moecore.study.reading.claims_section import Claim, Question
from moecore.study.reading.run_section import Phase, Selection
from moecore.training.method import Method
from moecore.training.settings import AdversarialFinetuning, Finetuning, TeacherRouterFit, Training
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
MEASURED_SECTIONS = tuple(name for name in MEASUREMENTS if name not in SECTIONS)
# their defaults say all
OPTIONAL_SECTIONS = ("claims", "questions", "out_of_fold", "transfer", "packages")
TRAINING_PHASES = ("pretrain", "finetune", "adversarial")  # stages that train, on their own data


def stages_by_section(stages: Iterable[str], run: Mapping[str, Any]) -> dict[str, str]:
    """Return section → a stage that reads it; run: the section ``run`` of the file."""
    readers = {"run": "compare", "packages": "code"}
    for stage in stages:
        for section in SECTIONS.get(stage, ()):
            readers.setdefault(section, stage)
        if stage == "measure":
            listed = run.get("measurements")
            named = listed if isinstance(listed, list) else []
            readers |= {name: stage for name in named if name in MEASURED_SECTIONS}
    return readers


# A section for each measurement of the table, so that a new one costs no line here.
MEASUREMENT_FIELDS: dict[str, Any] = {
    name: (measurement.settings | None, None) for name, measurement in MEASUREMENTS.items()
}
Measured = create_model("Measured", __base__=Config, **MEASUREMENT_FIELDS)


class Study(Measured):
    """params.yaml: what is computed (``run``), and the settings of every stage that computes it.

    Sections that are None are not in the file; a study needs those that its stages read.
    """

    packages: tuple[Annotated[str, AfterValidator(check_package_name)], ...] = Field(
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
