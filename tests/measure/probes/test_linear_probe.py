"""A head fitted anew to what a frozen model's head reads."""

import numpy as np
import pytest
import torch
from torch import nn

from moecore.core.files import UserError
from moecore.core.records import ModelOutput
from moecore.measure.probes.linear_probe import PENALTIES, linear_probe, read_by_head


class Pooled(nn.Module):
    """Its head reads the mean and the greatest voxel of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, images: torch.Tensor) -> ModelOutput:
        flat = images.flatten(1)
        return ModelOutput(self.head(torch.stack([flat.mean(1), flat.amax(1)], dim=1)))


def test_what_the_head_reads_and_says():
    images, model = torch.rand(7, 1, 2, 2, 2), Pooled().train()
    said, read = read_by_head(model, images, 3)
    flat = images.flatten(1)
    np.testing.assert_allclose(read, torch.stack([flat.mean(1), flat.amax(1)], dim=1), rtol=1e-6)
    np.testing.assert_allclose(said, model(images).prediction[:, 0].detach(), rtol=1e-6)
    assert model.training and not model.head._forward_pre_hooks, "the model is left as it was"


def test_against_the_normal_equations():
    random = np.random.default_rng(0)
    features, ages = random.normal(3, 5, (60, 4)), random.normal(50, 10, 60)
    others = random.normal(3, 5, (30, 4)), random.normal(50, 10, 30)
    probe, penalty = linear_probe((features, ages), others)
    errors = {}
    for tried in PENALTIES:  # minimise |y - mean - Xw|^2 + 60 * penalty * |w|^2 of standardised X
        x = (features - features.mean(0)) / features.std(0)
        weights = np.linalg.solve(x.T @ x + 60 * tried * np.eye(4), x.T @ (ages - ages.mean()))
        errors[tried] = (others[0] - features.mean(0)) / features.std(0) @ weights + ages.mean()
    means = {tried: np.abs(found - others[1]).mean() for tried, found in errors.items()}
    assert penalty == min(means, key=means.get)
    np.testing.assert_allclose(probe.predict(others[0]), errors[penalty], rtol=1e-9)


def test_the_validation_split_chooses_the_penalty():
    # Eight of the nine features are noise that fits twelve images well: without a penalty the probe
    # reads the noise.
    random = np.random.default_rng(1)

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        ages = random.normal(0, 1, count)
        return np.c_[ages + random.normal(0, 1, count), random.normal(0, 1, (count, 8))], ages

    train, validation = drawn(12), drawn(400)
    probe, penalty = linear_probe(train, validation)
    loose, _ = linear_probe(train, train)
    assert penalty > PENALTIES[0]
    assert (
        np.abs(probe.predict(validation[0]) - validation[1]).mean()
        < np.abs(loose.predict(validation[0]) - validation[1]).mean()
    )


def test_features_that_do_not_vary_say_the_mean_age():
    ages = np.array([20.0, 30.0, 70.0])
    probe, penalty = linear_probe((np.ones((3, 2)), ages), (np.ones((2, 2)), ages[:2]))
    assert (
        probe.predict(np.ones((1, 2))).tolist() == pytest.approx([40]) and penalty == PENALTIES[-1]
    )


@pytest.mark.parametrize("part", range(4))
def test_numbers_that_are_not_finite_are_refused(part):
    parts = [np.zeros((3, 2)), np.zeros(3), np.zeros((3, 2)), np.zeros(3)]
    parts[part].flat[0] = np.nan
    with pytest.raises(UserError, match="not a finite number"):
        linear_probe((parts[0], parts[1]), (parts[2], parts[3]))
