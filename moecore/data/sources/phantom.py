"""A simulated ageing cohort: MNI152 anatomy and published volumes of tissue by age."""

from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.data.card import SPLITS, Card
from moecore.data.layouts.volumes import BRAIN_SHARE, VolumeSplitToWrite, write_volumes
from moecore.data.phantom.anatomy import SIDE, VOXEL_MM, Preset, simulate_scanner
from moecore.data.phantom.simulated_person import LifelongTraits
from moecore.data.sources.base import Source
from moecore.data.thread_map import map_in_threads, one_blas_thread
from moecore.data.volumes import participants
from moecore.data.volumes.volume_preparation import (
    TISSUES,
    VolumeWithTissueShares,
    normalise_and_pack,
    resample_masked_volume,
    resample_volume,
)

MAX_SUBJECTS = 1_000_000  # of one cohort: keeps the seeds of cohorts apart
AGE_RANGE = (20.0, 90.0)  # years; uniform between the two
WOMEN_SHARE = 0.5  # share of the people
NUMBER_OF_SITES = 3  # scanners, each with its brightness, contrast and noise
LICENCE = "simulated from the MNI152 maps (see moecore/data/phantom/mni152/NOTICE.md)"
SOURCE = (
    "simulated; trajectories of Bethlehem et al. 2022 (doi 10.1038/s41586-022-04554-y), anatomy of "
    "MNI152 (ICBM 2009a nonlinear)"
)


class ScanWithTissueShares(NamedTuple):
    volume: np.ndarray  # float32 (D, H, W), 0 outside the mask
    regions: np.ndarray  # (3, D, H, W), shares of wm, gm, csf
    mask: np.ndarray  # bool (D, H, W), voxels of the brain and its fluid

    def resample(self, voxel_mm: float) -> "ScanWithTissueShares":
        """Resample the scan to voxels of ``voxel_mm``; voxels below VOXEL_MM add no detail."""
        zooms = (VOXEL_MM,) * 3
        volume, mask = resample_masked_volume(self.volume, self.mask, zooms, voxel_mm)
        regions = np.stack([resample_volume(share, zooms, voxel_mm) for share in self.regions])
        return ScanWithTissueShares(volume, regions, mask)


class Visit(NamedTuple):
    subject: participants.VolumeSubject
    seed: int
    site: int


def simulate_scan(
    age: float, sex: str, seed: int, scan: int = 0, site: int = 0, preset: Preset = "demo"
) -> ScanWithTissueShares:
    """Simulate a T1-weighted, skull-stripped scan of a person (``seed``, sex F or M) at an age."""
    # The same seed at another age is the same person, older; another ``scan`` or ``site`` scans the
    # same brain again. The result depends on the arguments alone.
    # With several BLAS threads, two voxels in a hundred volumes depend on the number of cores.
    with one_blas_thread():
        brain = LifelongTraits.draw(seed, preset).brain(age, sex)
        mask = brain.regions.sum(axis=0) > BRAIN_SHARE
        volume = simulate_scanner(brain.brightness, mask, seed, scan, site)
        return ScanWithTissueShares(volume, brain.regions, mask)


class Phantom(participants.CohortSettings, Source):
    """Scans of simulated people; results hold for the simulation only, not for real brains.

    Head size, tissue volumes, ventricles, lesions and scanners vary independently, given age and
    sex.
    """

    regions: ClassVar[tuple[str, ...]] = TISSUES

    kind: Literal["phantom"] = "phantom"
    subjects: int = Field(480, ge=8, lt=MAX_SUBJECTS, description="Number of simulated people")
    preset: Preset = Field("demo", description="Variation at one age: demo (small) or realistic")
    voxel_mm: Literal[3, 2] = Field(3, description="Voxel side, mm; 2: 3 mm scans resampled to 96³")

    def describe(self) -> Card:
        side = round(SIDE * VOXEL_MM / self.voxel_mm)
        name = f"Simulated ageing cohort (phantom, {self.preset})"
        card = participants.age_cohort_card(
            name, (side,) * 3, self.voxel_mm, TISSUES, (LICENCE, SOURCE), simulated=True
        )

        def count() -> dict[str, Any]:
            rows = participants.split_cohort([visit.subject for visit in self.visits()], self)
            return {"counts": {split: (len(rows[split]),) for split in SPLITS}}

        return card.fill_or_set_problem(count)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write arrays and card.json, with equal bytes for equal settings; return the card."""
        visits = self.visits()
        parts = {}
        for split, rows in participants.split_cohort(
            [visit.subject for visit in visits], self
        ).items():
            visits_of_split = [visits[row] for row in rows]
            volumes = map_in_threads(self._simulate_visit, visits_of_split)
            parts[split] = VolumeSplitToWrite([visit.subject for visit in visits_of_split], volumes)
        return write_volumes(folder, self, self.describe(), parts)

    def draw(
        self, age: float, sex: str, seed: int, scan: int = 0, site: int = 0
    ) -> VolumeWithTissueShares:
        """Simulate a scan in the form that ``write`` stores; ``seed`` is from ``person_seed``."""
        simulated = simulate_scan(age, sex, seed, scan, site, self.preset)
        return normalise_and_pack(*simulated.resample(self.voxel_mm))

    def _simulate_visit(self, visit: Visit) -> VolumeWithTissueShares:
        return self.draw(visit.subject.age, visit.subject.sex, visit.seed, site=visit.site)

    def person_seed(self, number: int) -> int:
        """Return the seed of person ``number``; numbers from ``subjects`` on are in no split."""
        return self.seed * MAX_SUBJECTS + number

    def visits(self) -> list[Visit]:
        visits = []
        for number in range(self.subjects):
            seed = self.person_seed(number)
            random = np.random.default_rng([seed, 3])  # 1 and 2: the person's anatomy and scans
            age = round(float(random.uniform(*AGE_RANGE)), 2)
            sex = "F" if random.random() < WOMEN_SHARE else "M"
            site = int(random.integers(NUMBER_OF_SITES))
            row = participants.VolumeSubject(
                f"sub-{number + 1:04}", "", age, sex, f"site-{site + 1}"
            )
            visits.append(Visit(row, seed, site))
        return visits
