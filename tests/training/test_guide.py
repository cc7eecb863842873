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
from moecore.training.guide import GuidedModel, aligned_teacher_blocks, build_guide
from moecore.training.job import Objective, training_batch
from moecore.training.loop import iterate_training, validation_metrics
from moecore.training.method import Method, TeacherRouter
from moecore.training.phase_trainings import iterate_router_fit
from moecore.training.settings import TeacherRouterFit, Training
from tests.training.small import CPU, IMAGE, SETTINGS, VMOE, assert_resumes, task
from tests.volumes import VOLUMES, ball

NOISY = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": {"kind": "mlp", "number": 4}}
TGR = Method(**NOISY, regularizers=[{"kind": "router_kl"}])
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
    weights = TeacherRouter(load=1.0, entropy=0.1)
    (_, first), *_, (last_step, last) = iterate_router_fit(made, task().train, weights, settings, 0)
    assert last_step == 60 and last["entropy"] < first["entropy"] and last["balance"] < 0.2
    assert all(torch.equal(one, before[name]) for name, one in made.teacher.state_dict().items())


def test_a_guided_student_comes_nearer_to_its_guide():
    made = task(TGR, guide=guide().requires_grad_(False))
    settings = SETTINGS.model_copy(update={"epochs": 6})
    first, *_, last = iterate_training(made, settings, 0, CPU)
    assert last.values["router_kl"] < first.values["router_kl"]


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
    with_truth = torch.cat([images, torch.ones(2, 1, 8, 8)], 1)
    assert torch.equal(told(with_truth).prediction, made(images).prediction)
    save_no_guide(tmp_path)
    assert load_guide(tmp_path) is None


def test_fitted_routers_stay_and_joint_ones_learn_while_the_teacher_never_does():
    for method, learns in ((TGR, False), (JOINT, True)):
        made = task(method, guide=guide(method=method))
        before = {name: value.clone() for name, value in made.guide.state_dict().items()}
        first, *_ = iterate_training(made, SETTINGS, 0, CPU)
        after = made.guide.state_dict()
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == ({"routers.0", "routers.1"} if learns else set())
        assert ("teacher_router" in first.values) == learns


def test_joint_training_stopped_and_resumed_ends_bit_equal_in_student_and_teacher_router(tmp_path):
    assert_resumes(lambda: task(JOINT, guide=guide(method=JOINT)), SETTINGS, tmp_path, 2)


def test_a_student_routed_by_its_teacher_carries_it_along(tmp_path):
    made = task(ORACLE, guide=guide(method=ORACLE))
    with pytest.raises(UserError, match="teacher"):
        made.model(torch.rand(2, 1, 8, 8))
    before = made.guide.routers[0].detach().clone()
    list(iterate_training(made, SETTINGS, 0, CPU))
    # the task and the balance reach the teacher's router
    assert not torch.equal(made.guide.routers[0], before)
    alone, images = made.complete_model.eval(), torch.rand(3, 1, 8, 8)
    assert isinstance(alone, GuidedModel)
    save_model(tmp_path, alone)
    loaded, expected = load_model(tmp_path)(images), alone(images)
    assert torch.equal(loaded.prediction, expected.prediction)
    teacher = made.guide(images).probs
    for record, probs in zip(expected.routing, teacher, strict=True):
        chosen = record.chosen.gather(-1, probs.topk(2, dim=-1).indices)
        assert chosen.all() and record.chosen.sum() == chosen.numel()


SHIFTED = SETTINGS.model_copy(update={"views": type(SETTINGS.views)(shift=1)})
PRC = Method(**NOISY, regularizers=[{"kind": "pairwise_consistency"}])


def step(labels, heads, teacher=None, image=IMAGE):
    """A step of a model for images like ``image``, which gave ``heads``."""
    heads = tuple(torch.tensor(head, dtype=torch.float32) for head in heads)
    guidance = None if teacher is None else Guidance(torch.tensor(teacher), ())
    blank = torch.zeros(())
    batch = Batch(blank, torch.tensor(labels), blank)
    output = ModelOutput(torch.stack(heads).mean(0), (), heads)

    def loss_of(output, *rest):
        return image.task.loss(output.prediction, *rest)

    model = SimpleNamespace(image=image, task_loss=loss_of)
    return ObjectiveInputs(batch, output, model, guidance)


def test_hard_distillation_by_hand():
    # class head: logits (ln 3, 0), label 0: -ln(3/4) = ln(4/3). Distillation head: (0, ln 9),
    # teacher says class 1: -ln(9/10). half of each: (ln(4/3) + ln(10/9)) / 2. The teacher's own
    # logits count only through their order.
    made = step([0], [[[math.log(3), 0.0]], [[0.0, math.log(9)]]], teacher=[[0.1, 7.0]])
    ours, teachers = math.log(4 / 3), math.log(10 / 9)
    for share in (0.5, 0.25):
        objective = Objective(distillation=share)
        terms = objective.terms(made)
        found = {name: float(term) for name, term in terms.items()}
        assert found == pytest.approx({"task": ours, "distillation": teachers})
        expected = (1 - share) * ours + share * teachers
        assert float(objective.total(terms)) == pytest.approx(expected)


