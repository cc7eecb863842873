"""A simulated ageing cohort, made from real anatomy (the MNI152 maps) and published trajectories of
tissue volumes.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.data.phantom.anatomy import Anatomy
from moecore.data.phantom.fields import SIDE, VOXEL_MM, scan_brain
from moecore.data.phantom.numbers import Preset
from moecore.data.prepared import SPLITS
from moecore.data.preview import Preview
from moecore.data.volumes.cohort_splits import CohortSplits, age_preview, split_cohort
from moecore.data.volumes.grids import BRAIN
from moecore.data.volumes.subjects import VolumeSubject
from moecore.data.volumes.volume_writer import VolumeDatasetInfo, VolumePart, write_volumes
from moecore.data.volumes.volumes import REGIONS, StoredVolume, to_stored
from moecore.data.workers import map_in_threads, one_blas_thread

MOST = 1_000_000  # subjects of one cohort: the seeds of two cohorts never meet
LICENCE = "simulated from the MNI152 maps (see moecore/data/phantom/mni152/NOTICE.md)"


class SimulatedScan(NamedTuple):
    """One simulated scan: float32 volume (D, H, W) with a background of 0, regions (3, D, H, W) of
    wm, gm, csf, and what is known of the person.
    """

    volume: np.ndarray
    regions: np.ndarray
    truth: dict[str, Any]

    @property
    def mask(self) -> np.ndarray:
        """The voxels of the brain and its fluid: bool (D, H, W)."""
        return self.regions.sum(axis=0) > BRAIN


class Visit(NamedTuple):
    """One scan of a cohort: the row it gets, and what ``Phantom.draw`` makes it from."""

    subject: VolumeSubject
    seed: int
    scan: int
    site: int


def simulate_scan(
    age: float,
    sex: str,
    seed: int,
    *,
    scan: int = 0,
    site: int = 0,
    preset: Preset = "demo",
    delta: float | None = None,
) -> SimulatedScan:
    """Simulate a T1-weighted, skull-stripped scan of a person (``seed``) at an age in years, as a
    woman (F) or a man (M).

    The same seed at another age is the same person, older; another ``scan`` or ``site`` is the same
    brain in the scanner again.
    delta: brain age − age in years, in place of the person's own. A function of its arguments
    alone.
    """
    with one_blas_thread():  # else two voxels in a hundred volumes depend on the number of cores
        brain = Anatomy.draw(seed, preset).at(age, sex, delta)
        mask = brain.regions.sum(axis=0) > BRAIN
        return SimulatedScan(
            scan_brain(brain.brightness, mask, seed, scan, site), brain.regions, brain.truth
        )


class Phantom(CohortSplits):
    """Simulated people, not patients: what a model finds here says that the software works, nothing
    about real brains.

    Ages, head size, tissue volumes, ventricles, lesions and scanners vary independently of each
    other but for age and sex.
    """

    kind: Literal["phantom"] = "phantom"
    subjects: int = Field(480, ge=8, lt=MOST, description="Number of simulated people")
    youngest: float = Field(
        20.0, ge=18, le=95, description="Least age in years; ages are drawn evenly between the two"
    )
    oldest: float = Field(90.0, ge=18, le=95, description="Greatest age in years")
    women: float = Field(0.5, ge=0, le=1, description="Share of women")
    sites: int = Field(
        3, ge=1, description="Number of scanners, each with its brightness, contrast and noise"
    )
    second_sessions: float = Field(
        0.0, ge=0, le=1, description="Share of the people who are scanned a second time"
    )
    session_years: float = Field(
        2.0, ge=0, le=20, description="Years between the two scans of a person"
    )
    preset: Preset = Field(
        "demo",
        description="How much people of one age differ: demo (learnable from few), realistic",
    )

    @model_validator(mode="after")
    def _ages(self) -> Self:
        if self.oldest <= self.youngest:
            raise ValueError(
                f"oldest is {self.oldest:g}; allowed: more than youngest ({self.youngest:g})"
            )
        return self

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout to ``folder`` and return its card; the same settings give the
        same bytes, with any number of cores.
        """
        visits = self.visits()
        rows = split_cohort([visit.subject for visit in visits], self)
        name = f"Simulated ageing cohort (phantom, {self.preset})"
        source = (
            "simulated; trajectories of Bethlehem et al. 2022 (doi 10.1038/s41586-022-04554-y), "
            "anatomy of MNI152 (ICBM 2009a nonlinear)"
        )
        facts = VolumeDatasetInfo(
            name, (SIDE,) * 3, (VOXEL_MM,) * 3, LICENCE, source, self, simulated=True
        )
        return write_volumes(
            folder,
            facts,
            {split: self._part([visits[row] for row in rows[split]]) for split in SPLITS},
        )

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; nothing is simulated."""
        name = f"Simulated ageing cohort (phantom, {self.preset})"
        return age_preview(name, (SIDE,) * 3, REGIONS).complete_with(self._known)

    def _known(self) -> dict[str, Any]:
        rows = split_cohort([visit.subject for visit in self.visits()], self)
        return {"counts": {split: (len(part),) for split, part in rows.items()}}

    def draw(self, age: float, sex: str, seed: int, scan: int = 0, site: int = 0) -> StoredVolume:
        """A scan exactly as ``prepare`` stores it: image float16 (1, D, H, W) in [0, 1], regions
        uint8 (3, D, H, W), share × 255.

        seed: the person's, see ``visits`` and ``person_seed``.
        """
        made = simulate_scan(age, sex, seed, scan=scan, site=site, preset=self.preset)
        return to_stored(made.volume, made.regions, made.mask)

    def person_seed(self, number: int) -> int:
        """The seed of person ``number`` (from 0) of this cohort; numbers from ``subjects`` on are
        people who are in no split.
        """
        return self.seed * MOST + number

    def visits(self) -> list[Visit]:
        """Every scan of the cohort, in the order of the people; a person is a function of the
        cohort's seed and the person's number.
        """
        return [visit for number in range(self.subjects) for visit in self._visits_of(number)]

    def _visits_of(self, number: int) -> list[Visit]:
        seed = self.person_seed(number)
        random = np.random.default_rng([seed, 3])  # 1 and 2 are the person's anatomy and scans
        age = round(float(random.uniform(self.youngest, self.oldest)), 2)
        sex = "F" if random.random() < self.women else "M"
        site = int(random.integers(self.sites))
        again = random.random() < self.second_sessions
        visits = []
        for scan in range(2 if again else 1):
            if self.second_sessions:
                session = f"ses-{scan + 1}"
            else:
                session = ""
            row = VolumeSubject(
                f"sub-{number + 1:04}",
                session,
                round(age + scan * self.session_years, 2),
                sex,
                f"site-{site + 1}",
            )
            visits.append(Visit(row, seed, scan, site))
        return visits

    def _part(self, visits: list[Visit]) -> VolumePart:
        return VolumePart(
            [visit.subject for visit in visits], map_in_threads(partial(_draw_visit, self), visits)
        )


def _draw_visit(phantom: Phantom, visit: Visit) -> StoredVolume:
    return phantom.draw(visit.subject.age, visit.subject.sex, visit.seed, visit.scan, visit.site)
