"""The loss of a step: labels, the teacher's decisions, two views."""

import math
from types import SimpleNamespace

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import Batch, Guidance, ModelOutput, Step
from moecore.nn.backbones.vit import Vit
from moecore.training.job import training_batch
from moecore.training.loop import fit
from moecore.training.method import Method
from moecore.training.objective import Objective
from tests.training.small import CPU, IMAGE, SETTINGS, VMOE, task

SHIFTED = SETTINGS.model_copy(update={"views": type(SETTINGS.views)(shift=1)})
PRC = Method(
    router={"kind": "noisy_top_k"},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "pairwise_consistency"}],
)


def step(labels, heads, teacher=None, image=IMAGE):
    """A step of a model for images like ``image``, which gave ``heads``."""
    heads = tuple(torch.tensor(head, dtype=torch.float32) for head in heads)
    guidance = None if teacher is None else Guidance(torch.tensor(teacher), ())
    blank = torch.zeros(())
    return Step(
        Batch(blank, torch.tensor(labels), blank),
        ModelOutput(torch.stack(heads).mean(0), (), heads),
        SimpleNamespace(image=image),
        guidance,
    )


def test_hard_distillation_by_hand():
    # class head: logits (ln 3, 0), label 0: -ln(3/4) = ln(4/3). Distillation head: (0, ln 9),
    # teacher says class 1: -ln(9/10). half of each: (ln(4/3) + ln(10/9)) / 2. The teacher's own
    # logits count only through their order.
    made = step([0], [[[math.log(3), 0.0]], [[0.0, math.log(9)]]], teacher=[[0.1, 7.0]])
    objective = Objective(distillation=0.5)
    terms = objective.terms(made)
    assert float(terms["task"]) == pytest.approx(math.log(4 / 3)) and float(
        terms["distillation"]
    ) == pytest.approx(math.log(10 / 9))
    assert float(objective.total(terms)) == pytest.approx((math.log(4 / 3) + math.log(10 / 9)) / 2)
    quarter = Objective(distillation=0.25)
    assert float(quarter.total(quarter.terms(made))) == pytest.approx(
        0.75 * math.log(4 / 3) + 0.25 * math.log(10 / 9)
    )


def test_with_one_head_it_learns_both_and_without_distillation_the_mean_of_the_heads_counts():
    one = step([0], [[[math.log(3), 0.0]]], teacher=[[0.1, 7.0]])
    assert float(Objective(distillation=0.5).terms(one)["distillation"]) == pytest.approx(
        math.log(4)
    )
    two = step([0], [[[math.log(3), 0.0]], [[math.log(3), 0.0]]])
    assert float(Objective().terms(two)["task"]) == pytest.approx(
        math.log(4 / 3)
    ) and "distillation" not in Objective().terms(two)


def test_a_missing_or_unfitting_teacher_is_an_error():
    with pytest.raises(UserError, match="no teacher in this step"):
        Objective(distillation=0.5).terms(step([0], [[[0.0, 1.0]]]))
    with pytest.raises(UserError, match="knows 3 classes, the student 2"):
        Objective(distillation=0.5).terms(step([0], [[[0.0, 1.0]]], teacher=[[0.0, 1.0, 2.0]]))


def test_distillation_trains_the_distillation_head_towards_the_teacher():
    from moecore.training.guide import build_guide

    method = VMOE.model_copy(update={"distillation": 0.5})
    torch.manual_seed(0)
    teacher = Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE)
    made = task(method, guide=build_guide(teacher, method, 4))
    made = made._replace(
        model=Vit(patch=4, width=16, depth=4, heads=2, pooling="class+distillation").build(
            IMAGE, method.moe
        )
    )
    found = [
        metrics.values["distillation"]
        for metrics in fit(made, SETTINGS.model_copy(update={"epochs": 4}), 0, CPU)
    ]
    assert found[-1] < found[0]


def test_two_views_are_the_same_images_moved_differently_and_both_are_classified():
    made = task(PRC)
    batch = training_batch(made, SHIFTED, 0, 3)
    first, second = batch.affines.chunk(2)
    assert batch.views == 2 and batch.images.shape == (16, 1, 8, 8) and batch.labels.shape == (16,)
    assert torch.equal(batch.labels[:8], batch.labels[8:]) and not torch.equal(first, second)
    alone = training_batch(task(VMOE), SHIFTED, 0, 3)
    assert torch.equal(
        batch.images[:8], alone.images
    )  # the first view is the one that a method with one view sees
    # cross-entropy on both views: the mean over all 16
    output = made.model(batch.images)
    expected = torch.nn.functional.cross_entropy(
        output.prediction, torch.cat([alone.labels, alone.labels])
    )
    torch.testing.assert_close(Objective().terms(Step(batch, output, made.model))["task"], expected)


def test_two_views_are_never_mixed():
    settings = type(SETTINGS).model_validate(SHIFTED.model_dump() | {"mix": {"mixup": 0.8}})
    assert training_batch(task(PRC), settings, 0, 0).labels.ndim == 1
    assert training_batch(task(VMOE), settings, 0, 0).labels.ndim == 2


def test_pairwise_consistency_trains():
    found = [
        metrics.values
        for metrics in fit(task(PRC), SHIFTED.model_copy(update={"epochs": 4}), 0, CPU)
    ]
    assert found[-1]["validation_accuracy"] > 0.9 and found[0]["train_accuracy"] <= 1
