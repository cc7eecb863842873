"""The frozen teacher and its routers; the loss of a step: labels, teacher, two views. Training on
real numbers: the loss, what is reported, and what is refused. Training on images with several
labels each.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.routing_records import Batch, Guidance, ModelOutput, ObjectiveInputs
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.tasks.multi_label import MultiLabel
from moecore.training.artifacts import load_guide, load_model, save_guide, save_model, save_no_guide
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import (
    GuidedModel,
    aligned_teacher_blocks,
    attach_required_guide,
    build_guide,
)
from moecore.training.job import Objective, TrainingJob, training_batch
from moecore.training.loop import iterate_training, validation_metrics
from moecore.training.method import Method, TeacherRouter
from moecore.training.phase_trainings import iterate_router_fit
from moecore.training.settings import TeacherRouterFit, Training
from tests.training.small import (
    CPU,
    IMAGE,
    SETTINGS,
    VMOE,
    assert_same_weights,
    images,
    stop_training,
    task,
)
from tests.volumes import VOLUMES, ball

TGR = Method(
    router={"kind": "noisy_top_k", "k": 2},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "router_kl"}],
)


JOINT = TGR.model_copy(
    update={"teacher_router": TeacherRouter(fit="joint", load=0.1, entropy=0.01)}
)
ORACLE = Method(
    router={"kind": "teacher_routed", "k": 2},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "router_kl"}],
    teacher_router={"fit": "joint"},
)


def guide(depth: int = 4, method: Method = TGR):
    torch.manual_seed(0)
    return build_guide(Vit(patch=4, width=32, depth=depth, heads=2).build(IMAGE), method, (4,))


def test_blocks_are_aligned_by_relative_depth():
    # the paper's layers 8, 10, 12 of 12 are 7, 9, 11 from 0; of a teacher with 24 blocks they are
    # its 16th, 20th and 24th
    assert aligned_teacher_blocks((7, 9, 11), (12,), (12,)) == (7, 9, 11)
    assert aligned_teacher_blocks((7, 9, 11), (12,), (24,)) == (15, 19, 23)


def test_fitting_makes_it_confident_and_balanced_and_leaves_the_teacher_alone():
    made = guide()
    before = {name: value.clone() for name, value in made.teacher.state_dict().items()}
    settings = TeacherRouterFit(steps=60, batch=16, learning_rate=0.05)
    steps = list(
        iterate_router_fit(
            made, task().train, TeacherRouter(load=1.0, entropy=0.1), settings, seed=0
        )
    )
    (_, first), (last_step, last) = steps[0], steps[-1]
    assert last_step == 60 and last["entropy"] < first["entropy"] and last["balance"] < 0.2
    assert all(torch.equal(one, before[name]) for name, one in made.teacher.state_dict().items())


def test_a_guided_student_comes_nearer_to_its_guide():
    made = task(TGR, guide=guide().requires_grad_(False))
    terms = [
        one.values
        for one in iterate_training(made, SETTINGS.model_copy(update={"epochs": 6}), 0, CPU)
    ]
    assert terms[-1]["router_kl"] < terms[0]["router_kl"]


def test_saved_and_loaded_it_says_the_same_also_at_another_resolution(tmp_path):
    made, images = guide(depth=8), torch.rand(2, 1, 8, 8)
    save_guide(tmp_path, made)
    loaded = load_guide(tmp_path)
    assert made.blocks == (3, 7) == loaded.blocks
    for ours, theirs in zip(loaded(images).probs, made(images).probs, strict=True):
        assert torch.equal(ours, theirs)
    larger = load_guide(tmp_path, IMAGE.model_copy(update={"size": 16}))
    assert larger(torch.rand(2, 1, 16, 16)).probs[0].shape == (2, 17, 4)
    # one more channel says the truth of the images of a later phase
    told = load_guide(tmp_path, IMAGE.model_copy(update={"truth": 3}))
    assert torch.equal(
        told(torch.cat([images, torch.ones(2, 1, 8, 8)], 1)).prediction, made(images).prediction
    )


def test_a_method_without_teacher_has_no_guide(tmp_path):
    save_no_guide(tmp_path)
    assert load_guide(tmp_path) is None


def test_fitted_routers_stay_and_joint_ones_learn_while_the_teacher_never_does():
    for method, learns in ((TGR, False), (JOINT, True)):
        made = task(method, guide=guide(method=method))
        before = {name: value.clone() for name, value in made.guide.state_dict().items()}
        terms = [metrics.values for metrics in iterate_training(made, SETTINGS, 0, CPU)]
        moved = {
            name
            for name, value in made.guide.state_dict().items()
            if not torch.equal(value, before[name])
        }
        assert moved == ({"routers.0", "routers.1"} if learns else set())
        assert ("teacher_router" in terms[0]) == learns


def test_joint_training_stopped_and_resumed_ends_bit_equal_in_student_and_teacher_router(tmp_path):
    whole = task(JOINT, guide=guide(method=JOINT))
    list(iterate_training(whole, SETTINGS, 0, CPU))
    stop_training(task(JOINT, guide=guide(method=JOINT)), SETTINGS, tmp_path, 2)
    resumed = task(JOINT, seed=9, guide=guide(method=JOINT))
    list(iterate_training(resumed, SETTINGS, 0, CPU, Checkpoint(tmp_path)))
    assert_same_weights(resumed, whole)


def test_a_student_routed_by_its_teacher_carries_it_along(tmp_path):
    made = task(ORACLE, guide=guide(method=ORACLE))
    with pytest.raises(UserError, match="teacher"):
        made.model(torch.rand(2, 1, 8, 8))
    before = made.guide.routers[0].detach().clone()
    list(iterate_training(made, SETTINGS, 0, CPU))
    assert not torch.equal(
        made.guide.routers[0], before
    )  # the task and the balance reach the teacher's router
    alone, images = attach_required_guide(made.model, made.guide).eval(), torch.rand(3, 1, 8, 8)
    assert isinstance(alone, GuidedModel)
    save_model(tmp_path, alone)
    loaded, expected = load_model(tmp_path)(images), alone(images)
    assert torch.equal(loaded.prediction, expected.prediction)
    teacher = made.guide(images).probs
    for record, probs in zip(expected.routing, teacher, strict=True):
        assert torch.equal(
            record.chosen,
            torch.zeros_like(record.chosen).scatter(-1, probs.topk(2, dim=-1).indices, True),
        )


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

    def loss_of(output, *rest):
        return image.task.loss(output.prediction, *rest)

    return ObjectiveInputs(
        Batch(blank, torch.tensor(labels), blank),
        ModelOutput(torch.stack(heads).mean(0), (), heads),
        SimpleNamespace(image=image, task_loss=loss_of),
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
    torch.testing.assert_close(
        Objective().terms(ObjectiveInputs(batch, output, made.model))["task"], expected
    )


def test_two_views_are_never_mixed():
    settings = type(SETTINGS).model_validate(SHIFTED.model_dump() | {"mix": {"mixup": 0.8}})
    assert training_batch(task(PRC), settings, 0, 0).labels.ndim == 1
    assert training_batch(task(VMOE), settings, 0, 0).labels.ndim == 2


AGES = torch.tensor([40.0, 60.0])


def cohort(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


def age_job(seed: int = 0, **settings) -> TrainingJob:
    torch.manual_seed(seed)
    model = Vit3d(
        patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled", **settings
    ).build(VOLUMES)
    return TrainingJob(
        model,
        load_split_where_it_fits(cohort(32, 0), "cpu"),
        load_split_where_it_fits(cohort(12, 100), "cpu"),
        Objective(),
    )


def test_the_loss_of_ages_is_the_mean_absolute_error_in_deviations():
    # errors 4 and 10 years; the model's deviation is 20: (4 + 10) / 2 / 20
    answers = ModelOutput(torch.tensor([[44.0], [50.0]]))
    terms = Objective().terms(ObjectiveInputs(Batch(None, AGES, None), answers, age_job().model))
    assert float(terms["task"]) == pytest.approx(0.35)


def test_validation_is_in_years_and_its_loss_in_deviations():
    model = age_job().model
    model.head.weight.data.zero_()  # answers 55 always
    split = load_split_where_it_fits(
        Split(cohort(2, 0).images, np.array([50.0, 70.0], np.float32)), "cpu"
    )
    assert validation_metrics(model, split) == pytest.approx(
        {"validation_mae": 10.0, "validation_loss": 0.5}
    )  # errors 5 and 15; deviation 20


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
        train=load_split_where_it_fits(sets(50), "cpu"),
        validation=load_split_where_it_fits(sets(20, 1), "cpu"),
    )


def test_validation_is_precision_at_1_and_the_summed_loss():
    made = several()
    with torch.no_grad():
        made.model.head.weight.zero_()
        made.model.head.bias.copy_(torch.tensor([math.log(3), -math.log(3)]))  # always class 0
    found = validation_metrics(made.model, made.validation)
    # 20 images: labels (1,0) 7 times, (0,1) 7 times, (1,1) 6 times. Class 0 is right 13 times.
    assert found["validation_accuracy"] == pytest.approx(13 / 20)
    near, far = math.log(4 / 3), math.log(4)
    assert found["validation_loss"] == pytest.approx(
        (7 * 2 * near + 7 * 2 * far + 6 * (near + far)) / 20, rel=1e-5
    )


def test_what_has_no_meaning_for_label_sets_is_refused():
    mixed = Training.model_validate(SETTINGS.model_dump() | {"mix": {"mixup": 1.0}})
    with pytest.raises(UserError, match="several labels each; allowed: mix: null"):
        list(iterate_training(several(), mixed, 0, CPU))
    with pytest.raises(UserError, match="label_smoothing: found 0.1"):
        list(
            iterate_training(
                several()._replace(objective=Objective(label_smoothing=0.1)), SETTINGS, 0, CPU
            )
        )
    with pytest.raises(UserError, match="distillation: these images have several labels each"):
        made = step([[1, 1]], [[[0.0, 1.0]]], teacher=[[0.0, 1.0]], image=SETS)
        Objective(distillation=0.5).terms(made)
    assert (
        list(iterate_training(task(), mixed, 0, CPU))[-1].step == 12 and images(2).labels.ndim == 1
    )
