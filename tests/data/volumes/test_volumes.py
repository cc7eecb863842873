import gzip
import os
import struct
import sys
import tracemalloc
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore import Prepared, UserError
from moecore.data import prepared
from moecore.data.layouts.volumes import VolumeSplitToWrite, flag_unusual_volume, write_volumes
from moecore.data.loader import few_shot_indices, load_split_where_it_fits
from moecore.data.sources.file_cohort import VolumeCache, read_cached_volume, save_cached_volume
from moecore.data.volumes import participants, volume_preparation
from moecore.data.volumes.participants import CohortSettings, VolumeSubject, split_cohort
from moecore.report.figures.overview import draw_dataset_samples, middle_slices
from moecore.tasks.regression import Regression
from tests.data.making import head, save

GRID = volume_preparation.VoxelGrid(voxel_mm=6, size=(32, 32, 32))
RAS = np.diag([6.0, 6, 6, 1])


class Made(CohortSettings):
    kind: str = "made"


def test_any_orientation_gives_the_same_volume(tmp_path):
    t1 = head()[0]
    t1[20:24, 8:12, 25:27] += 3000  # a mark: right, back, top
    save(tmp_path / "ras.nii.gz", t1, RAS)
    las = RAS @ [[-1, 0, 0, 31], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    save(tmp_path / "las.nii.gz", t1[::-1].copy(), las)
    ras_image = nibabel.Nifti1Image(t1, RAS)
    psr = ras_image.as_reoriented(nibabel.io_orientation(np.diag([-6.0, 6, 6, 1])[[1, 2, 0, 3]]))
    psr.to_filename(tmp_path / "other.nii")
    assert psr.shape == (32, 32, 32) and nibabel.aff2axcodes(psr.affine) != ("R", "A", "S")
    expected = volume_preparation.read_volume(tmp_path / "ras.nii.gz", GRID)
    assert expected[0, 22, 10, 26] > 0.6 > expected[0, 9, 21, 5]
    for name in ("las.nii.gz", "other.nii"):
        assert np.array_equal(volume_preparation.read_volume(tmp_path / name, GRID), expected), name


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(UserError, match=r"^nibabel is not .*: pip install 'moecore\[brain\]'$"):
        volume_preparation.load_volume(tmp_path / "one.nii")


@pytest.mark.parametrize(
    ("values", "size", "said"),
    [
        (None, 32, "v.nii: no such file"),
        (np.ones((32, 32, 32), np.float32), 32, "not skull-stripped: 100% of its voxels"),
        (np.ones((4, 4, 4, 2)), 32, r"shape \(4, 4, 4, 2\); allowed: one 3-D volume"),
        ((head()[0] > 0).astype(np.float32), 32, "all intensities inside the brain are 1"),
        (head()[0], 16, "of the brain lies outside 16×16×16 voxels"),
    ],
)
def test_read_volume_says_what_is_wrong(tmp_path, values, size, said):
    if values is not None:
        save(tmp_path / "v.nii", values)
    with pytest.raises(UserError, match=said):
        volume_preparation.read_volume(
            tmp_path / "v.nii", volume_preparation.VoxelGrid(voxel_mm=6, size=(size,) * 3)
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("one.nii.gz", nibabel.Nifti1Image), ("two.nii", nibabel.Nifti2Image)),
        *(("pair.img", nibabel.Nifti1Pair), ("surfer.mgz", nibabel.MGHImage)),
    ],
)
def test_every_kind_of_file_is_read_as_nibabel_reads_it(tmp_path, name, kind):
    image = kind(head()[0].astype(np.int16), RAS)
    if kind is not nibabel.MGHImage:
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"c" * 1000))
        image.header.set_slope_inter(0.5, 3)
    image.to_filename(tmp_path / name)
    loaded = nibabel.load(tmp_path / name)
    volume = volume_preparation.load_volume(tmp_path / name)
    assert np.array_equal(volume.values, np.asarray(loaded.dataobj, np.float32))
    assert np.array_equal(volume.affine, loaded.affine) and volume.zooms == (6, 6, 6)


def write_nifti_gzip(path: Path, offset: float, length: int, zeros: int) -> None:
    """Write a volume whose extension says ``length`` bytes, with as many MiB of zeros after it."""
    header = nibabel.Nifti1Image(np.ones((8, 8, 8), np.int16), RAS).header
    header["vox_offset"] = offset
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.binaryblock)
        file.write(struct.pack("<4sii", b"\1\0\0\0", length, 6))
        for _ in range(zeros):
            file.write(bytes(2**20))


