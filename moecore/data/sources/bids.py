"""A cohort of T1-weighted MRI kept as BIDS: participants.tsv, volumes and tissue maps as NIfTI."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.roots import candidate_folders
from moecore.data.prepared import SPLITS
from moecore.data.preview import Preview
from moecore.data.volumes.bids_table import CohortTable, SubjectProblem, read_table
from moecore.data.volumes.cohort_splits import (
    CohortSplits,
    age_preview,
    list_problems,
    preview_cohort,
    split_cohort,
)
from moecore.data.volumes.grids import Grid
from moecore.data.volumes.subjects import VolumeSubject, find_only_file
from moecore.data.volumes.volume_cache import VolumeCache
from moecore.data.volumes.volume_writer import VolumeDatasetInfo, VolumePart, write_volumes
from moecore.data.volumes.volumes import REGIONS, StoredVolume, SubjectFiles, read_subject
from moecore.data.workers import map_in_threads

PATTERN_WORDS = """a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for \
sub-01 or sub-01_ses-1, * for anything"""


class Maps(Config):
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
    """One subject whose volumes are in the cache, or who has problems."""

    subject: VolumeSubject
    key: str
    problems: list[str]


class Bids(CohortSplits, Grid):
    """One T1-weighted volume a row of participants.tsv (or of sessions.tsv), skull-stripped or with
    a brain mask, in one common space.

    Volumes are turned to canonical axes, resampled, cropped or padded, and normalised inside the
    brain; they are not registered.
    """

    kind: Literal["bids"] = "bids"
    root: str = Field(description="Folder with participants.tsv; derivatives may lie below it")
    t1: str = Field(
        "{folder}/anat/{prefix}*_T1w.nii*", description=f"The T1w volume: {PATTERN_WORDS}"
    )
    mask: str | None = Field(
        None,
        description=(
            "A brain mask, as t1; null: where tissue is more than half (T1 > 0 without maps)"
        ),
    )
    maps: Maps | None = Field(Maps(), description="Tissue as probability maps; null: none")
    dseg: Dseg | None = Field(
        None, description="Tissue as one label map, in the place of maps (set maps: null)"
    )
    ages: tuple[float, float] = Field(
        (0.0, 120.0), description="Least and greatest age in years; another age is a problem"
    )
    diagnoses: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description=(
            "Only these, as the column `diagnosis` names them (the healthy, for a model of normal "
            "ageing); null: all"
        ),
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "Problems stop, all of them named, or leave those subjects out, named in the card"
        ),
    )
    cache: str = Field(
        ".state/volumes",
        description="Folder that keeps what was read, so that the next run reads only what changed",
    )
    name: str = Field("cohort", description="Name of the cohort in the card and the report")
    licence: str = Field("not stated", description="Licence of the data, for the card")
    simulated: bool = Field(
        False, description="Whether the volumes are simulated; every figure then says so"
    )

    @model_validator(mode="after")
    def _one_kind_of_map(self) -> Self:
        if self.maps and self.dseg:
            raise ValueError("maps and dseg are both set; allowed: one of them (set maps: null)")
        return self

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout to ``folder`` and return its card.

        Raises UserError that lists every problem of the whole cohort (unless ``on_error`` is
        ``skip``), or on splits without anybody.
        """
        root = self._root()
        table = read_table(root, self.ages, self.diagnoses)
        cache = self._cache()
        ready = list(map_in_threads(partial(self._read, root, cache), table.subjects))
        cache.remember()
        ready = _refuse_copies(ready)
        unread = [SubjectProblem(*row.subject[:2], why) for row in ready for why in row.problems]
        problems = table.problems + unread
        if problems and self.on_error == "stop":
            raise UserError(list_problems(root, problems))
        usable = [row for row in ready if not row.problems]
        return self._write(folder, cache, table, usable, problems)

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; tables are read and files are sought."""
        known = age_preview(self.name, self.size, self._regions())
        return known.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        root = self._root()
        table = read_table(root, self.ages, self.diagnoses)
        return preview_cohort(root, table, partial(self.files, root), self)

    def _regions(self) -> tuple[str, ...]:
        return REGIONS if self.maps or self.dseg else ()

    def _write(
        self,
        folder: Path,
        cache: VolumeCache,
        table: CohortTable,
        ready: list[CachedSubject],
        problems: list[SubjectProblem],
    ) -> dict[str, Any]:
        known = {row.subject.participant_id for row in ready}
        asked = {who: split for who, split in table.splits.items() if who in known}
        rows = split_cohort([row.subject for row in ready], self, asked)
        skipped = [problem._asdict() for problem in problems]
        regions = self._regions()
        facts = VolumeDatasetInfo(
            self.name,
            self.size,
            (self.voxel_mm,) * 3,
            self.licence,
            str(self.root),
            self,
            regions,
            self.simulated,
            skipped,
        )
        parts = {}
        for split in SPLITS:
            part = [ready[row] for row in rows[split]]
            # a generator of its own: the volumes of a split are loaded one by one, when written
            parts[split] = VolumePart([row.subject for row in part], _load_subjects(cache, part))
        return write_volumes(folder, facts, parts)

    def _read(self, root: Path, cache: VolumeCache, subject: VolumeSubject) -> CachedSubject:
        files, problems = self.files(root, subject)
        if files is None:
            return CachedSubject(subject, "", problems)
        key = cache.key(files)
        if cache.load(key) is None:
            labels = {name: getattr(self.dseg, name) for name in REGIONS} if self.dseg else None
            made, problems = read_subject(files, self, labels)
            if made is not None:
                cache.save(key, made)
        return CachedSubject(subject, key, problems)

    def files(self, root: Path, subject: VolumeSubject) -> tuple[SubjectFiles | None, list[str]]:
        """The subject's files below ``root``, or None and a line for each that is missing or not
        the only one.
        """
        patterns = {"t1": self.t1, "mask": self.mask}
        if self.maps:
            patterns |= self.maps.model_dump()
        if self.dseg:
            patterns["dseg"] = self.dseg.pattern
        paths: dict[str, Path] = {}
        problems: list[str] = []
        for name, pattern in patterns.items():
            path, why = find_only_file(root, pattern, subject) if pattern else (None, None)
            if why:
                problems.append(why)
            if path:
                paths[name] = path
        if problems:
            return None, problems
        maps = {name: paths[name] for name in REGIONS} if self.maps else None
        return SubjectFiles(paths["t1"], paths.get("mask"), maps, paths.get("dseg")), []

    def _cache(self) -> VolumeCache:
        chosen = self.dseg and self.dseg.model_dump(exclude={"pattern"})
        settings = {"voxel_mm": self.voxel_mm, "size": list(self.size), "dseg": chosen}
        there = [path for path in candidate_folders(self.cache) if path.is_dir()]
        return VolumeCache(there[0] if there else Path(self.cache), settings)

    def _root(self) -> Path:
        roots = candidate_folders(self.root)
        if folder := next((root for root in roots if root.is_dir()), None):
            return folder
        raise UserError(
            f"{' and '.join(map(str, roots))}: no such folder; set `root` to the folder with "
            "participants.tsv"
        )


def _refuse_copies(ready: list[CachedSubject]) -> list[CachedSubject]:
    """Volumes with the content of another one are problems: in another split they were a leak."""
    first: dict[str, VolumeSubject] = {}
    checked = []
    for row in ready:
        if row.problems or (other := first.setdefault(row.key, row.subject)) is row.subject:
            checked.append(row)
        else:
            one, two = (" ".join(filter(None, subject[:2])) for subject in (row.subject, other))
            why = (
                f"{one}: its volumes are copies of those of {two}; the files have the same content"
            )
            checked.append(row._replace(problems=[why]))
    return checked


def _load_subjects(cache: VolumeCache, part: list[CachedSubject]) -> Iterator[StoredVolume]:
    for row in part:
        kept = cache.load(row.key)
        if kept is None:
            raise UserError(f"{cache.folder}: lost the volumes of {row.subject[0]}; start again")
        yield kept
