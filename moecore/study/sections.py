"""Which sections of params.yaml the stages read, and so which a study with these stages needs."""

from collections.abc import Iterable, Mapping
from typing import Any

from moecore.measure import MEASUREMENTS

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
MEASURED = tuple(name for name in MEASUREMENTS if name not in SECTIONS)  # by the stage `measure`
OPTIONAL = ("claims", "questions", "out_of_fold", "transfer")  # their defaults say all
PHASES = ("pretrain", "finetune", "adversarial")  # stages that train, each on data of its own


def needed(stages: Iterable[str], run: Mapping[str, Any]) -> dict[str, str]:
    """Section → a stage that reads it; run: the section ``run`` of the file."""
    readers = {"run": "compare"}
    for stage in stages:
        for section in SECTIONS.get(stage, ()):
            readers.setdefault(section, stage)
        if stage == "measure":
            listed = run.get("measurements")
            named = listed if isinstance(listed, list) else []
            readers |= {name: stage for name in named if name in MEASURED}
    return readers
