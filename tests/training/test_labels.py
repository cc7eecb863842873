"""Training on real numbers: the loss, what is reported, and what is refused.

Training on images with several labels each.
"""

import math

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import Batch, Guidance, ModelOutput, Step
from moecore.data.loader import few_shot, to_device
from moecore.data.prepared import Split
from moecore.data.views.mix import Mix, mix
from moecore.nn.backbones.vit3d import Vit3d
from moecore.tasks.multi_label import MultiLabel
from moecore.training.adversarial import Adversarial
from moecore.training.job import Job, training_batch
from moecore.training.loop import fit, validate
from moecore.training.meter import Meter
from moecore.training.method import Method
from moecore.training.objective import Objective, hard_distillation
from moecore.training.settings import Training
from tests.training.small import CPU, IMAGE, SETTINGS, images, task
from tests.training.test_guide import PRC, SHIFTED, step
from tests.volumes import VOLUMES, ball

AGES = torch.tensor([40.0, 60.0])


def cohort(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


def age_job(seed: int = 0, **settings) -> Job:
    torch.manual_seed(seed)
    model = Vit3d(
        patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled", **settings
    ).build(VOLUMES)
    return Job(
        model, to_device(cohort(32, 0), "cpu"), to_device(cohort(12, 100), "cpu"), Objective()
    )


def test_the_loss_of_ages_is_the_mean_absolute_error_in_deviations():
    # errors 4 and 10 years; deviation 20: (4 + 10) / 2 / 20
    assert float(VOLUMES.task.loss(torch.tensor([[44.0], [50.0]]), AGES)) == pytest.approx(0.35)
    step = Step(
        Batch(None, AGES, None), ModelOutput(torch.tensor([[44.0], [50.0]])), age_job().model
    )
    assert float(Objective().terms(step)["task"]) == pytest.approx(
        0.35
    )  # the model's deviation is 20


def test_what_has_no_meaning_for_ages_is_refused():
    with pytest.raises(UserError, match="label_smoothing"):
        VOLUMES.task.loss(torch.zeros(2, 1), AGES, 0.1)
    with pytest.raises(UserError, match="one number an image"):
        VOLUMES.task.loss(torch.zeros(2, 2), AGES)  # would broadcast
    with pytest.raises(UserError, match="distillation"):
        hard_distillation(
            Step(
                Batch(None, AGES, None),
                ModelOutput(torch.zeros(2, 1)),
                age_job().model,
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
    model = age_job().model
    model.head.weight.data.zero_()  # answers 55 always
    split = to_device(Split(cohort(2, 0).images, np.array([50.0, 70.0], np.float32)), "cpu")
    assert validate(model, split) == pytest.approx(
        {"validation_mae": 10.0, "validation_loss": 0.5}
    )  # errors 5 and 15; deviation 20


def test_it_learns_the_age_of_balls():
    settings = Training(epochs=16, batch=8, learning_rate=5e-3, log_every=4, warmup_epochs=1)
    values = [metrics.values for metrics in fit(age_job(), settings, 0, CPU)]
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
    attacked = [metrics.values for metrics in fit(age_job(), settings, 0, CPU)]
    plain = [
        metrics.values
        for metrics in fit(age_job(), settings.model_copy(update={"adversarial": None}), 0, CPU)
    ]
    assert attacked[-1]["train_mae"] > plain[-1]["train_mae"]


def sets(count: int, seed: int = 0) -> Split:
    """Left half bright: class 0; right half bright: class 1; both may be."""
    random = np.random.default_rng(seed)
    labels = np.array([[1, 0], [0, 1], [1, 1]], np.uint8)[np.arange(count) % 3]
    pixels = (
        random.integers(0, 60, (count, 1, 8, 8)) + 180 * labels.repeat(4, axis=1)[:, None, None, :]
    )
    return Split(pixels.astype(np.uint8), labels)


DENSE = Method()
SETS = IMAGE.model_copy(update={"task": MultiLabel(classes=("left", "right"))})


def several(method: Method = DENSE, seed: int = 0):
    return task(method, seed, image=SETS)._replace(
        train=to_device(sets(50), "cpu"), validation=to_device(sets(20, 1), "cpu")
    )


def test_the_loss_of_label_sets_by_hand():
    # σ(ln 3) = 3/4, σ(−ln 3) = 1/4. First image, labels (1, 0): 2 ln(4/3). Second, labels (1, 1):
    # ln(4/3) + ln 4. Mean of the sums.
    logits = torch.tensor([[3.0, 1 / 3], [3.0, 1 / 3]]).log().requires_grad_(True)
    labels = torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8)
    loss = SETS.task.loss(logits, labels)
    assert float(loss.detach()) == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 2)
    loss.backward()  # (σ − y) / images
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25], [-0.25, -0.75]]) / 2)


