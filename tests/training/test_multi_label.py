"""Training on images with several labels each."""

import math

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.data.loader import to_device
from moecore.data.prepared import Split
from moecore.tasks.multi_label import MultiLabel
from moecore.training.loop import fit, training_batch, validate
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.settings import Training
from tests.training.small import CPU, IMAGE, SETTINGS, images, task
from tests.training.test_objective import PRC, SHIFTED, step


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


def test_the_loss_by_hand():
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


def test_what_has_no_meaning_is_refused():
    mixed = Training.model_validate(SETTINGS.model_dump() | {"mix": {"mixup": 1.0}})
    with pytest.raises(UserError, match="several labels each; allowed: mix: null"):
        list(fit(several(), mixed, 0, CPU))
    with pytest.raises(UserError, match="label_smoothing: found 0.1"):
        list(fit(several()._replace(objective=Objective(label_smoothing=0.1)), SETTINGS, 0, CPU))
    with pytest.raises(UserError, match="distillation: these images have several labels each"):
        made = step([[1, 1]], [[[0.0, 1.0]]], teacher=[[0.0, 1.0]], image=SETS)
        Objective(distillation=0.5).terms(made)
    assert list(fit(task(), mixed, 0, CPU))[-1].step == 12 and images(2).labels.ndim == 1
