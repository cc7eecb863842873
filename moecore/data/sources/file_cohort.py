"""What cohorts of T1-weighted MRI share, whatever their layout: each subject's files, read once.

What was made of a subject's files is kept for the next ``write``.
"""

import hashlib
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
from moecore.core.files import UserError, candidate_folders, find_raw_folder, whole_file
from moecore.data.card import Card
from moecore.data.layouts.volumes import VolumeSplitToWrite, write_volumes
from moecore.data.sources.base import Source
from moecore.data.thread_map import map_in_threads
from moecore.data.volumes.cohorts import (
    CohortSettings,
    CohortTable,
    SubjectProblem,
    age_cohort_card,
    split_cohort,
)
from moecore.data.volumes.subjects import VolumeSubject, find_only_file
from moecore.data.volumes.volume_preparation import (
    REGIONS,
    Grid,
    UnusableVolume,
    VolumeWithTissueShares,
    read_subject_volumes,
)

VERSION = 2  # raise it where reading a subject gives other values than before


class VolumeCache(NamedTuple):
    """One .npz file per subject, named after the settings and path, size and time of change of the
    subject's files; those of other settings stay, the folder may be deleted at any time.
    """

    folder: Path
    settings: dict[str, Any]

    def subject_path(self, files: Mapping[str, Path]) -> Path:
        """Return where a subject is kept."""
        states = {name: (path, path.stat()) for name, path in files.items()}
        stamps = {
            name: [str(path.resolve()), state.st_size, state.st_mtime_ns]
            for name, (path, state) in states.items()
        }
        words = json.dumps([VERSION, self.settings, stamps], sort_keys=True)
        return self.folder / f"{hashlib.sha256(words.encode()).hexdigest()}.npz"


def load_cached_volume(path: Path) -> VolumeWithTissueShares:
    """Return what was kept."""
    with np.load(path, allow_pickle=False) as kept:
        return VolumeWithTissueShares(kept["image"], kept.get("regions"))


def save_cached_volume(path: Path, made: VolumeWithTissueShares) -> None:
    """Keep a subject."""
    arrays = {name: values for name, values in made._asdict().items() if values is not None}
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


PATTERN_WORDS = """a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for \
sub-01 or sub-01_ses-1, * for anything"""


class TissueMapPatterns(Config):
    """Where the probability maps of the three tissues lie."""

    wm: str = Field(
        "{folder}/anat/{prefix}*_label-WM_probseg.nii*",
        description=f"White matter: {PATTERN_WORDS}",
    )
    gm: str = Field("{folder}/anat/{prefix}*_label-GM_probseg.nii*", description="Grey matter")
    csf: str = Field("{folder}/anat/{prefix}*_label-CSF_probseg.nii*", description="Fluid")


class Dseg(Config):
    """One map with a number for each tissue."""

    pattern: str = Field(
        "{folder}/anat/{prefix}*_dseg.nii*", description=f"The label map: {PATTERN_WORDS}"
    )
    wm: tuple[int, ...] = Field((2,), min_length=1, description="Numbers of white matter")
    gm: tuple[int, ...] = Field((1,), min_length=1, description="Numbers of grey matter")
    csf: tuple[int, ...] = Field((3,), min_length=1, description="Numbers of fluid")


class CachedSubject(NamedTuple):
    """One subject, kept in the cache at ``path``, and the digest of the T1 as stored."""

    subject: VolumeSubject
    path: Path
    digest: str


