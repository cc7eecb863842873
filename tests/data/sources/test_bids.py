import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.volumes import volume_preparation
from moecore.sources import Bids, Dseg, Phantom, Source
from tests.data.making import AFFINE, SMALL, cohort, head, participants, save, visit, write_phantom


def rows_of(root):
    lines = (root / "participants.tsv").read_text().splitlines()
    return [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]


def change(root, who, **values):
    blank = dict.fromkeys(values, "")
    rows = [(row, row["participant_id"] == who) for row in rows_of(root)]
    participants(root, [row | values if is_his else blank | row for row, is_his in rows])


@pytest.fixture
def files_read(monkeypatch):
    paths = []
    real = volume_preparation.read_subject_volumes
    spy = lambda files, *rest: paths.append(files["t1"]) or real(files, *rest)
    monkeypatch.setattr(volume_preparation, "read_subject_volumes", spy)
    return paths


def everybody(prepared):
    places = [(split, i, row) for split in SPLITS for i, row in enumerate(prepared.subjects(split))]
    return {(place[2]["participant_id"], place[2]["session_id"]): place for place in places}


def test_a_whole_cohort(tmp_path):
    card = cohort(tmp_path / "raw").write(tmp_path / "out")
    opened = Prepared.open(tmp_path / "out", verify=True)
    assert opened.task.kind == "regression"
    assert card["images"] == {"train": 7, "validation": 2, "test": 3}
    assert card["size"] == [32, 32, 32] and card["skipped"] == [] and not card["simulated"]
    assert card["regions"] == ["wm", "gm", "csf"] and card["voxel_mm"] == [6, 6, 6]
    split, place, row = everybody(opened)["sub-03", ""]
    assert tuple(row.values()) == ("sub-03", "", "29.0", "M", "a", "", "")
    data = getattr(opened, split)
    t1, regions = head(3)
    assert data.labels[place] == 29 and data.labels.dtype == np.float32
    assert data.images.dtype == np.float16
    assert np.array_equal(opened.regions(split)[place], (regions * 255).astype(np.uint8))
    assert np.array_equal(data.images[place, 0] > 0, t1 > 0) and data.images[place].max() == 1


def test_the_same_volumes_as_the_phantom(tmp_path):
    settings = {"seed": 4, "age_groups": 1}
    phantom = Phantom(subjects=10, **settings)
    phantom.write(tmp_path / "direct")
    write_phantom(tmp_path / "raw", phantom)
    bids = Bids(root=str(tmp_path / "raw"), cache=str(tmp_path / "cache"), **settings)
    bids.write(tmp_path / "files")
    direct = Prepared.open(tmp_path / "direct")
    files = Prepared.open(tmp_path / "files")
    for split in SPLITS:  # the same people in the same splits, and the same bytes
        assert direct.subjects(split) == files.subjects(split)
        assert np.array_equal(getattr(direct, split).images, getattr(files, split).images)
        assert np.array_equal(direct.regions(split), files.regions(split))


