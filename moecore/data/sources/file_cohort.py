"""The base class of cohorts of T1-weighted MRI files, which are read once and cached."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError, atomic_file, candidate_raw_folders, find_raw_folder
from moecore.data.card import Card
from moecore.data.layouts.volumes import VolumeSplitToWrite, write_volumes
from moecore.data.sources.base import Source
from moecore.data.thread_map import map_in_threads
from moecore.data.volumes import participants, volume_preparation
from moecore.data.volumes.participants import (
    CohortTable,
    SubjectProblem,
    VolumeSubject,
    find_only_file,
)
from moecore.data.volumes.volume_preparation import TISSUES, UnusableVolume, VolumeWithTissueShares

CACHE_VERSION = 2  # of the cache; raise it when reading a subject gives different values
PATTERN_HELP = """a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for \
sub-01 or sub-01_ses-1, * for anything"""


# Entries of other settings stay; the folder may be deleted at any time.
class VolumeCache(NamedTuple):
    """A folder of prepared volumes: one .npz per subject, named by a hash of settings and files."""

    folder: Path
    settings: dict[str, Any]

    def subject_path(self, files: Mapping[str, Path]) -> Path:
        """Return the path of the .npz file for a subject's ``files``, which may not exist yet."""
        stamps = {
            name: [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
            for name, path in files.items()
        }
        key = json.dumps([CACHE_VERSION, self.settings, stamps], sort_keys=True)
        return self.folder / f"{sha256(key.encode()).hexdigest()}.npz"


def read_cached_volume(path: Path) -> VolumeWithTissueShares:
    with np.load(path, allow_pickle=False) as stored:
        return VolumeWithTissueShares(stored["image"], stored.get("regions"))


def save_cached_volume(path: Path, volume: VolumeWithTissueShares) -> None:
    arrays = {name: values for name, values in volume._asdict().items() if values is not None}
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


class TissueMapPatterns(Config):
    """File name patterns of the probability maps of the three tissues."""

    wm: str = Field(
        "{folder}/anat/{prefix}*_label-WM_probseg.nii*", description=f"White matter: {PATTERN_HELP}"
    )
    gm: str = Field("{folder}/anat/{prefix}*_label-GM_probseg.nii*", description="Grey matter")
    csf: str = Field("{folder}/anat/{prefix}*_label-CSF_probseg.nii*", description="Fluid")


class Dseg(Config):
    """File name pattern of a label map (BIDS: dseg), and its numbers for each tissue."""

    pattern: str = Field("{folder}/anat/{prefix}*_dseg.nii*", description=f"Map: {PATTERN_HELP}")
    wm: tuple[int, ...] = Field((2,), min_length=1, description="Numbers of white matter")
    gm: tuple[int, ...] = Field((1,), min_length=1, description="Numbers of grey matter")
    csf: tuple[int, ...] = Field((3,), min_length=1, description="Numbers of fluid")


class CachedSubject(NamedTuple):
    subject: VolumeSubject
    path: Path  # of its cache entry
    digest: str  # of the stored T1


class FileCohort(participants.CohortSettings, volume_preparation.VoxelGrid, Source):
    """Base class of cohorts with one T1-weighted volume (NIfTI or .mgz) per row of a table."""

    root: str = Field(description="Folder of the cohort; derivatives may lie below it")
    t1: str = Field(description=f"The T1w volume: {PATTERN_HELP}")
    mask: str | None = Field(None, description="Brain mask, as t1; null: voxels over half tissue")
    maps: TissueMapPatterns | None = Field(None, description="Tissue probability maps; null: none")
    dseg: Dseg | None = Field(None, description="Tissue as one label map; needs maps: null")
    diagnoses: tuple[str, ...] | None = Field(
        None, min_length=1, description="Only these of the column `diagnosis`; null: all"
    )
    train_diagnoses: tuple[str, ...] | None = Field(
        None, min_length=1, description="Participants with others are only in test; null: no rule"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="On problems: stop and list all of them, or skip those subjects"
    )
    cache: str = Field(".state/volumes", description="Folder: prepared volumes of unchanged files")
    name: str = Field("cohort", description="Name of the cohort in the card and the report")
    licence: str = Field("not stated", description="Licence of the data, for the card")

    @property
    def allowed_diagnoses(self) -> tuple[str, ...] | None:
        return self.train_diagnoses

    @model_validator(mode="after")
    def _check_one_kind_of_map(self) -> Self:
        if self.maps and self.dseg:
            raise ValueError("maps and dseg are both set; allowed: one of them (set maps: null)")
        return self

    @abstractmethod
    def read_rows(self, root: Path) -> CohortTable:
        """Read the cohort's table: usable rows, splits and problems; UserError if it is missing."""

    def complete_subject(self, subject: VolumeSubject, t1: Path) -> VolumeSubject:
        """Return the subject with fields read from the T1's file name; by default unchanged."""
        return subject

    @property
    def uncounted_card(self) -> Card:
        """The data's card before subjects are counted: ``counts`` and ``skipped`` are empty."""
        about = (self.licence, self.root)
        return participants.age_cohort_card(
            self.name, self.size, self.voxel_mm, self.regions, about
        )

    def describe(self) -> Card:
        def count() -> dict[str, Any]:
            usable, table = self.find_subjects()
            rows = participants.split_cohort(usable, self, table.splits, table.places)
            return count_subjects(rows, table.problems)

        return self.uncounted_card.fill_or_set_problem(count)

    def write(self, folder: Path) -> dict[str, Any]:
        cached, table = self.read_volumes_into_cache()
        subjects = [entry.subject for entry in cached]
        rows_of_split = participants.split_cohort(subjects, self, table.splits, table.places)
        parts = {split: [cached[row] for row in rows] for split, rows in rows_of_split.items()}
        return write_cached_cohort(folder, self, self.uncounted_card, table.problems, parts)

    def read_volumes_into_cache(self) -> tuple[list[CachedSubject], CohortTable]:
        """Read all volumes into the cache; return usable subjects, and the table with problems."""
        root = self._root()
        table = self.read_rows(root)
        problems = table.problems
        labels = self.dseg and self.dseg.model_dump(exclude={"pattern"})
        settings = {"voxel_mm": self.voxel_mm, "size": list(self.size), "dseg": labels}
        folders = (path for path in candidate_raw_folders(self.cache) if path.is_dir())
        cache = VolumeCache(next(folders, Path(self.cache)), settings)
        read_subject = partial(self._read_subject_into_cache, root, cache)
        usable = []
        first: dict[str, VolumeSubject] = {}
        outcomes = map_in_threads(read_subject, table.subjects)
        for subject, outcome in zip(table.subjects, outcomes, strict=True):
            if isinstance(outcome, UnusableVolume):
                problems += _convert_to_problems(subject, outcome)
            elif (other := first.setdefault(outcome.digest, subject)) is not subject:
                # A copy in another split would leak.
                copy, original = (" ".join(who[:2]).strip() for who in (subject, other))
                reason = f"{copy}: its T1 is a copy of that of {original}"
                problems.append(SubjectProblem(*subject[:2], reason))
            else:
                usable.append(outcome)
        self._refuse_problems(root, problems)
        return usable, table

    def find_subjects(self) -> tuple[list[VolumeSubject], CohortTable]:
        """Return subjects whose files exist, and the table with problems; volumes are not read."""
        root = self._root()
        table = self.read_rows(root)
        usable = []
        for subject in table.subjects:
            try:
                usable.append(self.complete_subject(subject, self.find_files(root, subject)["t1"]))
            except UnusableVolume as error:
                table.problems.extend(_convert_to_problems(subject, error))
        self._refuse_problems(root, table.problems)
        return usable, table

    def _refuse_problems(self, root: Path, problems: list[SubjectProblem]) -> None:
        if problems and self.on_error == "stop":
            lines = "\n  ".join(" ".join(problem.reason.split()) for problem in problems)
            raise UserError(
                f"{len(problems)} problems in the cohort {root}; repair them, or set "
                f"`on_error: skip` to leave these subjects out:\n  {lines}"
            )

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the tissues whose maps are stored with the volumes; () without maps."""
        return TISSUES if self.maps or self.dseg else ()

    def _read_subject_into_cache(
        self, root: Path, cache: VolumeCache, subject: VolumeSubject
    ) -> CachedSubject | UnusableVolume:
        labels = {name: getattr(self.dseg, name) for name in TISSUES} if self.dseg else None
        try:
            files = self.find_files(root, subject)
            subject = self.complete_subject(subject, files["t1"])
            path = cache.subject_path(files)
            if not path.is_file():
                volume = volume_preparation.read_subject_volumes(files, self, labels)
                save_cached_volume(path, volume)
        except UnusableVolume as error:
            return error
        digest = sha256(read_cached_volume(path).image.tobytes()).hexdigest()
        return CachedSubject(subject, path, digest)

    def find_files(self, root: Path, subject: VolumeSubject) -> dict[str, Path]:
        """Return kind (t1, mask, wm, …) → file; UnusableVolume lists all missing files."""
        patterns = {"t1": self.t1}
        if self.mask:
            patterns["mask"] = self.mask
        if self.maps:
            patterns |= self.maps.model_dump()
        if self.dseg:
            patterns["dseg"] = self.dseg.pattern
        paths = {}
        problems = []
        for name, pattern in patterns.items():
            try:
                paths[name] = find_only_file(root, pattern, subject)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UnusableVolume(*problems)
        return paths

    def _root(self) -> Path:
        return find_raw_folder(self.root, "the cohort's folder")


def write_cached_cohort(
    folder: Path,
    settings: Config,
    card: Card,
    problems: Sequence[SubjectProblem],
    parts: Mapping[str, Sequence[CachedSubject]],
) -> dict[str, Any]:
    """Write arrays, tables and card.json, which lists ``problems`` of skipped subjects."""
    splits = {}
    for split, part in parts.items():
        # A generator: volumes are loaded one by one, when written.
        volumes = (read_cached_volume(entry.path) for entry in part)
        splits[split] = VolumeSplitToWrite([entry.subject for entry in part], volumes)
    skipped = {"skipped": [problem._asdict() for problem in problems]}
    return write_volumes(folder, settings, card._replace(more={**card.more, **skipped}), splits)


def count_subjects(
    rows: Mapping[str, Sequence[int]], problems: Sequence[SubjectProblem]
) -> dict[str, Any]:
    """Return the card's ``counts`` of volumes per split, and a ``note`` if subjects are skipped."""
    note = f"{len(problems)} problems; those subjects will be left out" if problems else None
    return {"counts": {split: (len(part),) for split, part in rows.items()}, "note": note}


def _convert_to_problems(subject: VolumeSubject, error: UnusableVolume) -> list[SubjectProblem]:
    return [SubjectProblem(*subject[:2], why) for why in error.problems]
