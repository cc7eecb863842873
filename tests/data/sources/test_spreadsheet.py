"""Layouts beside BIDS, as the presets of brain_age name them: FreeSurfer, IXI, UK Biobank."""

import nibabel
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt
from pydantic import TypeAdapter, ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.base import Source
from moecore.data.volumes.volume_preparation import load_volume
from moecore.predict.ages import find_volumes
from moecore.study.document import load_yaml_document
from tests.data.making import AFFINE, SMALL, head, participants, save
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
    card = cohort.prepare(tmp_path / "out")
    opened = Prepared.open(tmp_path / "out", verify=True)
    assert cohort.preview().counts == {split: (card["images"][split],) for split in SPLITS}
    met = set()
    for split in SPLITS:
        rows = opened.subjects(split)
        for row, image, regions in zip(
            rows, getattr(opened, split).images, opened.regions(split), strict=True
        ):
            i = names.index(row["participant_id"])
            t1, tissue = head(i)
            assert np.array_equal(image[0] > 0, t1 > 0)
            assert np.array_equal(regions, (255 * tissue).astype(np.uint8))
            assert (float(row["age"]), row["sex"], row["site"]) == (
                AGES[i],
                "FM"[i % 2],
                sites[i % 2],
            )
            met.add(i)
    assert met == set(range(PEOPLE))


def test_what_is_wrong_is_said_with_file_and_line(tmp_path):
    root = tmp_path / "raw"
    write_ukb(root)
    table = root / "participants.csv"
    whole = table.read_text()
    table.write_text(whole.replace("100003,1,41,", "100003,9,,") + "100001,1,50,11025\n")
    with pytest.raises(UserError) as error:
        source("ukb", root).prepare(tmp_path / "out")
    for said in (
        "participants.csv:5: 100003: age is ''; allowed: 0 to 120 years",
        "participants.csv:5: 100003: sex is '9'; allowed: F, M, n/a",
        "participants.csv: 100001 stands there 2 times",
    ):
        assert said in str(error.value)
    table.write_text(whole.replace("54-2.0", "54-3.0"))
    with pytest.raises(UserError, match=r"lacks the columns 54-2.0; found: eid, .*54-3.0"):
        source("ukb", root).prepare(tmp_path / "out")
    with pytest.raises(UserError, match=r"found a file that ends in '.xls'; allowed: .*\.csv"):
        source("ukb", root, table="UKB.xls").prepare(tmp_path / "out")
    with pytest.raises(ValidationError, match="found 0 groups; allowed: one"):
        source("ixi", root, site_in_name="Guys")


def test_new_volumes_may_be_mgz(tmp_path):
    save_mgz(tmp_path / "brain.mgz", head()[0])
    assert np.array_equal(load_volume(tmp_path / "brain.mgz").values, head()[0])
    assert [one.subject["participant_id"] for one in find_volumes(tmp_path)] == ["brain"]
