"""Check a brain-age model on single tissues, simulated ageing and rescans.

Ageing needs subjects that change in age alone, which only a simulation (phantom) has.
"""

from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from moecore.data.sources.phantom import Phantom
from moecore.data.volumes.volume_preparation import TISSUES
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.probes import linear_probe
from moecore.measure.probes import simulated_people as simulated
from moecore.measure.probes.simulated_people import PEOPLE, UnseenPeopleSimulator
from moecore.measure.values import Metric, OnPage, Place, Values

SIMULATED_ONLY = "only a simulated cohort (kind: phantom) can age a subject and change nothing else"
NO_MAPS = "the cohort has no tissue maps"
Age = Annotated[float, Field(gt=0, le=120)]
People = UnseenPeopleSimulator | None  # in no split; None for a cohort that is not simulated
NEW_VOLUMES = {  # that region experts were not trained on
    "mixed": "two tissues mixed",
    "whole": "whole volumes",
    "other_generator": "another generator's whole volumes",
}
METRICS = {
    f"isolated_{name}": Metric(
        f"MAE, {name.upper()} alone", "lower", note="MAE in years on volumes with only this tissue"
    )
    for name in TISSUES
}
METRICS |= {
    f"probe_{name}": Metric(
        f"MAE, {name.upper()} alone, probe",
        "lower",
        note="MAE in years of a linear probe on volumes with only this tissue: a new linear head, "
        "fitted on such volumes of the training split, predicts age from the frozen model's "
        "features; a model may have large errors on such volumes although its features tell age",
    )
    for name in TISSUES
}
METRICS |= {
    "gm_over_csf": Metric(
        "GM − CSF, probe",
        note="additional MAE of the probe, in years, on grey matter alone than on fluid alone",
    ),
    "wm_over_gm": Metric(
        "WM − GM, probe",
        note="additional MAE of the probe, in years, on white matter alone than on grey matter "
        "alone",
    ),
    "monotone": Metric(
        "Ageing, rising steps",
        "higher",
        "share",
        note="steps from one age to the next with a rising prediction for the same simulated "
        "subject",
    ),
    "ageing_rank": Metric("Ageing, rank correlation", "higher", note="of age and prediction"),
    "rescan": Metric("Rescan, years apart", "lower", note="mean |difference| of a subject's scans"),
}
METRICS |= {
    key: metric
    for name, description in NEW_VOLUMES.items()
    for key, metric in {
        f"{name}_agreement": Metric(
            f"Own tissue, {description}",
            "higher",
            "share",
            note="tokens whose first region expert belongs to the cube's largest tissue; on "
            "isolated volumes experts follow their training labels: no finding",
        ),
        f"{name}_over_chance": Metric(
            f"Own tissue, {description} − chance",
            "higher",
            note="the same − the expected value with the person's cubes (of all mixtures) "
            "permuted; at 0 the experts do not distinguish them",
        ),
    }.items()
}
METRICS = {name: metric._replace(paper="ages") for name, metric in METRICS.items()}
# The other fields of a ``TissueAgreement``; see ``put_agreement``.
METRICS |= {
    f"{name}_{number}": Metric("")
    for name in (*NEW_VOLUMES, "isolated", "other_generator_isolated", "mixture")
    for number in simulated.TissueAgreement._fields
    if f"{name}_{number}" not in METRICS
}
METRICS |= {
    "whole_mae": Metric(""),  # of volumes with all tissues
    "whole_probe_mae": Metric(""),
    "rescan_other_site": Metric(""),  # two scans of one simulated subject
    "expert_correlation": Metric(""),  # of a tissue's share of a cube and its expert's score
}


