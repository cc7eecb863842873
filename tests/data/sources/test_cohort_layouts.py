"""Layouts beside BIDS, by the presets of brain_age; sites and diagnoses held out; two cohorts."""

import nibabel
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt
from pydantic import TypeAdapter, ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.base import Source
from moecore.data.sources.phantom import Phantom
from moecore.data.sources.two_cohorts import TwoCohorts
from moecore.data.volumes.cohorts import VolumeSubject, split_cohort
from moecore.data.volumes.volume_preparation import load_volume
from moecore.predict.folder_predictions import find_volumes
from moecore.study.document import load_yaml_document
from tests.data.making import AFFINE, SMALL, cohort, head, participants, save
from tests.project import ROOT

PEOPLE = 8
AGES = [20 + 7 * i for i in range(PEOPLE)]
PRESETS = load_yaml_document(ROOT / "pipelines/ermoe/brain_age.yaml").data["presets"]


def source(preset, root, **changes):
    """The cohort of a preset, with the small grid of these tests."""
    settings = PRESETS[preset]["data"]["pretrain"] | SMALL | changes
    settings |= {"root": str(root), "cache": str(root.parent / "cache")}
    return TypeAdapter(Source).validate_python(settings)


def labels(preset, regions, seed):
    """A label map: each voxel has one of the numbers of its tissue."""
    numbers = PRESETS[preset]["data"]["pretrain"]["dseg"]
    random = np.random.default_rng(seed)
    drawn = [random.choice(numbers[name], regions.shape[1:]) for name in ("wm", "gm", "csf")]
    return (regions * np.stack(drawn)).sum(0).astype(np.int32)


