import numpy as np
import pytest
import scipy
import torch
from torch import nn

from moecore.attacks.base import seed_generator_per_image
from moecore.backbones import MoESettings, Vit
from moecore.core.routing_records import ModelOutput
from moecore.measure.base import SEED, MeasuredModel
from moecore.measure.smoothing import Smoothing, smoothing_radius
from moecore.testing import check_measurement
from tests.measure.subjects import built

SETTINGS = Smoothing(images=6, guesses=10, draws=30, sigma=0.1, radii=(0, 0.05, 0.1))
VIT = Vit(patch=6, width=16, depth=2, heads=2)
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 0.5}


def sparse(router: dict) -> MoESettings:
    return MoESettings(router=router, experts=MLP, blocks=(0, 1))


TOP_1, HASH = (sparse({"kind": kind, "k": 1}) for kind in ("noisy_top_k", "hash"))
MODELS = {"vmoe": TOP_1, "dense": None, "hash": HASH}


@pytest.fixture(scope="module")
def results(data):
    subjects = {name: MeasuredModel(built(VIT, moe, data, 4), data) for name, moe in MODELS.items()}
    return {name: (one, check_measurement(SETTINGS, one)) for name, one in subjects.items()}


def test_radii_by_hand():
    # all of n draws agree: p = α^(1/n); 0.001^(1/100) = 0.9333, Φ⁻¹ = 1.5005 (Cohen et al.: with
    # 100,000 draws at most 3.8 σ)
    found = smoothing_radius(np.array([100, 50, 0]), 100, 0.5, 0.001)
    assert found[0] == pytest.approx(0.5 * scipy.stats.norm.ppf(0.001**0.01), rel=1e-9)
    assert found[0] == pytest.approx(0.7503, abs=1e-4) and found[1:].tolist() == [-1, -1]
    assert smoothing_radius(np.array([10**5]), 10**5, 1, 0.001)[0] == pytest.approx(3.81, abs=0.01)
    # elsewhere scipy's own interval, two-sided at twice α
    for votes in (60, 80, 99):
        low = scipy.stats.binomtest(votes, 100).proportion_ci(0.9, "exact").low
        expected = scipy.stats.norm.ppf(low) if low > 0.5 else -1
        assert smoothing_radius(np.array([votes]), 100, 1, 0.05)[0] == pytest.approx(expected)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_counts_are_those_of_a_slow_loop(data, results, is_fixed):
    model = results["vmoe"][0].model
    image = torch.from_numpy(np.array(data.test.images[:1])).float() / 255
    generators = [seed_generator_per_image(SEED, [0])[0] for _ in range(2)]
    found = SETTINGS.count_copies_per_class(model, image, generators[0], is_fixed)
    clean, moved, expected = model.routing_of(image), 0, np.zeros((2, 10), int)
    routers = [block.mlp.router for block in model.blocks]
    noise = torch.randn(40, 1, 12, 12, generator=generators[1])
    for number, change in enumerate(noise):
        pixels = image + 0.1 * change
        moved += any(
            (a.chosen != b.chosen).any()
            for a, b in zip(clean, model.routing_of(pixels), strict=True)
        )
        if is_fixed:
            for router, record in zip(routers, clean, strict=True):
                router.barred = ~record.chosen
        output = model(pixels)
        if is_fixed:
            assert all(
                (a.chosen == b.chosen).all() for a, b in zip(clean, output.routing, strict=True)
            )
        for router in routers:
            router.barred = None
        expected[int(number >= 10), int(output.prediction.argmax())] += 1
    assert (found == expected).all() and moved > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_result_has_its_values(results, name):
    _, result = results[name]
    assert bool(result.skipped) == (name != "vmoe")
    for routes in ("free", "fixed") if name == "vmoe" else ("free",):
        curve = result.curve("certified_accuracy", routes)
        assert list(curve) == [0, 0.05, 0.1]
        assert list(curve.values()) == sorted(curve.values(), reverse=True)
        abstained = result.find("abstained", routes=routes)
        assert abstained.low <= abstained.value <= min(abstained.high, 1 - curve[0])
        assert 0 <= result.find("smoothed_radius", routes=routes).value <= 0.1 * 1


class Half(nn.Module):
    """Two classes, the second where the mean pixel is above 0.4."""

    moe = None

    def __init__(self, image) -> None:
        super().__init__()
        self.image, self.weight = image, nn.Parameter(torch.ones(()))

    def forward(self, images) -> ModelOutput:
        mean = images.flatten(1).mean(dim=1) * self.weight
        return ModelOutput(torch.stack([0.4 - mean, mean - 0.4], dim=1))


def test_a_linear_models_radius_is_its_distance_to_the_border(data, results):
    # 144 pixels: a change of length r moves the mean by r / 12: a mean of 0.4 ± m has radius 12 m
    model = Half(results["dense"][0].model.image)
    settings = Smoothing(sigma=0.25, draws=4000)
    for mean in (0.39, 0.4, 0.42):
        image = torch.full((1, 1, 12, 12), mean)
        counts = settings.count_copies_per_class(
            model, image, torch.Generator().manual_seed(0), False
        )
        votes = counts[1, counts[0].argmax()]
        radius = float(smoothing_radius(np.array([votes]), 4000, 0.25, 0.001)[0])
        distance = 12 * abs(mean - 0.4)
        assert radius <= distance if distance else radius == -1
        assert not distance or radius > 0.85 * distance - 0.01


def test_bad_settings_are_refused(data):
    with pytest.raises(ValueError, match="found draws: 9; allowed: 10 or more for alpha: 0.001"):
        Smoothing(draws=9)
    Smoothing(draws=10)
    with pytest.raises(ValueError, match="greater than 0"):
        Smoothing(sigma=0)
    router = {"kind": "noisy_top_k", "k": 1, "eval_capacity_factor": 1.0}
    model = built(VIT, sparse(router), data, 1)
    assert "capacity" in Smoothing.applies(MeasuredModel(model, data))
