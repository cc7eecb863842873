"""Training on one cohort and testing on another: two folders without common sites."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.sources import base, bids, file_cohort, spreadsheet
from moecore.data.volumes.participants import (
    CohortSettings,
    CohortTable,
    VolumeSubject,
    split_cohort,
)

Cohort = Annotated[bids.Bids | spreadsheet.Spreadsheet, Field(discriminator="kind")]
EQUAL_SETTINGS = ("voxel_mm", "size", "regions")  # of both cohorts


class TwoCohorts(CohortSettings, base.Source):
    """Training and validation on participants of ``first``, testing on all of ``second``.

    A site or a volume of one must not be in the other. This source's split settings count; the
    settings of splits in ``first`` and ``second`` are ignored.
    """

    kind: Literal["two_cohorts"] = "two_cohorts"
    first: Cohort = Field(description="The training cohort: bids or spreadsheet")
    second: Cohort = Field(description="The test cohort, on the same grid")

    @model_validator(mode="after")
    def _check_cohorts_match(self) -> Self:
        for name in ("first", "second"):
            cohort = getattr(self, name)
            if cohort.test_sites or cohort.train_diagnoses:
                raise ValueError(
                    f"{name}: found test_sites or train_diagnoses, but the splits are two "
                    "cohorts; allowed: diagnoses, to choose participants"
                )
        for name in EQUAL_SETTINGS:
            first, second = getattr(self.first, name), getattr(self.second, name)
            if first != second:
                raise ValueError(f"{name}: found {first} and {second}; allowed: equal values")
        if self.test_sites:
            raise ValueError("test_sites: found some; allowed: none, the test is all of second")
        return self

    @property
    def _card(self) -> Card:
        first, second = self.first, self.second
        return first.uncounted_card._replace(
            name=f"{first.name}, tested on {second.name}",
            licence=f"{first.licence}; {second.licence}",
            source=f"{first.root}, {second.root}",
        )

    def describe(self) -> Card:
        def count() -> dict[str, Any]:
            train_subjects, train_table = self.first.find_subjects()
            test_subjects, test_table = self.second.find_subjects()
            rows = self._split(train_subjects, train_table, test_subjects, test_table)
            return file_cohort.count_subjects(rows, [*train_table.problems, *test_table.problems])

        return self._card.fill_or_set_problem(count)

    def write(self, folder: Path) -> dict[str, Any]:
        train_volumes, train_table = self.first.read_volumes_into_cache()
        test_volumes, test_table = self.second.read_volumes_into_cache()
        train_subjects = [volume.subject for volume in train_volumes]
        test_subjects = [volume.subject for volume in test_volumes]
        rows_of_split = self._split(train_subjects, train_table, test_subjects, test_table)
        by_digest = {volume.digest: volume for volume in train_volumes}
        for volume in test_volumes:
            if original := by_digest.get(volume.digest):
                who = volume.subject.participant_id
                raise UserError(
                    f"{test_table.places[who]}: {who}: its T1 is a copy of that of "
                    f"{original.subject.participant_id} of first; allowed: other volumes"
                )
        volumes = [*train_volumes, *test_volumes]
        parts = {split: [volumes[row] for row in rows] for split, rows in rows_of_split.items()}
        problems = [*train_table.problems, *test_table.problems]
        return file_cohort.write_cached_cohort(folder, self, self._card, problems, parts)

    def _split(
        self,
        train_subjects: Sequence[VolumeSubject],
        train_table: CohortTable,
        test_subjects: Sequence[VolumeSubject],
        test_table: CohortTable,
    ) -> dict[str, list[int]]:
        """Return split → indices in the joined list of subjects of ``first`` and ``second``."""
        train_sites = {subject.site for subject in train_subjects} - {""}
        lines = [
            f"{test_table.places[subject.participant_id]}: {subject.participant_id}: "
            f"site {subject.site} is in first, too; allowed: a site that it has not"
            for subject in test_subjects
            if subject.site in train_sites
        ]
        for table, names in ((train_table, ("train", "validation")), (test_table, ("test",))):
            lines += [
                f"{table.places[who]}: {who}: split is {split}; allowed here: {', '.join(names)}"
                for who, split in table.splits.items()
                if split not in names
            ]
        if lines:
            raise UserError("\n".join(lines))
        # Both cohorts may use the same ids.
        renamed = [
            subject._replace(participant_id=f"second: {subject.participant_id}")
            for subject in test_subjects
        ]
        splits = train_table.splits | {subject.participant_id: "test" for subject in renamed}
        settings = self.model_copy(update={"test": 0.0})
        return split_cohort([*train_subjects, *renamed], settings, splits)