def break_everything(root):
    """One fault for each of sub-00 to sub-11; returns who → what has to be said."""
    anat = lambda who: root / who / "anat"
    (anat("sub-00") / "sub-00_T1w.nii.gz").unlink()
    path = anat("sub-01") / "sub-01_T1w.nii.gz"
    path.write_bytes(path.read_bytes()[:2000])
    other = AFFINE * [[2], [2], [2], [1]] + [[0, 0, 0, 6], [0] * 4, [0] * 4, [0] * 4]
    save(anat("sub-02") / "sub-02_label-GM_probseg.nii.gz", head(2)[1][1], other)
    t1, _ = head(3)
    save(anat("sub-03") / "sub-03_T1w.nii.gz", np.where(t1 > 0, t1, 500).astype(np.float32))
    for name in ("WM", "GM", "CSF"):
        values = head(4)[1].sum(0) * (name == "CSF")
        save(anat("sub-04") / f"sub-04_label-{name}_probseg.nii.gz", values)
    change(root, "sub-05", age="old")
    change(root, "sub-06", age="190")
    change(root, "sub-07", sex="2")
    participants(root, [*rows_of(root), rows_of(root)[8]])
    save(anat("sub-09") / "sub-09_T1w.nii.gz", np.full((32, 32, 32), np.nan, np.float32))
    save(anat("sub-10") / "sub-10_label-WM_probseg.nii.gz", np.ones((16, 32, 32), np.float32))
    save(anat("sub-11") / "sub-11_label-WM_probseg.nii.gz", head(11)[1][0] * 3)
    visit(root, "sub-99", 99)
    return {
        "sub-00": "sub-00*_T1w.nii*: no such file",
        "sub-01": "sub-01_T1w.nii.gz: cannot be read, damaged or truncated",
        "sub-02": "GM_probseg.nii.gz: has another affine than the T1: a corner lies 6.0 mm apart",
        "sub-03": "sub-03_T1w.nii.gz: not skull-stripped",
        "sub-04": "tissue fractions are impossible: wm 0.00, gm 0.00, csf 1.00",
        "sub-05": "participants.tsv: sub-05: age is 'old'; allowed: 0 to 120",
        "sub-06": "participants.tsv: sub-06: age is '190'; allowed: 0 to 120",
        "sub-07": "participants.tsv: sub-07: sex is '2'; allowed: F, M",
        "sub-08": "participants.tsv: sub-08 is listed 2 times",
        "sub-09": "32768 voxels are no numbers",
        "sub-10": "has the shape (16, 32, 32), the T1 (32, 32, 32)",
        "sub-11": "sub-11_label-WM_probseg.nii.gz: tissue shares run from 0.00 to 3.00",
        "sub-99": "sub-99: a folder without a row in participants.tsv",
    }


def test_every_problem_is_listed_at_once_or_left_out_and_written_down(tmp_path):
    source = cohort(tmp_path / "raw", people=24)
    said = break_everything(tmp_path / "raw")
    with pytest.raises(UserError) as error:
        source.write(tmp_path / "out")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("13 problems in the cohort") and "on_error: skip" in lines[0]
    assert len(lines) == 14
    for who, text in said.items():
        assert sum(text in line and who in line for line in lines) == 1, (who, text, lines)
    assert not (tmp_path / "out").exists()
    card = source.model_copy(update={"on_error": "skip"}).write(tmp_path / "out")
    kept = {who for who, _ in everybody(Prepared.open(tmp_path / "out", verify=True))}
    assert kept == {f"sub-{i:02}" for i in range(12, 24)}
    assert {row["participant_id"] for row in card["skipped"]} == set(said)
    assert all(said[row["participant_id"]] in row["reason"] for row in card["skipped"])
    assert {row["session_id"] for row in card["skipped"]} == {""}


def test_copies_are_seen(tmp_path):
    source = cohort(tmp_path / "raw")
    for path in sorted((tmp_path / "raw/sub-02/anat").iterdir()):
        shutil.copyfile(path, tmp_path / "raw/sub-09/anat" / path.name.replace("sub-02", "sub-09"))
    with pytest.raises(UserError, match="sub-09: its T1 is a copy of that of sub-02"):
        source.write(tmp_path / "out")


def test_a_file_that_fits_twice_and_a_map_without_orientation(tmp_path):
    source = cohort(tmp_path / "raw")
    folder = tmp_path / "raw/sub-04/anat"
    shutil.copyfile(folder / "sub-04_T1w.nii.gz", folder / "sub-04_run-2_T1w.nii.gz")
    image = nibabel.load(tmp_path / "raw/sub-05/anat/sub-05_T1w.nii.gz")
    blind = nibabel.Nifti1Image(image.get_fdata(dtype=np.float32), None)
    blind.header["sform_code"] = blind.header["qform_code"] = 0
    blind.to_filename(tmp_path / "raw/sub-05/anat/sub-05_T1w.nii.gz")
    with pytest.raises(UserError) as error:
        source.write(tmp_path / "out")
    assert "sub-04*_T1w.nii*: found 2 files (sub-04_" in str(error.value)
    assert "sub-05_T1w.nii.gz: says no orientation" in str(error.value)
    assert str(error.value).startswith("2 problems")


