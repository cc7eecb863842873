import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.training.regularizers.teacher_router import TeacherRouter, teacher_router_terms
from tests.training.regularizers.steps import record, step

# Mean probs (¾, ¼): mean ½, population variance 1/16, CV² = ¼. Entropies ln 2 and 0: mean ½ ln 2.
PROBS = [[[0.5, 0.5], [1.0, 0.0]]]


def test_terms_by_hand():
    terms = teacher_router_terms(
        probs=(torch.tensor(PROBS), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    )  # balanced and sure: 0 and 0
    assert terms["balance"].item() == pytest.approx(0.25) and terms[
        "entropy"
    ].item() == pytest.approx(0.5 * math.log(2))


def test_factors_and_layers():
    guided = step(guidance=[PROBS, PROBS])
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
    student = torch.tensor(PROBS, requires_grad=True)
    teacher = torch.randn(1, 2, 2, requires_grad=True)
    TeacherRouter()(step(record(probs=student), guidance=[teacher.softmax(-1)])).backward()
    assert student.grad is None and teacher.grad.abs().sum() > 0


def test_gradient():
    probs = torch.rand(2, 3, 4, dtype=torch.float64).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda p: tuple(teacher_router_terms(probs=(p,)).values()), probs
    )


@pytest.mark.parametrize(
    "unguided", [step(record(probs=PROBS)), step(record(probs=PROBS), guidance=[])]
)
def test_missing_guidance_is_explained(unguided):
    with pytest.raises(UserError, match="teacher_router: there is no teacher guidance"):
        TeacherRouter()(unguided)
