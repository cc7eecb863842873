from functools import partial

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt
from pydantic import TypeAdapter, ValidationError
from threadpoolctl import threadpool_limits

from moecore.core.files import UserError
from moecore.data.phantom import anatomy, simulated_person
from moecore.data.phantom.anatomy import SIDE, compute_inside_shares, load_template
from moecore.data.phantom.simulated_person import LifelongTraits, simulate_ellipsoid_scan
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.phantom import simulate_scan
from moecore.data.volumes.participants import VolumeSubject, split_cohort
from moecore.data.volumes.volume_preparation import load_volume, normalise_intensities
from moecore.predict.folder_predictions import find_volumes
from moecore.sources import Phantom, Source, TwoCohorts
from moecore.study.yaml_document import load_yaml_document
from tests.data.making import AFFINE, SMALL, cohort, head, participants, save
from tests.project import ROOT

SMALL_COHORT = {"subjects": 12, "age_groups": 2}
PEOPLE = 8
AGES = [20 + 7 * i for i in range(PEOPLE)]
PRESETS = load_yaml_document(ROOT / "pipelines/ermoe/brain_age.yaml").data["presets"]


def made_ml(brain):
    """The volumes of an unscanned brain in mL; grey and white matter and fluid fill the head."""
    maps = brain._asdict() | {"head": brain.regions}
    del maps["brightness"]
    sums = {name: float(part.sum(dtype=np.float64)) for name, part in maps.items()}
    return {name: voxels * anatomy.VOXEL_ML for name, voxels in sums.items()}


@pytest.mark.parametrize(("age", "sex", "seed"), [(20, "F", 1), (55, "M", 2), (90, "F", 3)])
@pytest.mark.parametrize(
    ("preset", "template"),
    [
        ("demo", load_template),
        ("realistic", load_template),
        ("realistic", simulated_person.folded_brain_template),  # of the other generator
    ],
)
def test_tissue_volumes_hit_their_targets(age, sex, seed, preset, template):
    person, base = LifelongTraits.draw(seed, preset), template()
    made = made_ml(person.brain(age, sex, base))
    targets = person.target_shares(base, age, sex)
    for name in ("grey", "white"):
        assert made[name] == pytest.approx(getattr(targets, name) * made["head"], rel=0.02)
    skull = anatomy.HEAD_ML[sex] * np.exp(anatomy.HEAD_LOG_SD * person.head)
    assert made["ventricles"] == pytest.approx(targets.ventricles * skull, rel=0.02)


def test_published_curves():
    # the table's values at 25 are 587.9, 447.2 and 11.78 mL, at 90: 470.1, 386.9 and 51.05; between
    # 25 and 30 the middle (geometric for ventricles)
    grey = partial(anatomy.tissue_relative_to_25, anatomy.GREY_ML)
    white = partial(anatomy.tissue_relative_to_25, anatomy.WHITE_ML)
    ventricles = anatomy.ventricles_relative_to_25
    assert grey(25) == white(25) == ventricles(25) == 1 and grey(90) == pytest.approx(470.1 / 587.9)
    assert white(90) == pytest.approx(386.9 / 447.2)
    assert ventricles(90) == pytest.approx(51.05 / 11.78)
    assert ventricles(27.5) == pytest.approx(np.sqrt(12.87 / 11.78))
    assert grey(27.5) == pytest.approx((587.9 + 571.0) / 2 / 587.9)
    assert anatomy.lesions_ml(50) == pytest.approx(1.45)


def test_the_same_person_ages():
    person = LifelongTraits.draw(7)
    brains = [person.brain(age, "F") for age in (25, 45, 65, 85)]
    made = [made_ml(brain) for brain in brains]
    for name, sign in (("grey", -1), ("ventricles", 1), ("fluid", 1), ("lesions", 1)):
        values = [volumes[name] for volumes in made]
        assert (np.diff(values) * sign > 0).all(), (name, values)
    # the skull stays
    assert np.ptp([volumes["head"] for volumes in made]) < 0.01 * made[0]["head"]
    # 45 to 45.1 is a small step: nothing is drawn again (two people differ by 0.1 and more)
    assert np.abs(person.brain(45.1, "F").brightness - brains[1].brightness).max() < 0.02