def test_sessions_stay_together_and_have_their_own_ages(tmp_path):
    root = tmp_path / "raw"
    names = [f"sub-{i:02}" for i in range(9)]
    rows = [{"participant_id": who, "age": "n/a", "sex": "n/a"} for who in names]
    participants(root, [rows[0] | {"age": "33"}, *rows[1:]])
    for i, who in enumerate(names):
        for s in (1, 2):
            visit(root, who, 10 * i + s, f"ses-{s}")
        ages = ["session_id\tage", *(f"ses-{s}\t{30 + 5 * i + s}" for s in (1, 2))]
        lines = ages if i else ["session_id", "ses-1", "ses-2"]
        (root / who / f"{who}_sessions.tsv").write_text("\n".join(lines) + "\n")
    card = Bids(root=str(root), cache=str(tmp_path / "cache"), **SMALL).write(tmp_path / "out")
    found = everybody(Prepared.open(tmp_path / "out"))
    assert len(found) == 18 and found["sub-03", "ses-2"][2]["age"] == "47.0"
    assert found["sub-00", "ses-1"][2]["age"] == "33.0"
    assert all(found[who, "ses-1"][0] == found[who, "ses-2"][0] for who in names)
    assert card["counts"]["train"] == {"F": 0, "M": 0, "unknown": card["images"]["train"]}


def test_a_given_split_is_honoured(tmp_path):
    source = cohort(tmp_path / "raw")
    change(tmp_path / "raw", "sub-03", split="validation")
    change(tmp_path / "raw", "sub-11", split="test")
    for seed in range(3):
        source.model_copy(update={"seed": seed}).write(tmp_path / "out")
        found = everybody(Prepared.open(tmp_path / "out"))
        assert found["sub-03", ""][0] == "validation" and found["sub-11", ""][0] == "test"
    change(tmp_path / "raw", "sub-03", split="valid")
    with pytest.raises(UserError, match="sub-03: split is valid; allowed: one of train, valid"):
        source.write(tmp_path / "out")


def test_diagnoses_are_kept_and_choose_the_participants(tmp_path):
    source = cohort(tmp_path / "raw")
    for number in range(12):
        change(tmp_path / "raw", f"sub-{number:02}", diagnosis="AD" if number % 4 == 0 else "CN")
    change(tmp_path / "raw", "sub-04", age="n/a")  # wrong, but passed over with his diagnosis
    source.model_copy(update={"diagnoses": ("CN",)}).write(tmp_path / "out")
    found = everybody(Prepared.open(tmp_path / "out"))
    assert {who for who, _ in found} == {f"sub-{number:02}" for number in range(12) if number % 4}
    assert {row["diagnosis"] for _, _, row in found.values()} == {"CN"}
    with pytest.raises(UserError, match=r"one of MCI, LMCI .*found: AD \(3\), CN \(9\)"):
        source.model_copy(update={"diagnoses": ("MCI", "LMCI")}).write(tmp_path / "out")


def test_what_is_in_the_cache_is_not_read_again(tmp_path, files_read):
    source = cohort(tmp_path / "raw")
    first = source.write(tmp_path / "a")
    files_read.clear()
    assert source.write(tmp_path / "b")["files"] == first["files"] and not files_read
    # one file changes: one subject is read
    path = tmp_path / "raw/sub-04/anat/sub-04_T1w.nii.gz"
    save(path, (head(4)[0] ** 2).astype(np.float32))
    changed = source.write(tmp_path / "c")
    assert files_read == [path] and changed["files"] != first["files"]
    files_read.clear()
    source.model_copy(update={"voxel_mm": 7.0}).write(tmp_path / "d")  # another grid: all
    assert len(files_read) == 12
    source.model_copy(update={"seed": 5}).write(tmp_path / "e")  # other splits: none
    assert len(files_read) == 12


