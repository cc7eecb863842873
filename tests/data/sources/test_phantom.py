"""The simulated cohort: volumes hit their targets, ageing is as published, streams are apart."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from moecore.core.files import UserError
from moecore.data.phantom import anatomy, simulated_person
from moecore.data.phantom.anatomy import SIDE, load_template, ventricle_voxel_shares
from moecore.data.phantom.simulated_person import (
    LifelongTraits,
    folded_brain_template,
    simulate_ellipsoid_scan,
    tissue_removal_map,
)
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.phantom import Phantom, simulate_scan
from moecore.data.volumes.volume_preparation import normalise_intensities

SMALL = {"subjects": 12, "age_groups": 2}


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
        ("realistic", folded_brain_template),  # of the other generator
    ],
)
def test_tissue_volumes_hit_their_targets(age, sex, seed, preset, template):
    person, base = LifelongTraits.draw(seed, preset), template()
    made = made_ml(person.at(age, sex, base))
    targets = person.targets(base, age, sex)
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
    assert grey(25) == white(25) == ventricles(25) == 1
    assert grey(90) == pytest.approx(470.1 / 587.9)
    assert white(90) == pytest.approx(386.9 / 447.2)
    assert ventricles(90) == pytest.approx(51.05 / 11.78)
    assert ventricles(27.5) == pytest.approx(np.sqrt(12.87 / 11.78))
    assert grey(27.5) == pytest.approx((587.9 + 571.0) / 2 / 587.9)
    assert anatomy.lesions_ml(50) == pytest.approx(1.45)


def test_the_same_person_ages():
    person = LifelongTraits.draw(7)
    brains = [person.at(age, "F") for age in (25, 45, 65, 85)]
    made = [made_ml(brain) for brain in brains]
    for name, sign in (("grey", -1), ("ventricles", 1), ("fluid", 1), ("lesions", 1)):
        values = [volumes[name] for volumes in made]
        assert (np.diff(values) * sign > 0).all(), (name, values)
    # the skull stays
    assert np.ptp([volumes["head"] for volumes in made]) < 0.01 * made[0]["head"]
    # 45 to 45.1 is a small step: nothing is drawn again (two people differ by 0.1 and more)
    assert np.abs(person.at(45.1, "F").brightness - brains[1].brightness).max() < 0.02


def test_a_gap_makes_the_brain_of_another_age():
    person = LifelongTraits.draw(2)
    ahead = person._replace(gap=10)
    assert np.array_equal(ahead.at(50, "M").regions, person._replace(gap=0).at(60, "M").regions)
    base = load_template()
    assert ahead.targets(base, 94, "M") == ahead.targets(base, 85, "M"), "no brain is older than 95"


def test_men_have_larger_heads():
    # medians 1580 and 1390 mL: the same person as a man is larger by 13.7 %, ventricles 8 % more on
    # top
    man, woman = (made_ml(LifelongTraits.draw(3).at(50, sex)) for sex in "MF")
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
    assert ((image[0] > 0) == made.mask).all()
    assert (made.volume[~made.mask] == 0).all()
    assert (made.volume[made.mask] > 0).all()
    assert image.min() == 0 and image.max() == 1 and 0.1 < made.mask.mean() < 0.4
    inside = [image[0][part > 200].mean(dtype=float) for part in regions]
    assert inside[0] > inside[1] > inside[2]  # T1-weighted: white, then grey, then fluid
    # the head fits
    assert not made.mask[[0, -1]].any()
    assert not made.mask[:, [0, -1]].any()
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
    card = Phantom(**SMALL, voxel_mm=2).write(tmp_path)
    assert card["size"] == [96] * 3 and card["voxel_mm"] == [2.0] * 3


def test_left_and_front_and_top():
    # RAS: the cerebellum (z < −20 mm, y < −40 mm) is at the back and at the bottom: low indices of
    # axes 1 and 2
    mask = simulate_scan(30, "F", 1).mask
    low = mask[:, :, 10:16].sum((0, 2))
    high = mask[:, :, 38:44].sum((0, 2))
    assert low[:30].sum() > low[34:].sum() and high.sum() > low.sum()


def test_prepare_does_not_depend_on_threads(tmp_path, monkeypatch):
    cards = []
    for threads in ("1", "3"):
        monkeypatch.setenv("MOECORE_THREADS", threads)
        cards.append(Phantom(**SMALL, seed=2).write(tmp_path / threads))
    assert cards[0] == cards[1] and cards[0]["simulated"] is True and "imulated" in cards[0]["name"]
    opened = Prepared.open(tmp_path / "1", verify=True)
    phantom = Phantom(**SMALL, seed=2)
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


def test_splines_add_up_to_one():
    basis = anatomy.spline_basis()
    assert np.allclose(basis.sum(1), 1, atol=1e-6)
    assert (basis >= 0).all()
    assert basis[0, :3] == pytest.approx([1 / 6, 2 / 3, 1 / 6])
    fields = anatomy.smooth_fields(np.random.default_rng(0), 20)
    assert fields.std() == pytest.approx(1, abs=0.1)
    assert all(np.abs(np.diff(fields, axis=axis)).max() < 0.5 for axis in (1, 2, 3)), "smooth"


def test_the_wall_holds_the_volume():
    distance = np.linspace(-3, 40, 5000)
    for wanted in (200.0, 1500.0):
        shares = ventricle_voxel_shares(anatomy.ventricle_wall_offset(distance, wanted), distance)
        assert shares.sum() == pytest.approx(wanted, rel=1e-4)


def test_growing_ventricles_push_tissue_outwards():
    # a shell of 9 mm around the ventricles: pushed out it stays (and grows a little); were it only
    # covered by them, it would become thin
    base = load_template()
    shell = (base.distance < 9).astype(np.float32)
    still = anatomy.Pose(np.ones(3), np.eye(3), np.zeros(3), np.zeros((3, SIDE**3), np.float32))
    ventricles = ventricle_voxel_shares(0.0, base.distance)
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
    found = tissue_removal_map(source, weight, amount)
    assert (found >= 0).all() and (found <= 0.9 * source + 1e-6).all()
    assert found.sum() <= amount + 1e-2
    if amount < 0.2 * source.sum():
        assert found.sum() > amount - 0.51
        assert found[(weight * source) == (weight * source).max()].item() > np.median(found)


def test_the_template_is_the_one_of_this_code(tmp_path, monkeypatch):
    base = load_template()
    assert anatomy.FILE.stat().st_size < 1_000_000
    assert (anatomy.FILE.parent / "NOTICE.md").is_file()
    # lateral ventricles, mL
    assert 1700 < base.head_ml < 2000
    assert base.shares[2] * base.head_ml == pytest.approx(14.6, abs=1)
    other = tmp_path / "other.npz"
    other.write_bytes(b"no template")
    monkeypatch.setattr(anatomy, "FILE", other)
    with pytest.raises(UserError, match=r"other\.npz: missing, or not the template"):
        load_template.__wrapped__()


def test_the_other_anatomy_is_whole_and_another_one():
    other = folded_brain_template()
    maps = np.stack([other.grey, other.white, other.fluid])
    assert maps.min() >= 0 and maps.sum(axis=0).max() <= 1 + 1e-5
    ellipsoid_ml = 4 / 3 * np.pi * np.prod(simulated_person.HEAD) / 1000  # 4/3 π abc
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
    assert max(other) < min(first) - 0.05, f"raised to {simulated_person.CONTRAST}"


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
