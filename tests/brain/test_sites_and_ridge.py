"""Tissue volumes tell age by ridge regression; what scanners add to them is taken out by ComBat."""

import numpy as np
import pytest
from pydantic import ValidationError

from moecore.brain.tissue_ridge import (
    SiteHarmonisation,
    measure_tissue_ridge,
    read_split_features,
    shrink_site_effect,
)
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.data.volumes.subjects import VolumeSubject
from moecore.data.volumes.volume_writer import VolumeDatasetInfo, VolumeSplitToWrite, write_volumes
from moecore.measure.calibration import TissueRidge
from tests.volumes import Balls, ball, balls

ADDED = {"a": (0.0, 0.0, 0.0), "b": (40.0, -30.0, 20.0), "c": (-25.0, 60.0, 10.0)}
STRETCH = {"a": 1.0, "b": 2.0, "c": 0.5}


def scanned(n, sites, seed=0):
    """Features (n, 3) that age moves, at sites that add and stretch; ages (n, 1), and the sites."""
    random = np.random.default_rng(seed)
    ages = random.uniform(20, 90, (n, 1))
    names = [sites[i % len(sites)] for i in range(n)]
    noise = random.normal(0, 5, (n, 3)) * np.array([STRETCH[name] for name in names])[:, None]
    added = np.array([ADDED[name] for name in names])
    return 500 + ages * np.array([[-2.0, -1.0, 1.5]]) + added + noise, ages, names


def test_what_sites_add_and_stretch_is_found():
    features, ages, sites = scanned(600, "abc")
    fitted = SiteHarmonisation.fit(features, ages, sites)
    assert fitted.slopes[0] == pytest.approx([-2, -1, 1.5], abs=0.06)
    shifts = {name: fitted.deviation * fitted.effects[name].location for name in "abc"}
    for name in "bc":
        assert shifts[name] - shifts["a"] == pytest.approx(ADDED[name], abs=2)
    scales = {name: fitted.effects[name].scale.mean() for name in "abc"}
    assert scales["b"] / scales["c"] == pytest.approx(4, rel=0.15)
    # without ages sites are moved alone; with them they also get one spread
    moved = fitted.harmonise(features, sites)
    assert moved == pytest.approx(features - np.stack([shifts[name] for name in sites]))
    whole = fitted.harmonise(features, sites, ages) - ages @ fitted.slopes
    spread = [whole[np.array(sites) == name].std(axis=0) for name in "abc"]
    assert np.ptp(spread, axis=0) == pytest.approx([0, 0, 0], abs=0.5)


def test_the_shrinkage_solves_both_equations():
    residuals = np.random.default_rng(1).normal([0.5, -0.2, 0.1], [1.0, 2.0, 0.5], (12, 3))
    effect = shrink_site_effect(residuals)
    mean, variance = residuals.mean(0), residuals.var(0, ddof=1)
    tau, m, s = mean.var(ddof=1), variance.mean(), variance.var(ddof=1)
    lam, theta = m**2 / s + 2, m**3 / s + m  # mean θ/(λ−1) = m, variance m²/(λ−2) = s
    assert theta / (lam - 1) == pytest.approx(m) and m**2 / (lam - 2) == pytest.approx(s)
    squared, n = effect.scale**2, len(residuals)
    location = (n * tau * mean + squared * mean.mean()) / (n * tau + squared)
    assert effect.location == pytest.approx(location)
    sums = ((residuals - effect.location) ** 2).sum(0)
    assert squared == pytest.approx((theta + sums / 2) / (n / 2 + lam - 1))
    # each lies between the site's own mean and that of its features
    assert (np.abs(effect.location - mean.mean()) < np.abs(mean - mean.mean())).all()


def test_a_site_that_training_lacks_needs_a_declared_part():
    features, ages, sites = scanned(300, "ab")
    fitted = SiteHarmonisation.fit(features, ages, sites)
    new, new_ages, names = scanned(60, "c", seed=5)
    with pytest.raises(UserError, match=r"nobody of 'c'; allowed: a, b, or a declared reference"):
        fitted.harmonise(new, names)
    placed = fitted.with_site("c", new[:20], new_ages[:20])
    left = placed.harmonise(new[20:], names[20:]) - new_ages[20:] @ placed.slopes
    assert left.mean(0) == pytest.approx(placed.mean, abs=3)
    assert placed.effects["a"] is fitted.effects["a"]  # nothing else moves
    with pytest.raises(UserError, match="found 2 people in the reference part of the site c"):
        fitted.with_site("c", new[:2], new_ages[:2])
    with pytest.raises(UserError, match="found the sites a; allowed: two or more"):
        SiteHarmonisation.fit(features, ages, ["a"] * 300)


def write_sites(folder):
    """Balls whose fluid grows with age, at two sites in training and a third in the test."""
    parts = {}
    for number, (split, sites) in enumerate((("train", "ab"), ("validation", "a"), ("test", "c"))):
        ages = np.linspace(25, 85, 24)
        rows = [
            VolumeSubject(f"sub-{split}{i:02}", "", float(age), "FM"[i % 2], sites[i % len(sites)])
            for i, age in enumerate(ages)
        ]
        made = [ball(age, 100 * number + i) for i, age in enumerate(ages)]
        parts[split] = VolumeSplitToWrite(rows, made)
    facts = VolumeDatasetInfo("balls", (16, 16, 16), (10.0,) * 3, "none", "made", Balls())
    write_volumes(folder, facts, parts)
    return Prepared.open(folder)


def test_ridge_on_tissue_volumes(tmp_path):
    data = balls(tmp_path / "data")
    volumes = read_split_features(data, "test")
    shares = data.regions("test")[3].astype(float) / 255
    assert volumes.features[3] == pytest.approx(shares.sum((1, 2, 3)) / 1000)  # voxels of 1 mm³
    ridge = measure_tissue_ridge(data, TissueRidge())
    ages = data.test.labels
    assert ridge.errors.mae.value < 0.3 * np.abs(ages - np.median(data.train.labels)).mean()
    assert ridge.n_test == len(ages) and ridge.items and ridge.reference == {}
    with pytest.raises(UserError, match="this data has no tissue maps"):
        measure_tissue_ridge(balls(tmp_path / "none", regions=False), TissueRidge())


def test_ridge_where_the_test_is_another_site(tmp_path):
    data = write_sites(tmp_path / "data")
    with pytest.raises(UserError, match="training has nobody of 'c'"):
        measure_tissue_ridge(data, TissueRidge(harmonise="combat"))
    ridge = measure_tissue_ridge(data, TissueRidge(harmonise="combat", reference=6))
    assert ridge.reference == {"c": 6} and ridge.n_test == 18 and ridge.items is None
    with pytest.raises(UserError, match="found 24, which leaves nobody for the test"):
        measure_tissue_ridge(data, TissueRidge(harmonise="combat", reference=24))
    with pytest.raises(ValidationError, match="allowed: 0, or harmonise: combat"):
        TissueRidge(reference=3)
