"""The terms that need a teacher, and those that are told the region: what routing is taught."""

import math
from types import SimpleNamespace

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import Batch, ModelOutput, RoutingRecord, Step
from moecore.training.regularizers.region_routing import RegionRouting, region_routing
from moecore.training.regularizers.router_kl import RouterKl, router_kl
from moecore.training.regularizers.teacher_router import TeacherRouter, teacher_router_terms
from tests.training.small import record, step

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


def test_router_kl_without_guidance_is_explained():
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


# Mean probs (¾, ¼): mean ½, population variance 1/16, CV² = ¼. Entropies ln 2 and 0: mean ½ ln 2.
TEACHER_PROBS = [[[0.5, 0.5], [1.0, 0.0]]]


def test_terms_by_hand():
    terms = teacher_router_terms(
        probs=(torch.tensor(TEACHER_PROBS), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    )  # balanced and sure: 0 and 0
    assert terms["balance"].item() == pytest.approx(0.25) and terms[
        "entropy"
    ].item() == pytest.approx(0.5 * math.log(2))


def test_factors_and_layers():
    guided = step(guidance=[TEACHER_PROBS, TEACHER_PROBS])
    assert TeacherRouter(balance=0.3, entropy=0.7, weight=9.0)(guided).item() == pytest.approx(
        2 * (0.3 * 0.25 + 0.7 * 0.5 * math.log(2))
    )
    assert TeacherRouter().model_dump() == {
        "kind": "teacher_router",
        "weight": 1.0,
        "balance": 0.005,
        "entropy": 0.005,
    }
    assert TeacherRouter.needs == {"guidance"}


def test_only_the_teachers_probs_are_read():
    student = torch.tensor(TEACHER_PROBS, requires_grad=True)
    teacher = torch.randn(1, 2, 2, requires_grad=True)
    TeacherRouter()(step(record(probs=student), guidance=[teacher.softmax(-1)])).backward()
    assert student.grad is None and teacher.grad.abs().sum() > 0


def test_gradient():
    probs = torch.rand(2, 3, 4, dtype=torch.float64).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda p: tuple(teacher_router_terms(probs=(p,)).values()), probs
    )


@pytest.mark.parametrize(
    "unguided", [step(record(probs=TEACHER_PROBS)), step(record(probs=TEACHER_PROBS), guidance=[])]
)
def test_teacher_router_without_guidance_is_explained(unguided):
    with pytest.raises(UserError, match="teacher_router: there is no teacher guidance"):
        TeacherRouter()(unguided)


def step_of(scores, belongs):
    record = RoutingRecord(*[scores] * 5)
    return Step(
        Batch(None, None, None, 1, belongs),
        ModelOutput(None, (record, record._replace(logits=3 * scores))),
        SimpleNamespace(),
    )


def test_by_hand():
    # token 0 belongs to expert 1: scores 0, 0.1 / 0.1 = 0, 1 → −log(e / (1 + e)); token 1 to none;
    # token 2 to expert 0: 0.2, 0 → 2, 0
    scores = torch.tensor([[[0.0, 0.1], [5.0, 0.0], [0.2, 0.0]]])
    belongs = torch.tensor([[1, -1, 0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert float(region_routing(scores=scores, belongs=belongs, temperature=0.1)) == pytest.approx(
        expected
    )
    # the second layer's scores are three times as large; the mean of both layers
    steep = (math.log(1 + math.exp(-3)) + math.log(1 + math.exp(-6))) / 2
    assert float(RegionRouting()(step_of(scores, belongs))) == pytest.approx((expected + steep) / 2)


def test_no_label_no_loss():
    scores = torch.rand(1, 3, 2, requires_grad=True)
    loss = region_routing(scores=scores, belongs=torch.full((1, 3), -1), temperature=0.1)
    loss.backward()
    assert loss == 0 and (scores.grad == 0).all()
    assert RegionRouting()(step_of(torch.rand(1, 3, 2), None)) == 0


def test_its_gradient_raises_the_expert_and_lowers_the_others():
    scores = torch.zeros(1, 1, 4, requires_grad=True)
    region_routing(scores=scores, belongs=torch.tensor([[1]]), temperature=0.5).backward()
    # softmax is 1/4 each; (1/4 − [e = 1]) / temperature
    torch.testing.assert_close(scores.grad[0, 0], torch.tensor([0.5, -1.5, 0.5, 0.5]))


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="no MoE layers"):
        RegionRouting()(Step(Batch(None, None, None), ModelOutput(None), None))
