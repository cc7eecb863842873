"""Training here, testing there: sites and diagnoses held out of one cohort, and two cohorts."""

import pytest
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.phantom import Phantom
from moecore.data.sources.two_cohorts import TwoCohorts
from moecore.data.volumes.cohorts import split_cohort
from moecore.data.volumes.subjects import VolumeSubject
from tests.data.making import cohort, head, participants, save


def people(columns):
    """Twelve people; columns: the values of each, in turn."""
    rows = []
    for i in range(12):
        row = {"participant_id": f"sub-{i:02}", "age": str(20 + 3 * i), "sex": "FM"[i % 2]}
        rows.append(row | {name: values[i % len(values)] for name, values in columns.items()})
    return rows


def prepared(source, folder, name):
    """split → what a column says of its volumes."""
    source.prepare(folder)
    opened = Prepared.open(folder)
    return {split: [row[name] for row in opened.subjects(split)] for split in SPLITS}


def test_sites_are_held_out_and_nobody_else_is_tested(tmp_path):
    source = cohort(tmp_path / "raw")
    participants(tmp_path / "raw", people({"site": "abc"}))
    held = source.model_copy(update={"test_sites": ("b",)})
    sites = prepared(held, tmp_path / "out", "site")
    assert sites["test"] == ["b"] * 4
    assert set(sites["train"]) | set(sites["validation"]) == {"a", "c"}
    participants(tmp_path / "raw", people({"site": "abc", "split": ["", "train"]}))
    with pytest.raises(UserError) as error:
        held.prepare(tmp_path / "out")
    # sub-01 (line 3) and sub-07 (line 9) are of b and said to be of train
    assert str(error.value).splitlines() == [
        f"{tmp_path}/raw/participants.tsv:{line}: sub-{line - 2:02}: split is train, but its site "
        "b is of test_sites; allowed: test"
        for line in (3, 9)
    ]
    participants(tmp_path / "raw", people({"site": "abc", "split": ["test", "", ""]}))
    with pytest.raises(UserError, match="tsv:2: sub-00: split is test, but its site is none of"):
        held.prepare(tmp_path / "out")
    with pytest.raises(UserError, match="found z; allowed: sites of the cohort: a, b, c"):
        source.model_copy(update={"test_sites": ("z",)}).prepare(tmp_path / "out")


def test_a_person_at_sites_of_both_sides_and_a_simulated_site():
    visits = [VolumeSubject("sub-1", f"ses-{site}", 50, "F", site) for site in "ab"]
    settings = Phantom(subjects=40, test_sites=("b",))
    with pytest.raises(UserError, match="t.tsv:2: sub-1: visits at a, b, some of which"):
        split_cohort(visits, settings, places={"sub-1": "t.tsv:2"})
    simulated = Phantom(subjects=40, test_sites=("site-3",))
    subjects = [visit.subject for visit in simulated.visits()]
    rows = split_cohort(subjects, simulated)
    assert {subjects[row].site for row in rows["test"]} == {"site-3"}
    assert "site-3" not in {subjects[row].site for row in rows["train"] + rows["validation"]}


def test_other_diagnoses_are_tested_only(tmp_path):
    source = cohort(tmp_path / "raw").model_copy(update={"train_diagnoses": ("CN",)})
    participants(tmp_path / "raw", people({"diagnosis": ["CN", "CN", "CN", "AD"]}))
    said = prepared(source, tmp_path / "out", "diagnosis")
    assert set(said["train"]) == set(said["validation"]) == {"CN"}
    assert said["test"].count("AD") == 3 and "CN" in said["test"]


def test_two_cohorts(tmp_path):
    first, second = cohort(tmp_path / "one"), cohort(tmp_path / "two")
    participants(tmp_path / "one", people({"site": "ab"}))
    participants(tmp_path / "two", people({"site": "cd"}))
    for i in range(12):  # other people, with the same ids
        save(tmp_path / f"two/sub-{i:02}/anat/sub-{i:02}_T1w.nii.gz", head(i)[0] ** 2)
    both = TwoCohorts(first=first, second=second, age_groups=1)
    sites = prepared(both, tmp_path / "out", "site")
    assert both.preview().counts == {split: (len(sites[split]),) for split in SPLITS}
    assert set(sites["test"]) == {"c", "d"} and len(sites["test"]) == 12
    assert set(sites["train"] + sites["validation"]) == {"a", "b"}
    save(tmp_path / "two/sub-05/anat/sub-05_T1w.nii.gz", head(5)[0])
    with pytest.raises(UserError, match="two/participants.tsv:7: sub-05: its T1 is a copy"):
        both.prepare(tmp_path / "out")
    participants(tmp_path / "two", people({"site": "b"}))
    with pytest.raises(UserError, match="tsv:2: sub-00: site b is in first, too; allowed: a site"):
        both.prepare(tmp_path / "out")
    with pytest.raises(ValidationError, match="voxel_mm: found 6.0 of first, 3.0 of second"):
        TwoCohorts(first=first, second=second.model_copy(update={"voxel_mm": 3.0}))