def test_a_gap_makes_the_brain_older_and_men_have_larger_heads():
    person = LifelongTraits.draw(2)
    ahead = person._replace(gap=10)
    assert np.array_equal(
        ahead.brain(50, "M").regions, person._replace(gap=0).brain(60, "M").regions
    )
    base = load_template()
    assert ahead.target_shares(base, 94, "M") == ahead.target_shares(base, 85, "M"), (
        "no brain is older than 95"
    )
    # medians 1580 and 1390 mL: the same person as a man is larger by 13.7 %, ventricles 8 % more on
    # top
    man, woman = (made_ml(LifelongTraits.draw(3).brain(50, sex)) for sex in "MF")
    assert man["head"] / woman["head"] == pytest.approx(1580 / 1390, rel=0.01)
    assert man["ventricles"] / woman["ventricles"] == pytest.approx(1580 / 1390 * 1.08, rel=0.01)


def test_scanner_and_site_leave_the_anatomy_alone():
    one = simulate_scan(40, "F", 1)
    again = simulate_scan(40, "F", 1, scan=1)
    elsewhere = simulate_scan(40, "F", 1, site=1)
    for other in (again, elsewhere):
        assert np.array_equal(one.regions, other.regions)
        assert not np.array_equal(one.volume, other.volume)
    assert np.corrcoef(one.volume[one.mask], again.volume[one.mask])[0, 1] > 0.8
    scans = (one, again, simulate_scan(40, "F", 2))
    images = [normalise_intensities(made.volume, made.mask) for made in scans]
    assert np.abs(images[0] - images[1]).mean() < 0.7 * np.abs(images[0] - images[2]).mean()


def test_background_mask_and_range():
    image, regions = Phantom().draw(70, "M", 4)
    assert image.shape == (1, SIDE, SIDE, SIDE) and image.dtype == np.float16
    assert regions.shape == (3, SIDE, SIDE, SIDE) and regions.dtype == np.uint8
    made = simulate_scan(70, "M", 4)
    assert made.regions.min() >= -1e-5 and made.regions.sum(0).max() <= 1 + 1e-4, "shares"
    assert ((image[0] > 0) == made.mask).all() and (made.volume[~made.mask] == 0).all()
    assert (made.volume[made.mask] > 0).all()
    assert image.min() == 0 and image.max() == 1 and 0.1 < made.mask.mean() < 0.4
    inside = [image[0][part > 200].mean(dtype=float) for part in regions]
    assert inside[0] > inside[1] > inside[2]  # T1-weighted: white, then grey, then fluid
    # the head fits
    assert not made.mask[[0, -1]].any() and not made.mask[:, [0, -1]].any()
    assert not made.mask[:, :, -1].any()


def test_voxels_of_2_mm_hold_the_same_head(tmp_path):
    volumes, middles = {}, {}
    for side in (3, 2):
        made = Phantom(voxel_mm=side).draw(70, "M", 4)
        volumes[side] = made.regions.sum(axis=(1, 2, 3)) * side**3
        middles[side] = np.argwhere(made.image[0] > 0).mean(axis=0) * side
    assert made.image.shape == (1, 96, 96, 96) and made.regions.shape == (3, 96, 96, 96)
    np.testing.assert_allclose(volumes[2], volumes[3], rtol=0.01)
    np.testing.assert_allclose(middles[2] + 1, middles[3] + 1.5, atol=0.2)  # mm from the first edge
    card = Phantom(**SMALL_COHORT, voxel_mm=2).write(tmp_path)
    assert card["size"] == [96] * 3 and card["voxel_mm"] == [2.0] * 3


def test_left_and_front_and_top():
    # RAS: the cerebellum (z < −20 mm, y < −40 mm) is at the back and at the bottom: low indices of
    # axes 1 and 2
    mask = simulate_scan(30, "F", 1).mask
    low = mask[:, :, 10:16].sum((0, 2))
    assert low[:30].sum() > low[34:].sum() and mask[:, :, 38:44].sum((0, 2)).sum() > low.sum()