def test_the_loss_does_not_shrink_with_the_classes_or_the_batch():
    # logits 0: ln 2 for each class, summed; the batch is averaged
    for count, classes in ((1, 2), (7, 2), (7, 10)):
        every = MultiLabel(classes=tuple(map(str, range(classes))))
        labels = torch.ones(count, classes, dtype=torch.uint8)
        loss = every.loss(torch.zeros(count, classes), labels)
        assert float(loss) == pytest.approx(classes * math.log(2))


def test_one_class_and_shares_keep_the_softmax():
    logits = torch.tensor([[math.log(3), 0.0]])
    assert float(IMAGE.task.loss(logits, torch.tensor([0]))) == pytest.approx(math.log(4 / 3))
    assert float(IMAGE.task.loss(logits, torch.tensor([[0.5, 0.5]]))) == pytest.approx(
        (math.log(4 / 3) + math.log(4)) / 2
    )


def test_it_learns_both_labels_and_reports_precision_at_1():
    made = several()
    found = [
        metrics.values for metrics in fit(made, SETTINGS.model_copy(update={"epochs": 30}), 0, CPU)
    ]
    assert (
        found[-1]["validation_accuracy"] > 0.9
        and found[-1]["validation_loss"] < found[0]["loss"] / 2
        and found[-1]["train_accuracy"] <= 1
    )
    batch = training_batch(made, SETTINGS, 0, 0)
    said = made.model.eval()(batch.images).prediction > 0
    assert (said == batch.labels.bool()).double().mean() > 0.9


def test_validation_is_precision_at_1_and_the_summed_loss():
    made = several()
    with torch.no_grad():
        made.model.head.weight.zero_()
        made.model.head.bias.copy_(torch.tensor([math.log(3), -math.log(3)]))  # always class 0
    found = validate(made.model, made.validation)
    # 20 images: labels (1,0) 7 times, (0,1) 7 times, (1,1) 6 times. Class 0 is right 13 times.
    assert found["validation_accuracy"] == pytest.approx(13 / 20)
    near, far = math.log(4 / 3), math.log(4)
    assert found["validation_loss"] == pytest.approx(
        (7 * 2 * near + 7 * 2 * far + 6 * (near + far)) / 20, rel=1e-5
    )


def test_two_views_have_the_labels_twice():
    batch = training_batch(several(PRC), SHIFTED, 0, 0)
    assert (
        batch.labels.shape == (16, 2)
        and batch.labels.dtype == torch.uint8
        and torch.equal(batch.labels[:8], batch.labels[8:])
    )
    assert list(fit(several(PRC), SHIFTED, 0, CPU))[-1].step == 12


def test_what_has_no_meaning_for_label_sets_is_refused():
    mixed = Training.model_validate(SETTINGS.model_dump() | {"mix": {"mixup": 1.0}})
    with pytest.raises(UserError, match="several labels each; allowed: mix: null"):
        list(fit(several(), mixed, 0, CPU))
    with pytest.raises(UserError, match="label_smoothing: found 0.1"):
        list(fit(several()._replace(objective=Objective(label_smoothing=0.1)), SETTINGS, 0, CPU))
    with pytest.raises(UserError, match="distillation: these images have several labels each"):
        made = step([[1, 1]], [[[0.0, 1.0]]], teacher=[[0.0, 1.0]], image=SETS)
        Objective(distillation=0.5).terms(made)
    assert list(fit(task(), mixed, 0, CPU))[-1].step == 12 and images(2).labels.ndim == 1