class CohortChecks(Measurement):
    """Checks of a model of age on single tissues, simulated ageing, rescans and region experts."""

    metrics = METRICS
    page = OnPage("checks on the cohort", place=16)
    tasks = ("regression",)
    regions: ClassVar[bool] = True

    subjects: int = Field(8, ge=1, le=PEOPLE // 2, description="Simulated subjects that are aged.")
    ages: tuple[Age, ...] = Field(
        (20, 30, 40, 50, 60, 70, 80, 90), min_length=2, description="Ages in years, ascending."
    )
    rescans: int = Field(
        16, ge=1, le=PEOPLE // 2, description="Subjects scanned again, at one site and at two."
    )
    probe: int = Field(256, ge=2, description="Most training volumes that a probe is fitted to.")
    generalisation: simulated.RegionGeneralisationSettings = Field(
        simulated.RegionGeneralisationSettings(),
        description="Tests of region experts on volumes that differ from training.",
    )
    batch: int = Field(16, ge=1, description="Volumes per pass; results do not depend on it.")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if list(self.ages) != sorted(set(self.ages)):
            raise ValueError(f"ages: found {list(self.ages)}; allowed: rising ages, each once")
        return self

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        if subject.data.task.by_class(torch.from_numpy(subject.data.test.labels)) is not None:
            return "the labels are classes, not ages; a cohort (kind: phantom or bids) is needed"
        return None

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: ageing, its ages and predictions [subject][age]; not_checked, check → reason.
        out.people = subject.data.test.people
        out.facts["not_checked"] = {}
        put_single_tissue_errors(subject, self, out)
        source = subject.data.card["settings"]
        people: People = None
        if source["kind"] == "phantom":
            people = UnseenPeopleSimulator(Phantom.model_validate(source))
        put_ageing(subject, people, self, out)
        put_rescans(subject, people, self, out)
        put_region_experts(subject, self, out)


def put_single_tissue_errors(subject: MeasuredModel, settings: CohortChecks, out: Values) -> None:
    """Put MAE of model and linear probe on complete volumes and, given maps, on single tissues."""

    def load_errors(name: str, region: int | None) -> linear_probe.ModelAndProbeErrors:
        def compute() -> list[list[float]]:
            sizes = (settings.batch, settings.probe)
            place = (subject.data, region)
            errors = linear_probe.model_and_probe_errors(subject.model, *place, *sizes)
            return [values.tolist() for values in errors]

        return linear_probe.ModelAndProbeErrors(*np.array(out.parts(name, compute)))

    complete = load_errors("whole", None)
    tissues = subject.data.card["regions"]
    errors = {name: load_errors(name, region) for region, name in enumerate(tissues)}
    out.put("whole_mae", complete.raw)
    out.put("whole_probe_mae", complete.probe)
    for name, alone in errors.items():
        out.put(f"isolated_{name}", alone.raw)
        out.put(f"probe_{name}", alone.probe)
    differences = linear_probe.compare_probe_errors_of_tissues(errors, out.people)
    for (more, less), difference in differences.items():
        out.put(f"{more}_over_{less}", difference)
    if not errors:
        out.facts["not_checked"]["isolated"] = NO_MAPS


def put_ageing(subject: MeasuredModel, people: People, settings: CohortChecks, out: Values) -> None:
    """Put how often predictions rise with age, and rank correlation; only for simulated cohorts."""
    if people is None:
        out.facts["not_checked"]["ageing"] = SIMULATED_ONLY
        return
    sizes = (settings.subjects, settings.ages, settings.batch)
    rows = out.parts(
        "ageing", lambda: simulated.predict_ageing(subject.model, people, *sizes).tolist()
    )
    predictions = np.array(rows)
    out.put("monotone", simulated.compute_mean_rising_step_share(predictions))
    out.put("ageing_rank", float(np.mean(simulated.rank_correlations(settings.ages, predictions))))
    out.facts["ageing"] = {"ages": settings.ages, "predictions": rows}


def put_rescans(
    subject: MeasuredModel, people: People, settings: CohortChecks, out: Values
) -> None:
    """Put the change between a person's two scans, and of simulated people also of two sites."""
    pairs = [] if people is not None else simulated.session_pairs(subject.data.subjects("test"))

    def put_changes(part: Values) -> None:
        if people is None:
            settled = (subject.model, subject.data, pairs, settings.batch)
            part.put("rescan", simulated.mean_session_gap_change(*settled))
            return
        ages = np.linspace(settings.ages[0], settings.ages[-1], settings.rescans)
        unseen = (subject.model, people, ages, settings.batch)
        same, other = simulated.measure_simulated_rescans(*unseen)
        part.put("rescan", same)
        part.put("rescan_other_site", other)

    if people is not None or pairs:
        out.piece("rescan", put_changes)
    else:
        years = simulated.RESCAN_YEARS
        reason = f"no test participant has two sessions within {years:g} years"
        out.facts["not_checked"]["rescan"] = reason


def put_region_experts(subject: MeasuredModel, settings: CohortChecks, out: Values) -> None:
    """Put how often a token's best expert is the one of its tissue, or why that is not measured."""
    not_checked = out.facts["not_checked"]
    if not subject.regions:
        not_checked["generalisation"] = "the model has no region experts (methods: regions)"
        return
    if not subject.data.card["regions"]:
        not_checked["generalisation"] = NO_MAPS
        return
    if not simulated.has_generator_voxel_grid(subject.data):
        not_checked["other generator"] = "it makes 64³ voxels of 3 mm, and the data have others"

    def put_experts(part: Values) -> None:
        shared = ((settings.ages[0], settings.ages[-1]), SEED, settings.batch)
        measured = simulated.measure_region_experts(subject, settings.generalisation, *shared)
        put_region_generalisation(measured, part)

    out.piece(f"generalisation of {', '.join(subject.regions)}", put_experts)


def put_region_generalisation(experts: simulated.RegionExpertGeneralisation, out: Values) -> None:
    """Put tissue agreement per kind of volume (``mixed_agreement``) and share–score correlation."""
    # volumes: isolated (single tissues), whole, mixed, mixture, or another generator's.
    put_agreement("isolated", experts.test.isolated, out)
    put_agreement("whole", experts.test.complete, out)
    volumes = {"whole": experts.test}
    if experts.mixed is not None:
        put_agreement("mixed", experts.mixed, out)
    for (complete, thinned, share), mixture in experts.mixtures.items():
        put_agreement("mixture", mixture, out, whole=complete, thinned=thinned, left=share)
    if experts.other is not None:
        put_agreement("other_generator_isolated", experts.other.isolated, out)
        put_agreement("other_generator", experts.other.complete, out)
        volumes["other_generator"] = experts.other
    for name, agreement in volumes.items():
        for tissue, correlation in agreement.correlation.items():
            out.put("expert_correlation", correlation, volumes=name, tissue=tissue)


def put_agreement(name: str, measured: simulated.TissueAgreement, out: Values, **at: Place) -> None:
    for number, value in measured._asdict().items():
        out.put(f"{name}_{number}", value, **at)
