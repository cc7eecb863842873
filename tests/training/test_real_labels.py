"""Training on real numbers: the loss, what is reported, and what is refused."""

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import Batch, Guidance, ModelOutput, Step
from moecore.data.loader import few_shot, to_device
from moecore.data.prepared import Split
from moecore.data.views.mix import Mix, mix
from moecore.nn.backbones.vit3d import Vit3d
from moecore.training.adversarial import Adversarial
from moecore.training.job import Job
from moecore.training.loop import fit, validate
from moecore.training.meter import Meter
from moecore.training.objective import Objective, hard_distillation
from moecore.training.settings import Training
from tests.training.small import CPU
from tests.volumes import VOLUMES, ball

AGES = torch.tensor([40.0, 60.0])


def cohort(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


def task(seed: int = 0, **settings) -> Job:
    torch.manual_seed(seed)
    model = Vit3d(
        patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled", **settings
    ).build(VOLUMES)
    return Job(
        model, to_device(cohort(32, 0), "cpu"), to_device(cohort(12, 100), "cpu"), Objective()
    )


def test_the_loss_is_the_mean_absolute_error_in_deviations():
    # errors 4 and 10 years; deviation 20: (4 + 10) / 2 / 20
    assert float(VOLUMES.task.loss(torch.tensor([[44.0], [50.0]]), AGES)) == pytest.approx(0.35)
    step = Step(Batch(None, AGES, None), ModelOutput(torch.tensor([[44.0], [50.0]])), task().model)
    assert float(Objective().terms(step)["task"]) == pytest.approx(
        0.35
    )  # the model's deviation is 20


def test_what_has_no_meaning_is_refused():
    with pytest.raises(UserError, match="label_smoothing"):
        VOLUMES.task.loss(torch.zeros(2, 1), AGES, 0.1)
    with pytest.raises(UserError, match="one number an image"):
        VOLUMES.task.loss(torch.zeros(2, 2), AGES)  # would broadcast
    with pytest.raises(UserError, match="distillation"):
        hard_distillation(
            Step(
                Batch(None, AGES, None),
                ModelOutput(torch.zeros(2, 1)),
                task().model,
                Guidance(torch.zeros(2, 1), ()),
            )
        )
    with pytest.raises(UserError, match="mix"):
        mix(torch.zeros(2, 1, 4, 4), AGES, VOLUMES.task, Mix(mixup=1.0), torch.Generator())
    with pytest.raises(UserError, match="real numbers"):
        few_shot(VOLUMES.task, np.array([1.0, 2.0], np.float32), 1, 0)


def test_the_meter_means_over_images():
    meter = Meter(torch.device("cpu"), "train_mae")
    meter.add(0, 2, {"loss": torch.tensor(1.0)}, torch.tensor(6.0))
    meter.add(1, 4, {"loss": torch.tensor(3.0)}, torch.tensor(12.0))
    found = meter.take("")
    assert found["train_mae"] == 3.0 and found["loss"] == 2.0  # 18 years over 6 images


def test_validation_is_in_years_and_its_loss_in_deviations():
    model = task().model
    model.head.weight.data.zero_()  # answers 55 always
    split = to_device(Split(cohort(2, 0).images, np.array([50.0, 70.0], np.float32)), "cpu")
    assert validate(model, split) == pytest.approx(
        {"validation_mae": 10.0, "validation_loss": 0.5}
    )  # errors 5 and 15; deviation 20


def test_it_learns_the_age_of_balls():
    settings = Training(epochs=16, batch=8, learning_rate=5e-3, log_every=4, warmup_epochs=1)
    values = [metrics.values for metrics in fit(task(), settings, 0, CPU)]
    assert (
        values[-1]["validation_mae"] < 8 and values[0]["train_mae"] > 15
    )  # the median predictor's is 17.5
    assert values[-1]["task"] == pytest.approx(values[-1]["train_mae"] / 20, rel=1e-5)


def test_adversarial_training_makes_the_error_larger_and_goes_on():
    settings = Training(
        epochs=1,
        batch=8,
        learning_rate=1e-4,
        log_every=4,
        adversarial=Adversarial(steps=2, epsilon=0.05),
    )
    attacked = [metrics.values for metrics in fit(task(), settings, 0, CPU)]
    plain = [
        metrics.values
        for metrics in fit(task(), settings.model_copy(update={"adversarial": None}), 0, CPU)
    ]
    assert attacked[-1]["train_mae"] > plain[-1]["train_mae"]