@pytest.mark.parametrize(
    ("offset", "length", "said"),
    [
        (2**31, 2**31 - 352, "its values begin at byte 2,147,483,648; allowed: up to 67,108,864"),
        *((1e15, 16, "its values begin at byte"), (-16, 16, "vox offset -16 too low")),
        *((368, 40 * 2**20, None), (368, -16, None), (32 * 2**20, 32 * 2**20 - 352, None)),
    ],
)
def test_an_extension_takes_no_memory(tmp_path, offset, length, said):
    """40 MiB of zeros, for the 2 GB that fit into as small a gzip."""
    path = tmp_path / "bomb.nii.gz"
    write_nifti_gzip(path, offset, length, 40)
    tracemalloc.start()
    try:
        if said is None:
            assert volume_preparation.load_volume(path).values.shape == (8, 8, 8)
        else:
            with pytest.raises(UserError, match=said):
                volume_preparation.load_volume(path)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("start", "numbers", "said"),
    [
        (4, (2**31 - 1, 2**31 - 1, 1, 1), "allowed: up to 134,217,728 voxels"),
        (4, (0, 8, 8, 1), "cannot be read, damaged"),
        (20, (77,), "cannot be read, damaged"),  # no kind of values has this number
        (0, (), "cannot be read, damaged"),
    ],
)
def test_a_damaged_header_of_mgz_is_said(tmp_path, start, numbers, said):
    nibabel.MGHImage(np.ones((8, 8, 8), np.int16), RAS).to_filename(tmp_path / "one.mgz")
    content = bytearray(gzip.decompress((tmp_path / "one.mgz").read_bytes()))
    content[start : start + 4 * len(numbers)] = struct.pack(f">{len(numbers)}i", *numbers)
    if not numbers:
        content = content[:100]
    (tmp_path / "one.mgz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=f"one.mgz: .*{said}"):
        volume_preparation.load_volume(tmp_path / "one.mgz")


@pytest.mark.parametrize(
    ("old", "new"), [((1.0, 1.0, 1.0), 3.0), ((1.0, 2.0, 1.5), 2.0), ((3.0, 3.0, 3.0), 1.5)]
)
def test_resampling_keeps_a_shape(old, new):
    # a ball with a radius of 24 mm, 4 mm off the centre along the first axis: 57.9 mL
    sides = [int(90 / side) for side in old]
    axes = [(np.arange(n) - (n - 1) / 2) * side for n, side in zip(sides, old, strict=True)]
    points = np.meshgrid(*axes, indexing="ij")
    ball = (np.hypot(np.hypot(points[0] - 4, points[1]), points[2]) < 24).astype(np.float32)
    found = volume_preparation.resample_volume(ball, old, new)
    assert found.sum() * new**3 == pytest.approx(4 / 3 * np.pi * 24**3, rel=0.03)
    assert 0 <= found.min() and found.max() <= 1.001
    middle = (np.indices(found.shape) * found).sum(axis=(1, 2, 3)) / found.sum()
    assert np.allclose((middle - (np.array(found.shape) - 1) / 2) * new, [4, 0, 0], atol=0.3)


def test_the_background_does_not_darken_the_rim():
    t1 = np.full((30, 30, 30), 7, np.float32)
    mask = np.zeros((30, 30, 30), bool)
    mask[6:24, 6:24, 6:24] = True
    values, inside = volume_preparation.resample_masked_volume(t1, mask, (1.0, 1.0, 1.0), 2.0)
    assert inside.sum() * 8 == pytest.approx(18**3, rel=0.15)
    assert np.allclose(values[inside], 7, rtol=1e-5) and (values[~inside] == 0).all()


@given(st.tuples(*[st.integers(0, 25)] * 3), st.tuples(*[st.integers(1, 16)] * 3))
@settings(max_examples=40, deadline=None)
def test_the_brain_is_in_the_middle_of_the_window(low, sides):
    mask = np.zeros((42, 41, 43), bool)
    mask[tuple(slice(a, a + n) for a, n in zip(low, sides, strict=True))] = True
    start = volume_preparation.unclipped_window_start(mask, (16, 32, 48))
    found = volume_preparation.cut_window(mask, start, (16, 32, 48))
    assert found.shape == (16, 32, 48) and found.sum() == mask.sum()  # nothing lost
    for axis, length in enumerate(found.shape):
        where = np.flatnonzero(found.any(axis=tuple({0, 1, 2} - {axis})))
        assert abs(where[0] - (length - 1 - where[-1])) <= 1


def test_normalising_by_hand():
    # 101 values 0..100 inside: the 1st and 99th percentile are 1 and 99; 50 is in the middle:
    # 0.01 + 0.99/2
    volume = np.arange(125, dtype=np.float32).reshape(5, 5, 5)
    found = volume_preparation.normalise_intensities(volume, volume <= 100).ravel()
    assert found[[0, 1, 50, 99, 100, 101]] == pytest.approx([0.01, 0.01, 0.505, 1, 1, 0])
    with pytest.raises(ValueError, match="are 0"):
        volume_preparation.normalise_intensities(volume * 0, volume > 0)


def test_flags():
    t1, regions = head()
    scan = volume_preparation.normalise_intensities(t1, t1 > 0)[None]
    shares = (regions * 255).astype(np.uint8)
    assert flag_unusual_volume(scan, shares) == [] == flag_unusual_volume(scan, None)
    assert "not T1-weighted" in flag_unusual_volume(np.where(scan > 0, 1.01 - scan, 0), shares)[0]
    (flag, *_) = flag_unusual_volume(scan, shares[[0, 2, 1]])
    assert flag.startswith("tissue fractions unusual (gm 0.1")
    (flag, *_) = flag_unusual_volume(np.where(scan > 0, 0.1 * scan, 0), None)
    assert flag.startswith("mean intensity unusual")


def subjects(number, seed=0, sessions=1):
    random = np.random.default_rng(seed)
    rows = []
    for i in range(number):
        age, sex = float(random.uniform(20, 90)), str(random.choice(["F", "M"]))
        rows += [VolumeSubject(f"sub-{i}", f"ses-{s}", age + s, sex) for s in range(sessions)]
    return rows


@given(st.integers(40, 200), st.integers(0, 50), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_splits_are_by_participant_and_stratified(number, seed, sessions):
    people = subjects(number, seed, sessions)
    splits = split_cohort(people, CohortSettings(seed=seed, age_groups=4))
    assert sorted(row for rows in splits.values() for row in rows) == list(range(len(people)))
    who = {split: {people[row].participant_id for row in rows} for split, rows in splits.items()}
    assert not who["train"] & who["test"] and not who["train"] & who["validation"]
    assert not who["validation"] & who["test"] and len(who["test"]) == round(0.25 * number)
    assert len(who["validation"]) == round(0.15 * number)
    ages = {split: np.array([people[row].age for row in rows]) for split, rows in splits.items()}
    whole = np.quantile([person.age for person in people], [0.25, 0.5, 0.75])
    # each split has its share below every quartile, ± 2 groups of rounding
    for edge, share in zip(whole, (0.25, 0.5, 0.75), strict=True):
        assert abs((ages["test"] < edge).mean() - share) < 0.05 + 4 / len(who["test"])
    women = np.mean([person.sex == "F" for person in people])
    share = np.mean([people[row].sex == "F" for row in splits["test"]])
    assert abs(share - women) < 0.05 + 4 / len(who["test"])


def test_splits_do_not_depend_on_the_order_and_follow_the_seed():
    people = subjects(60)
    one = split_cohort(people, CohortSettings())
    two = split_cohort(people[::-1], CohortSettings())
    assert {people[row] for row in one["test"]} == {people[::-1][row] for row in two["test"]}
    assert one["test"] != split_cohort(people, CohortSettings(seed=1))["test"]
    with pytest.raises(UserError, match="no participant of 2 is in validation, test"):
        split_cohort(subjects(2), CohortSettings(validation=0.1, test=0.1))


def written(folder, **changed):
    random = np.random.default_rng(0)
    values = random.random((6, 1, 16, 16, 32)) * (random.random((6, 1, 16, 16, 32)) > 0.5)
    regions = random.integers(0, 256, (6, 3, 16, 16, 32), np.uint8)
    volumes = list(zip(values.astype(np.float16), regions, strict=True))
    rows = [VolumeSubject(f"sub-{i}", "", 30.1 + i, "FM"[i % 2] if i else "") for i in range(6)]
    halves = [VolumeSplitToWrite(rows[i : i + 2], volumes[i : i + 2]) for i in (0, 2, 4)]
    parts = dict(zip(("train", "validation", "test"), halves, strict=True))
    regions, grid = volume_preparation.TISSUES, ((16, 16, 32), 3.0)
    card = participants.age_cohort_card("Made", *grid, regions, ("none", "here"), simulated=True)
    return write_volumes(folder, Made(), card, parts | changed), volumes, rows


def test_card_and_arrays_of_volumes(tmp_path):
    card, volumes, _ = written(tmp_path)
    opened = Prepared.open(tmp_path, verify=True)
    assert opened.card == card and len(card["files"]) == 12
    images = np.stack([image for image, _ in volumes[:2]])
    inside = images[images > 0].astype(np.float64)
    assert card["mean"] == pytest.approx([inside.mean()])
    assert card["std"] == pytest.approx([inside.std()])
    # ages 30.1 and 31.1
    assert opened.task.mean == pytest.approx(30.6) and opened.task.deviation == pytest.approx(0.5)
    assert card["target_range"] == pytest.approx([30.1, 31.1])
    assert card["counts"]["train"] == {"F": 0, "M": 1, "unknown": 1}
    assert card["counts"]["test"] == {"F": 1, "M": 1} and card["task"]["target"] == "age"
    assert isinstance(opened.test.images, np.memmap)
    assert np.array_equal(opened.test.images[1], volumes[5][0])
    assert np.array_equal(opened.regions("validation")[0], volumes[2][1])
    assert opened.subjects("test")[0]["participant_id"] == "sub-4"
    assert written(tmp_path / "again")[0] == card


def test_ages_that_are_all_the_same_are_refused(tmp_path):
    volumes, rows = written(tmp_path)[1:]
    with pytest.raises(UserError, match=r"all ages of train are 30\.1"):
        written(tmp_path / "out", train=VolumeSplitToWrite(rows[:1], volumes[:1]))


@pytest.mark.parametrize("name", ["test_regions.npy", "test_subjects.csv"])
def test_damaged_folders_of_volumes_are_refused(tmp_path, name):
    written(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name}: no such file"):
        Prepared.open(tmp_path)


def test_the_loader_takes_volumes_and_few_shot_refuses_ages(tmp_path):
    written(tmp_path)
    train = Prepared.open(tmp_path).train
    for limit in (1 << 30, 1):
        images, labels = load_split_where_it_fits(train, "cpu", limit).take(torch.tensor([1, 0]))
        assert images.dtype == torch.float16 and labels.dtype == torch.float32
        assert labels.tolist() == pytest.approx([31.1, 30.1])
        assert torch.equal(images[0], torch.from_numpy(np.array(train.images[1])))
    with pytest.raises(UserError, match="labels are real numbers; allowed: null"):
        few_shot_indices(Regression(target="age"), train.labels, 1, 0)


def test_the_montage_shows_ages_and_says_simulated(tmp_path, monkeypatch):
    written(tmp_path)
    rows = (
        "participant_id,session_id,age,sex,site,qc_flags,diagnosis\na,,30.1,,,odd,\nb,,31.1,M,,,\n"
    )
    (tmp_path / "train_subjects.csv").write_text(rows)
    monkeypatch.setattr(prepared, "VERIFIED_BYTES", 0)
    figure = draw_dataset_samples(Prepared.open(tmp_path))
    assert "simulated" in figure.get_suptitle()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["30.1 years, ? *", "31.1 years, M"]
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["sagittal", "coronal", "axial"]


def test_slices_have_superior_and_anterior_up():
    volume = np.zeros((5, 7, 9), np.float32)
    # the top; the front
    volume[2, 3, 8] = 1
    volume[2, 6, 4] = 2
    sagittal, coronal, axial = middle_slices(volume)
    assert sagittal.shape == (9, 7) and coronal.shape == (9, 5) and axial.shape == (7, 5)
    assert sagittal[0, 3] == 1 == coronal[0, 2] and sagittal[4, 6] == 2 == axial[0, 2]


@pytest.mark.parametrize("regions", [None, np.ones((3, 2, 2, 2), np.uint8)])
def test_the_cache_keeps_a_subject_until_a_file_or_a_setting_changes(tmp_path, regions):
    file = tmp_path / "t1.nii"
    file.write_bytes(b"x" * 100)
    cache = VolumeCache(tmp_path / "cache", {})
    path = cache.subject_path({"t1": file})
    assert cache.subject_path({"t1": file}) == path
    made = volume_preparation.VolumeWithTissueShares(np.ones((1, 2, 2, 2), np.float16), regions)
    save_cached_volume(path, made)
    kept = read_cached_volume(path)
    assert np.array_equal(kept.image, made.image) and kept.image.dtype == np.float16
    assert np.array_equal(kept.regions, regions) if regions is not None else not kept.regions
    assert cache._replace(settings={"voxel_mm": 2}).subject_path({"t1": file}) != path
    file.write_bytes(b"x" * 101)
    assert cache.subject_path({"t1": file}) != path


def test_a_volume_that_would_not_fit_on_the_grid(tmp_path):
    values = np.zeros((64, 64, 64), np.float32)
    values[20:40, 20:40, 20:40] = np.random.default_rng(0).uniform(1, 2, (20, 20, 20))
    nibabel.save(nibabel.Nifti1Image(values, np.diag([90.0, 90.0, 90.0, 1.0])), tmp_path / "v.nii")
    with pytest.raises(UserError, match="v.nii: is 5,760 × 5,760 × 5,760 mm large, 191,102,97"):
        volume_preparation.read_volume(
            tmp_path / "v.nii", volume_preparation.VoxelGrid(voxel_mm=1.0, size=(32, 32, 32))
        )
    os.mkfifo(tmp_path / "pipe.nii")
    with pytest.raises(UserError, match="pipe.nii: no file"):
        volume_preparation.read_volume(tmp_path / "pipe.nii", volume_preparation.VoxelGrid())
