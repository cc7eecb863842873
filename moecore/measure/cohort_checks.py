"""What a model of age looks at: tissues, ageing and rescans, and what region experts know.

Ageing needs subjects that change in age alone, which only a simulation (phantom) has.
"""

from functools import partial
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.data.sources.phantom import Phantom
from moecore.measure.base import SEED, MeasuredModel, Measurement, PartStore, load_or_compute
from moecore.measure.probes.ageing_and_rescans import (
    PEOPLE,
    RESCAN_YEARS,
    Ageing,
    Rescan,
    UnseenPeopleSimulator,
    compare_sessions,
    measure_simulated_rescans,
    predict_ageing,
    session_pairs,
)
from moecore.measure.probes.region_experts_on_new_data import (
    RegionExpertResult,
    RegionGeneralisationSettings,
    has_generator_voxel_grid,
    measure_generalisation,
)
from moecore.measure.probes.single_tissue_errors import (
    MeanAgeErrors,
    ModelAndProbeErrors,
    TissueErrorDifference,
    model_and_probe_errors,
    summarize_errors,
    tissue_error_differences,
)

SIMULATED_ONLY = (
    "only a simulated cohort (kind: phantom) can age a subject and leave all else as it is"
)
NO_MAPS = "the cohort has no tissue maps"
Age = Annotated[float, Field(gt=0, le=120)]


class CohortChecks(Measurement):
    """How many simulated subjects are aged and scanned again."""

    tasks = ("regression",)
    regions: ClassVar[bool] = True

    subjects: int = Field(
        8, ge=1, le=PEOPLE // 2, description="Simulated subjects, of no split, that are aged."
    )
    ages: tuple[Age, ...] = Field(
        (20, 30, 40, 50, 60, 70, 80, 90), min_length=2, description="The ages of each, rising."
    )
    rescans: int = Field(
        16, ge=1, le=PEOPLE // 2, description="Subjects scanned again, there and elsewhere"
    )
    probe: int = Field(
        256, ge=2, description="Training volumes, at most, that the probe of a tissue is fitted to."
    )
    generalisation: RegionGeneralisationSettings = Field(
        RegionGeneralisationSettings(),
        description="What region experts are tried on that training did not show.",
    )
    batch: int = Field(16, ge=1, description="Volumes a forward pass; no result depends on it.")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if list(self.ages) != sorted(set(self.ages)):
            raise ValueError(f"ages: found {list(self.ages)}; allowed: rising ages, each once")
        return self

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs a cohort of volumes with ages."""
        test = subject.data.test
        if subject.data.task.by_class(torch.from_numpy(test.labels)) is not None:
            return "the labels are classes, not ages; a cohort (kind: phantom or bids) is needed"
        return None

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """The errors on each tissue alone, subjects aged and scanned again, and region experts."""
        data = subject.data
        errors = whole_and_tissue_errors(subject, self, parts)
        whose = data.test.people
        tissues = {name: summarize_errors(values, whose) for name, values in errors.items()}
        whole = tissues.pop("whole")
        people = unseen_simulated_people(data)
        rescan = measure_rescans(subject, people, self, parts)
        reasons = {}
        if people is None:
            reasons["ageing"] = SIMULATED_ONLY
        if rescan is None:
            reasons["rescan"] = (
                f"no test participant has two sessions within {RESCAN_YEARS:g} years"
            )
        if not tissues:
            reasons["isolated"] = NO_MAPS
        return Result(
            whole=whole,
            isolated=tissues or None,
            order=tissue_error_differences(errors, whose),
            ageing=measure_ageing(subject, people, self, parts),
            rescan=rescan,
            generalisation=measure_region_generalisation(subject, self, parts),
            reasons=reasons | region_skip_reasons(subject),
        )


class Result(Config):
    """The parts, each where it could be checked; ``reasons`` says why one is None."""

    whole: MeanAgeErrors
    isolated: dict[str, MeanAgeErrors] | None
    order: tuple[TissueErrorDifference, ...] | None
    ageing: Ageing | None
    rescan: Rescan | None
    generalisation: RegionExpertResult | None
    reasons: dict[str, str]


def whole_and_tissue_errors(
    subject: MeasuredModel, settings: CohortChecks, parts: PartStore
) -> dict[str, ModelAndProbeErrors]:
    """The errors on the whole volume and on each tissue alone, where the data has tissue maps."""
    errors = {}
    for name in ("whole", *subject.data.card["regions"]):
        region = None if name == "whole" else subject.data.card["regions"].index(name)
        compute = partial(
            model_and_probe_errors,
            subject.model,
            subject.data,
            region,
            settings.batch,
            settings.probe,
        )
        errors[name] = load_or_compute(parts, name, ModelAndProbeErrors, compute)
    return errors


def unseen_simulated_people(data: Prepared) -> UnseenPeopleSimulator | None:
    """People of the simulation that made the data; None where none did."""
    settings = data.card["settings"]
    if settings["kind"] != "phantom":
        return None
    return UnseenPeopleSimulator(Phantom.model_validate(settings))


def measure_rescans(
    subject: MeasuredModel,
    people: UnseenPeopleSimulator | None,
    settings: CohortChecks,
    parts: PartStore,
) -> Rescan | None:
    """Simulated people scanned again, or the sessions of a real cohort; None without any."""
    if people is not None:
        ages = np.linspace(settings.ages[0], settings.ages[-1], settings.rescans)
        compute = partial(measure_simulated_rescans, subject.model, people, ages, settings.batch)
    elif pairs := session_pairs(subject.data.subjects("test")):
        compute = partial(compare_sessions, subject.model, subject.data, pairs, settings.batch)
    else:
        return None
    return load_or_compute(parts, "rescan", Rescan, compute)


def measure_ageing(
    subject: MeasuredModel,
    people: UnseenPeopleSimulator | None,
    settings: CohortChecks,
    parts: PartStore,
) -> Ageing | None:
    """Simulated subjects at every age; None for a real cohort."""
    if people is None:
        return None
    sizes = (settings.subjects, settings.ages, settings.batch)
    compute = partial(predict_ageing, subject.model, people, *sizes)
    return load_or_compute(parts, "ageing", Ageing, compute)


def measure_region_generalisation(
    subject: MeasuredModel, settings: CohortChecks, parts: PartStore
) -> RegionExpertResult | None:
    """Region experts where training did not show them the answer; None for a model without."""
    tissues = subject.regions
    if not tissues or not subject.data.card["regions"]:
        return None
    ages = (settings.ages[0], settings.ages[-1])
    given = (settings.generalisation, ages, SEED, settings.batch)
    compute = partial(measure_generalisation, subject.model, subject.data, tissues, *given)
    name = f"generalisation of {', '.join(tissues)}"
    return load_or_compute(parts, name, RegionExpertResult, compute)


def region_skip_reasons(subject: MeasuredModel) -> dict[str, str]:
    """Why region experts were not tried, or not on the other generator's volumes."""
    if not subject.regions:
        return {"generalisation": "the model has no region experts (methods: regions)"}
    if not subject.data.card["regions"]:
        return {"generalisation": NO_MAPS}
    if not has_generator_voxel_grid(subject.data):
        return {"other generator": "it makes 64³ voxels of 3 mm, and the data have others"}
    return {}