class FileCohort(CohortSettings, Grid, Source):
    """One T1-weighted volume a row of a table, skull-stripped or with a brain mask, in one common
    space: NIfTI files or FreeSurfer's .mgz.

    Volumes are turned to canonical axes, resampled, cropped or padded, and normalised inside the
    brain; they are not registered.
    """

    root: str = Field(description="Folder of the cohort; derivatives may lie below it")
    t1: str = Field(description=f"The T1w volume: {PATTERN_WORDS}")
    mask: str | None = Field(
        None, description="A brain mask, as t1; null: where tissue is more than half"
    )
    maps: TissueMapPatterns | None = Field(
        None, description="Tissue as probability maps; null: none"
    )
    dseg: Dseg | None = Field(
        None, description="Tissue as one label map, in the place of maps (set maps: null)"
    )
    diagnoses: tuple[str, ...] | None = Field(
        None, min_length=1, description="Only these of the column `diagnosis`; null: all"
    )
    train_diagnoses: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Who has another diagnosis is in the test alone; null: no matter",
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="Problems stop, all of them named, or leave those subjects out"
    )
    cache: str = Field(
        ".state/volumes", description="Keeps what was read; the next run reads what changed"
    )
    name: str = Field("cohort", description="Name of the cohort in the card and the report")
    licence: str = Field("not stated", description="Licence of the data, for the card")

    @property
    def allowed_diagnoses(self) -> tuple[str, ...] | None:
        """Return ``train_diagnoses``."""
        return self.train_diagnoses

    @model_validator(mode="after")
    def _one_kind_of_map(self) -> Self:
        if self.maps and self.dseg:
            raise ValueError("maps and dseg are both set; allowed: one of them (set maps: null)")
        return self

    @abstractmethod
    def read_rows(self, root: Path) -> CohortTable:
        """Return the cohort's table; UserError where there is none."""

    def complete_subject(self, subject: VolumeSubject, t1: Path) -> VolumeSubject:
        """Return the subject with what the name of the T1 says of it; nothing, unless said."""
        return subject

    @property
    def uncounted_card(self) -> Card:
        """The card without counts and without who was left out."""
        about = (self.licence, self.root)
        return age_cohort_card(self.name, self.size, self.voxel_mm, self.regions, about)

    def describe(self) -> Card:
        """Return what ``write`` would write; tables are read and files are sought."""

        def look() -> dict[str, Any]:
            usable, table = self.find_subjects()
            rows = split_cohort(usable, self, table.splits, table.places)
            return count_subjects(rows, table.problems)

        return self.uncounted_card.complete_with(look)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout to ``folder`` and return its card.

        Raises UserError that lists every problem of the whole cohort (unless ``on_error`` is
        ``skip``), or on splits without anybody.
        """
        ready, table = self.read_volumes()
        rows = split_cohort([one.subject for one in ready], self, table.splits, table.places)
        parts = {split: [ready[place] for place in places] for split, places in rows.items()}
        return write_cohort(folder, self, self.uncounted_card, table.problems, parts)

    def read_volumes(self) -> tuple[list[CachedSubject], CohortTable]:
        """Read every subject into the cache; return those that can be used, and the table.

        Raises UserError that lists every problem, unless ``on_error`` is ``skip``: then they are
        the table's.
        """
        root = self._root()
        table = self.read_rows(root)
        problems = table.problems
        read = partial(self._read, root, self._cache())
        ready = []
        first: dict[str, VolumeSubject] = {}
        outcomes = map_in_threads(read, table.subjects)
        for subject, outcome in zip(table.subjects, outcomes, strict=True):
            if isinstance(outcome, UnusableVolume):
                problems += _list_problems(subject, outcome)
            elif (other := first.setdefault(outcome.digest, subject)) is not subject:
                # in another split it would be a leak
                one, two = (" ".join(who[:2]).strip() for who in (subject, other))
                why = f"{one}: its T1 is a copy of that of {two}"
                problems.append(SubjectProblem(*subject[:2], why))
            else:
                ready.append(outcome)
        self._refuse(root, problems)
        return ready, table

    def find_subjects(self) -> tuple[list[VolumeSubject], CohortTable]:
        """Return the subjects that have their files, and the table, as ``read_volumes`` does; no
        volume is read.
        """
        root = self._root()
        table = self.read_rows(root)
        usable = []
        for subject in table.subjects:
            try:
                files = self.find_files(root, subject)
                usable.append(self.complete_subject(subject, files["t1"]))
            except UnusableVolume as error:
                table.problems.extend(_list_problems(subject, error))
        self._refuse(root, table.problems)
        return usable, table

    def _refuse(self, root: Path, problems: list[SubjectProblem]) -> None:
        if problems and self.on_error == "stop":
            lines = "\n  ".join(" ".join(problem.reason.split()) for problem in problems)
            way = "repair them, or set `on_error: skip` to leave these subjects out"
            raise UserError(f"{len(problems)} problems in the cohort {root}; {way}:\n  {lines}")

    @property
    def regions(self) -> tuple[str, ...]:
        """Return the tissues that are stored beside the volumes."""
        return REGIONS if self.maps or self.dseg else ()

    def _read(
        self, root: Path, cache: VolumeCache, subject: VolumeSubject
    ) -> CachedSubject | UnusableVolume:
        labels = {name: getattr(self.dseg, name) for name in REGIONS} if self.dseg else None
        try:
            files = self.find_files(root, subject)
            subject = self.complete_subject(subject, files["t1"])
            path = cache.subject_path(files)
            if not path.is_file():
                save_cached_volume(path, read_subject_volumes(files, self, labels))
        except UnusableVolume as error:
            return error
        return CachedSubject(
            subject, path, sha256(load_cached_volume(path).image.tobytes()).hexdigest()
        )

    def find_files(self, root: Path, subject: VolumeSubject) -> dict[str, Path]:
        """The subject's files below ``root``: t1, and what there is of mask, wm, gm, csf, dseg.

        Raises UnusableVolume with a line for each that is missing or not the only one.
        """
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

    def _cache(self) -> VolumeCache:
        chosen = self.dseg and self.dseg.model_dump(exclude={"pattern"})
        settings = {"voxel_mm": self.voxel_mm, "size": list(self.size), "dseg": chosen}
        there = [path for path in candidate_folders(self.cache) if path.is_dir()]
        return VolumeCache(there[0] if there else Path(self.cache), settings)

    def _root(self) -> Path:
        return find_raw_folder(self.root, "the cohort's folder")


def write_cohort(
    folder: Path,
    settings: Config,
    card: Card,
    problems: Sequence[SubjectProblem],
    parts: Mapping[str, Sequence[CachedSubject]],
) -> dict[str, Any]:
    """Write the prepared layout of subjects in the cache, by split; return the card.

    settings: of the whole source; problems: who was left out.
    """
    written = {}
    for split, part in parts.items():
        # a generator: the volumes of a split are loaded one by one, when written
        volumes = (load_cached_volume(one.path) for one in part)
        written[split] = VolumeSplitToWrite([one.subject for one in part], volumes)
    skipped = {"skipped": [problem._asdict() for problem in problems]}
    return write_volumes(folder, settings, card._replace(more={**card.more, **skipped}), written)


def count_subjects(
    rows: Mapping[str, Sequence[int]], problems: Sequence[SubjectProblem]
) -> dict[str, Any]:
    """Return the counts of each split, and a note on who will be left out."""
    note = f"{len(problems)} problems; those subjects will be left out" if problems else None
    return {"counts": {split: (len(part),) for split, part in rows.items()}, "note": note}


def _list_problems(subject: VolumeSubject, error: UnusableVolume) -> list[SubjectProblem]:
    return [SubjectProblem(*subject[:2], why) for why in error.problems]
