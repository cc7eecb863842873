import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.training.regularizers.router_kl import RouterKl, router_kl
from tests.training.regularizers.steps import record, step

TEACHER = [[[0.5, 0.5], [1.0, 0.0]]]
STUDENT = [[[0.25, 0.75], [0.25, 0.75]]]
# Token 1: ½ ln(½ / ¼) + ½ ln(½ / ¾) = ½ ln 2 + ½ ln ⅔ = ½ ln(4/3).  Token 2: 1·ln(1 / ¼) + 0 = ln
# 4.  Mean over the two tokens:
VALUE = (0.5 * math.log(4 / 3) + math.log(4)) / 2


def test_value_by_hand():
    assert router_kl(
        teacher=torch.tensor(TEACHER), student=torch.tensor(STUDENT)
    ).item() == pytest.approx(VALUE)


def test_layers_are_averaged_and_the_weight_is_left_to_the_objective():
    two = step(
        record(probs=STUDENT), record(probs=TEACHER), guidance=[TEACHER, TEACHER]
    )  # the second layer agrees: 0
    assert RouterKl()(two).item() == pytest.approx(VALUE / 2)


def test_gradient_is_student_minus_teacher_and_the_teacher_gets_none():
    # d KL / d logits = (p_s − p_t) / tokens for a softmax student.
    logits = torch.randn(2, 3, 4, requires_grad=True)
    teacher_logits = torch.randn(2, 3, 4, requires_grad=True)
    teacher = teacher_logits.softmax(-1)
    loss = router_kl(teacher=teacher, student=logits.softmax(-1))
    ours, theirs = torch.autograd.grad(loss, (logits, teacher_logits), allow_unused=True)
    torch.testing.assert_close(ours, (logits.softmax(-1) - teacher).detach() / 6)
    assert theirs is None


def test_probabilities_of_zero_stay_finite():
    student = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss = router_kl(teacher=torch.tensor([[[0.5, 0.5]]]), student=student)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()


def test_it_acts_until_its_share_of_the_training():
    half = RouterKl(until=0.5)
    assert half(
        step(record(probs=STUDENT), guidance=[TEACHER], progress=0.499)
    ).item() == pytest.approx(VALUE)
    assert half(step(record(probs=STUDENT), guidance=[TEACHER], progress=0.5)).item() == 0
    assert RouterKl()(
        step(record(probs=STUDENT), guidance=[TEACHER], progress=0.999)
    ).item() == pytest.approx(VALUE)


def test_missing_guidance_is_explained():
    with pytest.raises(UserError, match="no teacher guidance"):
        RouterKl()(step(record(probs=STUDENT)))
    with pytest.raises(UserError, match="guides 1 MoE layers and the student has 2"):
        RouterKl()(step(record(probs=STUDENT), record(probs=STUDENT), guidance=[TEACHER]))
    assert RouterKl().weight == 5.0 and "guidance" in RouterKl.needs


def test_the_teachers_tokens_are_matched_to_the_students():
    # A student with a distillation token behind CLS: both follow the teacher's CLS, so copying its
    # row gives divergence 0.
    teacher = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    student = torch.cat([teacher[:, :1], teacher], dim=1)
    assert RouterKl()(step(record(probs=student), guidance=[teacher])).item() == pytest.approx(0)
    with pytest.raises(UserError, match="teacher guidance: the teacher's routing has shape"):
        RouterKl()(step(record(probs=student[..., :1]), guidance=[teacher]))