def test_with_one_head_it_learns_both_and_without_distillation_the_mean_of_the_heads_counts():
    one = step([0], [[[math.log(3), 0.0]]], teacher=[[0.1, 7.0]])
    terms = Objective(distillation=0.5).terms(one)
    assert float(terms["distillation"]) == pytest.approx(math.log(4))
    two = Objective().terms(step([0], [[[math.log(3), 0.0]], [[math.log(3), 0.0]]]))
    assert float(two["task"]) == pytest.approx(math.log(4 / 3)) and "distillation" not in two


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
    # the first view is the one that a method with one view sees
    assert torch.equal(batch.images[:8], alone.images)
    # cross-entropy on both views: the mean over all 16
    output, labels = made.model(batch.images), torch.cat([alone.labels, alone.labels])
    expected = torch.nn.functional.cross_entropy(output.prediction, labels)
    terms = Objective().terms(ObjectiveInputs(batch, output, made.model))
    torch.testing.assert_close(terms["task"], expected)


def test_two_views_are_never_mixed():
    settings = type(SETTINGS).model_validate(SHIFTED.model_dump() | {"mix": {"mixup": 0.8}})
    assert training_batch(task(PRC), settings, 0, 0).labels.ndim == 1
    assert training_batch(task(VMOE), settings, 0, 0).labels.ndim == 2


AGES = torch.tensor([40.0, 60.0])


def test_the_loss_of_ages_is_in_deviations_and_validation_in_years():
    torch.manual_seed(0)
    vit = Vit3d(patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled")
    model = vit.build(VOLUMES)
    # errors 4 and 10 years; the model's deviation is 20: (4 + 10) / 2 / 20
    answers = ModelOutput(torch.tensor([[44.0], [50.0]]))
    terms = Objective().terms(ObjectiveInputs(Batch(None, AGES, None), answers, model))
    assert float(terms["task"]) == pytest.approx(0.35)
    model.head.weight.data.zero_()  # answers 55 always: errors 5 and 15
    images = np.stack([ball(20.0, 0)[0], ball(90.0, 1)[0]])
    split = load_split_where_it_fits(Split(images, np.array([50.0, 70.0], np.float32)), "cpu")
    expected = {"validation_mae": 10.0, "validation_loss": 0.5}
    assert validation_metrics(model, split) == pytest.approx(expected)


def sets(count: int, seed: int = 0) -> Split:
    """Left half bright: class 0; right half bright: class 1; both may be."""
    random = np.random.default_rng(seed)
    labels = np.array([[1, 0], [0, 1], [1, 1]], np.uint8)[np.arange(count) % 3]
    bright = 180 * labels.repeat(4, axis=1)[:, None, None, :]
    pixels = random.integers(0, 60, (count, 1, 8, 8)) + bright
    return Split(pixels.astype(np.uint8), labels)


SETS = IMAGE.model_copy(update={"task": MultiLabel(classes=("left", "right"))})


def several():
    train, validation = (load_split_where_it_fits(sets(*of), "cpu") for of in ((50, 0), (20, 1)))
    return task(Method(), image=SETS)._replace(train=train, validation=validation)


def test_validation_is_precision_at_1_and_the_summed_loss():
    made = several()
    with torch.no_grad():
        made.model.head.weight.zero_()
        made.model.head.bias.copy_(torch.tensor([math.log(3), -math.log(3)]))  # always class 0
    found = validation_metrics(made.model, made.validation)
    # 20 images: labels (1,0) 7 times, (0,1) 7 times, (1,1) 6 times. Class 0 is right 13 times.
    assert found["validation_accuracy"] == pytest.approx(13 / 20)
    near, far = math.log(4 / 3), math.log(4)
    expected = (7 * 2 * near + 7 * 2 * far + 6 * (near + far)) / 20
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_what_has_no_meaning_for_label_sets_is_refused():
    mixed = Training.model_validate(SETTINGS.model_dump() | {"mix": {"mixup": 1.0}})
    with pytest.raises(UserError, match="several labels each; allowed: mix: null"):
        list(iterate_training(several(), mixed, 0, CPU))
    smooth = several()._replace(objective=Objective(label_smoothing=0.1))
    with pytest.raises(UserError, match="label_smoothing: found 0.1"):
        list(iterate_training(smooth, SETTINGS, 0, CPU))
    with pytest.raises(UserError, match="distillation: these images have several labels each"):
        made = step([[1, 1]], [[[0.0, 1.0]]], teacher=[[0.0, 1.0]], image=SETS)
        Objective(distillation=0.5).terms(made)
    assert list(iterate_training(task(), mixed, 0, CPU))[-1].step == 12