def test_prepare_does_not_depend_on_threads(tmp_path, monkeypatch):
    cards = []
    for threads in ("1", "3"):
        monkeypatch.setenv("MOECORE_THREADS", threads)
        cards.append(Phantom(**SMALL_COHORT, seed=2).write(tmp_path / threads))
    assert cards[0] == cards[1] and cards[0]["simulated"] is True and "imulated" in cards[0]["name"]
    opened = Prepared.open(tmp_path / "1", verify=True)
    phantom = Phantom(**SMALL_COHORT, seed=2)
    visits = {visit.subject.participant_id: visit for visit in phantom.visits()}
    row = opened.subjects("test")[1]
    visit = visits[row["participant_id"]]
    # as in the main process of a machine with three cores
    with threadpool_limits(3, user_api="blas"):
        image, regions = phantom.draw(float(row["age"]), row["sex"], visit.seed, site=visit.site)
    assert np.array_equal(opened.test.images[1], image)
    assert np.array_equal(opened.regions("test")[1], regions)
    assert opened.test.labels[1] == np.float32(row["age"])
    assert not any(row["qc_flags"] for split in SPLITS for row in opened.subjects(split))


def test_a_cohort_s_people_are_its_settings():
    visits = Phantom(subjects=400, seed=1).visits()
    ages = np.array([visit.subject.age for visit in visits])
    assert len({visit.subject.participant_id for visit in visits}) == 400
    assert 20 <= ages.min() < 21 and 89 < ages.max() <= 90 and abs(ages.mean() - 55) < 2
    assert 160 < sum(visit.subject.sex == "F" for visit in visits) < 240
    assert {visit.site for visit in visits} == {0, 1, 2}
    # a larger cohort has the same people first, another seed has others
    assert Phantom(subjects=10).visits() == Phantom(subjects=20).visits()[:10]
    one, other = ({visit.seed for visit in Phantom(seed=seed).visits()} for seed in (0, 1))
    assert not one & other


def test_splines_add_up_to_one_and_the_wall_holds_the_volume():
    basis = anatomy.spline_basis()
    assert np.allclose(basis.sum(1), 1, atol=1e-6) and (basis >= 0).all()
    assert basis[0, :3] == pytest.approx([1 / 6, 2 / 3, 1 / 6])
    fields = anatomy.draw_smooth_fields(np.random.default_rng(0), 20)
    assert fields.std() == pytest.approx(1, abs=0.1)
    assert all(np.abs(np.diff(fields, axis=axis)).max() < 0.5 for axis in (1, 2, 3)), "smooth"
    distance = np.linspace(-3, 40, 5000)
    for wanted in (200.0, 1500.0):
        shares = compute_inside_shares(anatomy.ventricle_wall_offset(distance, wanted), distance)
        assert shares.sum() == pytest.approx(wanted, rel=1e-4)


def test_growing_ventricles_push_tissue_outwards():
    # a shell of 9 mm around the ventricles: pushed out it stays (and grows a little); were it only
    # covered by them, it would become thin
    base = load_template()
    shell = (base.distance < 9).astype(np.float32)
    still = anatomy.Pose(np.ones(3), np.eye(3), np.zeros(3), np.zeros((3, SIDE**3), np.float32))
    ventricles = compute_inside_shares(0.0, base.distance)
    sizes = [float(ventricles.sum()) * times for times in (1, 2, 3)]
    shelled = base._replace(white=shell)
    sums = [anatomy.place_template(shelled, still, 1.0, size).white.sum() for size in sizes]
    assert sums[0] == pytest.approx((shell * (1 - ventricles)).sum(), rel=0.01)
    assert 0.9 * sums[0] < sums[1] < sums[2]


@given(st.integers(0, 1000), st.floats(1, 60))
@settings(max_examples=30, deadline=None)
def test_what_is_taken(seed, amount):
    random = np.random.default_rng(seed)
    source = random.random((5, 5, 5)).astype(np.float32)
    weight = random.random((5, 5, 5)).astype(np.float32)
    found = simulated_person.tissue_removal_map(source, weight, amount)
    assert (found >= 0).all() and (found <= 0.9 * source + 1e-6).all()
    assert found.sum() <= amount + 1e-2
    if amount < 0.2 * source.sum():
        assert found.sum() > amount - 0.51
        assert found[(weight * source) == (weight * source).max()].item() > np.median(found)