def save_mgz(path, values):
    """As FreeSurfer writes it: axes run left, inferior, anterior."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, AFFINE * [[2], [2], [2], [1]])
    image = image.as_reoriented(axcodes2ornt("LIA"))
    nibabel.MGHImage(np.asarray(image.dataobj), image.affine).to_filename(path)


def write_freesurfer(root):
    rows = [
        {"participant_id": f"sub-{i}", "age": age, "sex": "FM"[i % 2], "site": "ab"[i % 2]}
        for i, age in enumerate(AGES)
    ]
    participants(root, rows)
    for i in range(PEOPLE):
        t1, regions = head(i)
        folder = root / f"derivatives/freesurfer/sub-{i}/mri"
        save_mgz(folder / "brain.mgz", t1)
        save_mgz(folder / "aseg.mgz", labels("freesurfer", regions, i))
    return [f"sub-{i}" for i in range(PEOPLE)], ["a", "b"]


def write_ixi(root):
    lines = ['IXI_ID,"SEX_ID (1=m, 2=f)",HEIGHT,AGE']
    lines += [f"{i + 2},{2 - i % 2},170,{age}" for i, age in enumerate(AGES)]
    for i in range(PEOPLE):
        t1, regions = head(i)
        name = f"IXI{i + 2:03}-{('Guys', 'HH')[i % 2]}-0828-T1"
        save(root / f"{name}_brain.nii.gz", t1)
        save(root / f"{name}_synthseg.nii.gz", labels("ixi", regions, i))
    (root / "IXI.csv").write_text("\n".join(lines) + "\n")
    return [f"{i + 2:03}" for i in range(PEOPLE)], ["Guys", "HH"]


def write_ukb(root):
    lines = ["eid,31-0.0,21003-2.0,54-2.0"]
    lines += [f"10000{i},{i % 2},{age},{(11025, 11027)[i % 2]}" for i, age in enumerate(AGES)]
    for i in range(PEOPLE):
        t1, regions = head(i)
        folder = root / f"10000{i}_20252_2_0/T1"
        save(folder / "T1_brain.nii.gz", t1)
        for number, region in zip((2, 1, 0), regions, strict=True):
            save(folder / f"T1_fast/T1_brain_pve_{number}.nii.gz", region)
    (root / "participants.csv").write_text("\n".join(lines) + "\n")
    return [f"10000{i}" for i in range(PEOPLE)], ["11025", "11027"]


WRITERS = {"freesurfer": write_freesurfer, "ixi": write_ixi, "ukb": write_ukb}


@pytest.mark.parametrize("preset", WRITERS)
def test_a_layout_of_others_becomes_the_same_volumes(preset, tmp_path):
    names, sites = WRITERS[preset](tmp_path / "raw")
    cohort = source(preset, tmp_path / "raw")
    card = cohort.write(tmp_path / "out")
    opened = Prepared.open(tmp_path / "out", verify=True)
    assert cohort.describe().counts == {split: (card["images"][split],) for split in SPLITS}
    met = set()
    for split in SPLITS:
        columns = opened.subjects(split), getattr(opened, split).images, opened.regions(split)
        for row, image, regions in zip(*columns, strict=True):
            i = names.index(row["participant_id"])
            t1, tissue = head(i)
            assert np.array_equal(image[0] > 0, t1 > 0)
            assert np.array_equal(regions, (255 * tissue).astype(np.uint8))
            assert (float(row["age"]), row["sex"]) == (AGES[i], "FM"[i % 2])
            assert row["site"] == sites[i % 2]
            met.add(i)
    assert met == set(range(PEOPLE))


def test_what_is_wrong_is_said_with_file_and_line(tmp_path):
    root = tmp_path / "raw"
    write_ukb(root)
    table = root / "participants.csv"
    whole = table.read_text()
    table.write_text(whole.replace("100003,1,41,", "100003,9,,") + "100001,1,50,11025\n")
    with pytest.raises(UserError) as error:
        source("ukb", root).write(tmp_path / "out")
    said = str(error.value)
    assert "participants.csv:5: 100003: age is ''; allowed: 0 to 120 years" in said
    assert "participants.csv:5: 100003: sex is '9'; allowed: F, M, n/a" in said
    assert "participants.csv: 100001 is listed 2 times" in said
    table.write_text(whole.replace("54-2.0", "54-3.0"))
    with pytest.raises(UserError, match=r"lacks the columns 54-2.0; found: eid, .*54-3.0"):
        source("ukb", root).write(tmp_path / "out")
    with pytest.raises(UserError, match=r"found a file that ends in '.xls'; allowed: .*\.csv"):
        source("ukb", root, table="UKB.xls").write(tmp_path / "out")
    with pytest.raises(ValidationError, match="found 0 groups; allowed: one"):
        source("ixi", root, site_in_name="Guys")


def test_new_volumes_may_be_mgz(tmp_path):
    save_mgz(tmp_path / "brain.mgz", head()[0])
    assert np.array_equal(load_volume(tmp_path / "brain.mgz").values, head()[0])
    assert [one.subject["participant_id"] for one in find_volumes(tmp_path)] == ["brain"]


def people(columns):
    """Twelve people; columns: the values of each, in turn."""
    return [
        {"participant_id": f"sub-{i:02}", "age": str(20 + 3 * i), "sex": "FM"[i % 2]}
        | {name: values[i % len(values)] for name, values in columns.items()}
        for i in range(12)
    ]


def prepared(source, folder, name):
    """split → what a column says of its volumes."""
    source.write(folder)
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
        held.write(tmp_path / "out")
    # sub-01 (line 3) and sub-07 (line 9) are of b and said to be of train
    assert str(error.value).splitlines() == [
        f"{tmp_path}/raw/participants.tsv:{line}: sub-{line - 2:02}: split is train, but its site "
        "b is in test_sites; allowed: test"
        for line in (3, 9)
    ]
    participants(tmp_path / "raw", people({"site": "abc", "split": ["test", "", ""]}))
    with pytest.raises(UserError, match="tsv:2: sub-00: split is test, but its site is not in"):
        held.write(tmp_path / "out")
    with pytest.raises(UserError, match="found z; allowed: sites of the cohort: a, b, c"):
        source.model_copy(update={"test_sites": ("z",)}).write(tmp_path / "out")


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
    assert both.describe().counts == {split: (len(sites[split]),) for split in SPLITS}
    assert set(sites["test"]) == {"c", "d"} and len(sites["test"]) == 12
    assert set(sites["train"] + sites["validation"]) == {"a", "b"}
    save(tmp_path / "two/sub-05/anat/sub-05_T1w.nii.gz", head(5)[0])
    with pytest.raises(UserError, match="two/participants.tsv:7: sub-05: its T1 is a copy"):
        both.write(tmp_path / "out")
    participants(tmp_path / "two", people({"site": "b"}))
    with pytest.raises(UserError, match="tsv:2: sub-00: site b is in first, too; allowed: a site"):
        both.write(tmp_path / "out")
    with pytest.raises(ValidationError, match="voxel_mm: found 6.0 of first, 3.0 of second"):
        TwoCohorts(first=first, second=second.model_copy(update={"voxel_mm": 3.0}))