def test_label_map_mask_and_derivatives(tmp_path):
    source = cohort(tmp_path / "raw")
    source.write(tmp_path / "maps")
    for i in range(12):
        t1, regions = head(i)
        who = f"sub-{i:02}"
        folder = tmp_path / f"raw/derivatives/seg/{who}/anat"
        labels = (regions * np.array([7, 8, 9])[:, None, None, None]).sum(0).astype(np.int16)
        save(folder / f"{who}_dseg.nii.gz", labels)
        save(folder / f"{who}_desc-brain_mask.nii.gz", (t1 > 0).astype(np.uint8))
        with_skull = np.where(t1 > 0, t1, 400).astype(np.float32)
        save(tmp_path / f"raw/{who}/anat/{who}_T1w.nii.gz", with_skull)
    below = "derivatives/seg/{folder}/anat/{prefix}"
    dseg = Dseg(pattern=f"{below}*_dseg.nii*", wm=(7,), gm=(8,), csf=(9,))
    changes = {"maps": None, "dseg": dseg, "mask": f"{below}_desc-brain_mask.nii*"}
    other = source.model_copy(update=changes)
    other.write(tmp_path / "labels")
    one = Prepared.open(tmp_path / "maps")
    two = Prepared.open(tmp_path / "labels")
    assert np.array_equal(one.train.images, two.train.images)
    assert np.array_equal(one.regions("test"), two.regions("test"))
    with pytest.raises(UserError, match="12 problems.*"):
        other.model_copy(update={"mask": None}).write(tmp_path / "skull")
    assert other.model_copy(update={"dseg": None}).write(tmp_path / "none")["regions"] == []
    assert np.array_equal(Prepared.open(tmp_path / "none").train.images, one.train.images)
    with pytest.raises(UserError, match="no tissue maps"):
        Prepared.open(tmp_path / "none").regions("test")


def test_settings_that_contradict(tmp_path):
    read = TypeAdapter(Source).validate_python
    with pytest.raises(ValidationError, match="one of them"):
        read({"kind": "bids", "root": "x", "maps": {}, "dseg": {}})
    with pytest.raises(UserError, match="nowhere: no such folder"):
        Bids(root=str(tmp_path / "nowhere")).write(tmp_path / "out")
    with pytest.raises(UserError, match=r"participants\.tsv: no such file"):
        Bids(root=str(tmp_path)).write(tmp_path / "out")
    (tmp_path / "participants.tsv").write_text("participant_id,age,sex\nsub-01,30,F\n")
    with pytest.raises(UserError, match="lacks the columns participant_id, age, sex; found: part"):
        Bids(root=str(tmp_path)).write(tmp_path / "out")


ODD = ["../../evil", "/etc/passwd", "sub-*", "x" * 300, "=cmd()", "{folder}"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("column", ["participant_id", "session_id"])
def test_an_id_is_no_path_and_no_pattern(tmp_path, monkeypatch, files_read, column, name):
    source = cohort(tmp_path / "raw")
    visit(tmp_path.parent, "evil", 50)
    change(tmp_path / "raw", "sub-01", **{column: name})
    asked = []
    exists = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(str(path)) or exists(path))
    with pytest.raises(UserError, match=rf"{column} is .*; allowed: up to 100 letters") as error:
        source.write(tmp_path / "out")
    lines = str(error.value).splitlines()
    assert len(lines) == 1 + int(lines[0].split()[0]) == 2 + (column == "participant_id")
    assert not any("evil" in path or "passwd" in path or ".." in path for path in asked)
    assert all(path.is_relative_to(tmp_path / "raw") for path in files_read)


def test_links_and_tables_that_are_none(tmp_path):
    source = cohort(tmp_path / "raw")
    volume = tmp_path / "raw/sub-01/anat/sub-01_T1w.nii.gz"
    volume.rename(tmp_path / "elsewhere.nii.gz")
    volume.symlink_to(tmp_path / "elsewhere.nii.gz")
    with pytest.raises(UserError, match="found 'sub-01/anat/sub-01_T1w.nii.gz', which leads out"):
        source.write(tmp_path / "out")
    table = tmp_path / "raw/participants.tsv"
    whole = table.read_bytes()
    for content in (whole.replace(b"sub-01", b"sub-\xff"), whole + b"one\ttoo\tmany" * 9, b""):
        table.write_bytes(content)
        with pytest.raises(UserError, match="participants.tsv: no table of values between tabs: "):
            source.write(tmp_path / "out")
    table.unlink()
    (tmp_path / "people.tsv").write_bytes(whole)
    table.symlink_to(tmp_path / "people.tsv")
    with pytest.raises(UserError, match="found 'participants.tsv', which leads out"):
        source.write(tmp_path / "out")