def test_the_template_is_the_one_of_this_code(tmp_path, monkeypatch):
    base = load_template()
    assert (
        anatomy.TEMPLATE_FILE.stat().st_size < 1_000_000
        and (anatomy.TEMPLATE_FILE.parent / "NOTICE.md").is_file()
    )
    # lateral ventricles, mL
    assert 1700 < base.head_ml < 2000
    assert base.shares[2] * base.head_ml == pytest.approx(14.6, abs=1)
    other = tmp_path / "other.npz"
    other.write_bytes(b"no template")
    monkeypatch.setattr(anatomy, "TEMPLATE_FILE", other)
    with pytest.raises(UserError, match=r"other\.npz: missing, or not the template"):
        load_template.__wrapped__()


def test_the_other_anatomy_is_whole_and_another_one():
    other = simulated_person.folded_brain_template()
    maps = np.stack([other.grey, other.white, other.fluid])
    assert maps.min() >= 0 and maps.sum(axis=0).max() <= 1 + 1e-5
    ellipsoid_ml = 4 / 3 * np.pi * np.prod(simulated_person.HEAD_RADII) / 1000  # 4/3 π abc
    assert other.head_ml == pytest.approx(ellipsoid_ml, rel=0.01)
    # Dice of white matter with the first anatomy, both in the middle of the grid
    both = np.minimum(other.white, load_template().white).sum()
    assert 2 * both / (other.white.sum() + load_template().white.sum()) < 0.7
    grey, white, ventricles = other.shares
    assert 0.3 < grey < 0.55 and 0.3 < white < 0.55 and 0.005 < ventricles < 0.012
    assert (other.distance.ravel()[other.region] < 0).any(), "there are ventricles"


def test_distance_to_an_ellipsoid():
    points = np.array([[0.0, 30, 0, 10, 0], [0, 0, 0, 0, 22], [0, 0, 8, 0, 0]])
    found = simulated_person.ellipsoid_distance(points, (10.0, 20.0, 10.0))
    assert found == pytest.approx([-10, 20, -2, 0, 2])  # along an axis it is exact


def test_the_other_generator_has_another_contrast():
    def contrast(image: np.ndarray, regions: np.ndarray) -> float:
        """How far grey matter lies on the way from fluid to white matter."""
        wm, gm, csf = (float(image[0][share > 230].astype(np.float64).mean()) for share in regions)
        return (gm - csf) / (wm - csf)

    first = [contrast(*Phantom().draw(50, "F", seed, site=seed)) for seed in range(3)]
    other = [contrast(*simulate_ellipsoid_scan(50, "F", seed)) for seed in range(3)]
    assert max(other) < min(first) - 0.05, f"raised to {simulated_person.CONTRAST_EXPONENT}"


def test_the_other_generator_is_a_function_of_its_arguments():
    one = simulate_ellipsoid_scan(40, "F", 3)
    assert one.image.shape == (1, SIDE, SIDE, SIDE) and one.image.dtype == np.float16
    assert 0 < one.image[one.image > 0].min() and one.image.max() <= 1
    again = simulate_ellipsoid_scan(40, "F", 3)
    np.testing.assert_array_equal(one.image, again.image)
    np.testing.assert_array_equal(one.regions, again.regions)
    older = simulate_ellipsoid_scan(80, "F", 3)
    assert older.regions[2].sum(dtype=int) > one.regions[2].sum(dtype=int), "fluid grows"
    assert not np.array_equal(one.image, simulate_ellipsoid_scan(40, "F", 4).image)


def source(preset, root, **changes):
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
    place = f"{tmp_path}/raw/participants.tsv"
    said = "but its site b is in test_sites; allowed: test"
    expected = [f"{place}:{line}: sub-{line - 2:02}: split is train, {said}" for line in (3, 9)]
    assert str(error.value).splitlines() == expected
    participants(tmp_path / "raw", people({"site": "abc", "split": ["test", "", ""]}))
    with pytest.raises(UserError, match="tsv:2: sub-00: split is test, but its site is not in"):
        held.write(tmp_path / "out")
    with pytest.raises(UserError, match="found z; allowed: a, b, c"):
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
    with pytest.raises(ValidationError, match="voxel_mm: found 6.0 and 3.0"):
        TwoCohorts(first=first, second=second.model_copy(update={"voxel_mm": 3.0}))
