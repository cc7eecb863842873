"""Training on one cohort and testing on another: two folders, whose sites do not meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.sources.base import Source
from moecore.data.sources.bids import Bids
from moecore.data.sources.file_cohort import count_subjects, write_cohort
from moecore.data.sources.spreadsheet import Spreadsheet
from moecore.data.volumes.cohorts import CohortSettings, CohortTable, split_cohort
from moecore.data.volumes.subjects import VolumeSubject

Cohort = Annotated[Bids | Spreadsheet, Field(discriminator="kind")]
SAME = ("voxel_mm", "size", "regions")  # of both cohorts


class TwoCohorts(CohortSettings, Source):
    """All usable participants of ``second`` are the test; those of ``first`` are trained and
    validated on. A site or a volume of one must not be in the other. Settings of splits are this
    source's; those of the two do nothing.
    """

    kind: Literal["two_cohorts"] = "two_cohorts"
    first: Cohort = Field(description="The cohort that models learn from: bids or spreadsheet")
    second: Cohort = Field(description="The cohort that they are tested on, on the same grid")

    @model_validator(mode="after")
    def _alike(self) -> Self:
        for name in ("first", "second"):
            part = getattr(self, name)
            if part.test_sites or part.train_diagnoses:
                problem = "found test_sites or train_diagnoses, but the splits are two cohorts"
                raise ValueError(f"{name}: {problem}; allowed: diagnoses, to choose participants")
        for name in SAME:
            one, two = getattr(self.first, name), getattr(self.second, name)
            if one != two:
                raise ValueError(f"{name}: found {one} of first, {two} of second; allowed: alike")
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
        """Return what ``write`` would write; tables are read and files are sought."""

        def look() -> dict[str, Any]:
            usable, table = self.first.find_subjects()
            others, other_table = self.second.find_subjects()
            rows = self._split(usable, table, others, other_table)
            return count_subjects(rows, [*table.problems, *other_table.problems])

        return self._card.complete_with(look)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout to ``folder`` and return its card.

        Raises UserError as each cohort does, and where the two meet.
        """
        ready, table = self.first.read_volumes()
        others, other_table = self.second.read_volumes()
        subjects = [one.subject for one in ready]
        rows = self._split(subjects, table, [one.subject for one in others], other_table)
        copies = {one.digest: one for one in ready}
        for one in others:
            if twin := copies.get(one.digest):
                who, place = one.subject.participant_id, other_table.places
                was = f"its T1 is a copy of that of {twin.subject.participant_id} of first"
                raise UserError(f"{place[who]}: {who}: {was}; allowed: other volumes")
        both = [*ready, *others]
        parts = {split: [both[place] for place in places] for split, places in rows.items()}
        problems = [*table.problems, *other_table.problems]
        return write_cohort(folder, self, self._card, problems, parts)

    def _split(
        self,
        subjects: Sequence[VolumeSubject],
        table: CohortTable,
        others: Sequence[VolumeSubject],
        other_table: CohortTable,
    ) -> dict[str, list[int]]:
        """Rows of both cohorts' subjects, one behind the other, in each split."""
        there = {one.site for one in subjects} - {""}
        met = [one for one in others if one.site in there]
        lines = [
            f"{other_table.places[one.participant_id]}: {one.participant_id}: site {one.site} is "
            "in first, too; allowed: a site that it has not"
            for one in met
        ]
        for one, names in ((table, ("train", "validation")), (other_table, ("test",))):
            lines += [
                f"{one.places[who]}: {who}: split is {split}; allowed here: {', '.join(names)}"
                for who, split in one.splits.items()
                if split not in names
            ]
        if lines:
            raise UserError("\n".join(lines))
        # two people of two cohorts may have one id
        tested = [one._replace(participant_id=f"second: {one.participant_id}") for one in others]
        given = table.splits | {one.participant_id: "test" for one in tested}
        return split_cohort([*subjects, *tested], self.model_copy(update={"test": 0.0}), given)
