"""Terms on the use of experts, by hand and over ranks; terms that need a teacher or regions."""

import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.statistics.intervals import squared_cv
from moecore.training.regularizers import simbal, switch_balance
from moecore.training.regularizers.entropy import Entropy, entropy
from moecore.training.regularizers.importance import Importance, importance
from moecore.training.regularizers.load import Load, load
from moecore.training.regularizers.region_routing import RegionRouting, region_routing_loss
from moecore.training.regularizers.router_kl import RouterKl, router_kl
from moecore.training.regularizers.teacher_router import TeacherRouter, balance_and_entropy_terms
from moecore.training.regularizers.truth_kl import truth_kl
from moecore.training.regularizers.z_loss import ZLoss, z_loss
from tests.training.small import record, step


def test_squared_cv_and_load_by_hand():
    # (1, 2, 3, 6): mean 3, population variance (4 + 1 + 0 + 9)/4 = 3.5: 3.5/9.
    assert squared_cv(torch.tensor([1.0, 2, 3, 6])).item() == pytest.approx(3.5 / 9)
    # Mean chances: 0.9, 0.4, 0.2. Mean 0.5, variance (0.16 + 0.01 + 0.09)/3 = 0.26/3: over 0.25 =
    # 1.04/3 = 0.34667.
    chances = torch.tensor([[[0.9, 0.3, 0.3], [0.9, 0.5, 0.1]]])
    assert load(chances=chances).item() == pytest.approx(1.04 / 3)


@pytest.mark.parametrize("term", [Importance(weight=7.0), Load(), ZLoss(), Entropy(weight=-0.5)])
def test_layers_are_summed(term):
    values = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]])
    layer = record(probs=values, load=values, logits=values)
    one = term(step(layer)).item()
    assert abs(one) > 1e-3 and term(step(layer, layer)).item() == pytest.approx(2 * one)


def test_importance_by_hand_whose_gradient_at_balance_is_zero():
    # Importance: 0.75 + 0.5 + 1 + 0.75 = 3 and 1. Mean 2, population variance ((3−2)² + (1−2)²)/2 =
    # 1: 1/2² = 0.25. The sample variance would give 0.5; per-image or per-token statistics would
    # give other values again.
    assert importance(
        probs=torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.75, 0.25]]])
    ).item() == pytest.approx(0.25)
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    importance(probs=logits.softmax(-1)).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


# Two tokens: logsumexp(ln 1, ln 3) = ln 4 and logsumexp(ln 2, ln 6) = ln 8.
LOGITS = [[[0.0, math.log(3)], [math.log(2), math.log(6)]]]


def test_z_loss_by_hand_and_of_large_logits():
    # (ln²4 + ln²8)/2 = (4 + 9)/2·ln²2
    assert z_loss(logits=torch.tensor(LOGITS)).item() == pytest.approx(6.5 * math.log(2) ** 2)
    large = z_loss(logits=torch.full((1, 1, 2), 1e4)).item()
    assert large == pytest.approx((1e4 + math.log(2)) ** 2)


# Tokens (½, ¼, ¼): ½ ln 2 + 2·¼ ln 4 = 1.5 ln 2, and (1, 0, 0): 0. Their mean:
PROBS = [[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]
ENTROPY = 0.75 * math.log(2)


def test_entropy_by_hand_and_finite_at_probabilities_of_zero():
    assert entropy(probs=torch.tensor(PROBS)).item() == pytest.approx(ENTROPY)
    probs = torch.tensor(PROBS, requires_grad=True)
    entropy(probs=probs).backward()
    assert probs.grad.isfinite().all()
    logits = torch.tensor([[[0.0, -1000.0]]], requires_grad=True)
    entropy(probs=logits.softmax(-1)).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))  # sure already


TEACHER = [[[0.5, 0.5], [1.0, 0.0]]]
STUDENT = [[[0.25, 0.75], [0.25, 0.75]]]
# Token 1: ½ ln(½ / ¼) + ½ ln(½ / ¾) = ½ ln 2 + ½ ln ⅔ = ½ ln(4/3).  Token 2: 1·ln(1 / ¼) + 0 = ln
# 4.  Mean over the two tokens:
VALUE = (0.5 * math.log(4 / 3) + math.log(4)) / 2


def test_value_by_hand_averaged_over_layers_without_the_weight():
    divergence = router_kl(teacher=torch.tensor(TEACHER), student=torch.tensor(STUDENT))
    assert divergence.item() == pytest.approx(VALUE)
    layers = record(probs=STUDENT), record(probs=TEACHER)  # the second agrees: 0
    term = RouterKl(weight=7.0)(step(*layers, guidance=[TEACHER, TEACHER]))
    assert term.item() == pytest.approx(VALUE / 2)


def test_gradient_is_student_minus_teacher_and_the_teacher_gets_none():
    # d KL / d logits = (p_s − p_t) / tokens for a softmax student.
    logits = torch.randn(2, 3, 4, requires_grad=True)
    teacher_logits = torch.randn(2, 3, 4, requires_grad=True)
    teacher = teacher_logits.softmax(-1)
    loss = router_kl(teacher=teacher, student=logits.softmax(-1))
    ours, theirs = torch.autograd.grad(loss, (logits, teacher_logits), allow_unused=True)
    torch.testing.assert_close(ours, (logits.softmax(-1) - teacher).detach() / 6)
    assert theirs is None


def test_router_kl_is_finite_at_zero_acts_until_its_share_and_needs_guidance():
    student = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss = router_kl(teacher=torch.tensor([[[0.5, 0.5]]]), student=student)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()
    for progress, value in ((0.499, VALUE), (0.5, 0)):
        one = step(record(probs=STUDENT), guidance=[TEACHER], progress=progress)
        assert RouterKl(until=0.5)(one).item() == pytest.approx(value)
    with pytest.raises(UserError, match="no teacher guidance"):
        RouterKl()(step(record(probs=STUDENT)))
    with pytest.raises(UserError, match="guides 1 MoE layers and the student has 2"):
        RouterKl()(step(record(probs=STUDENT), record(probs=STUDENT), guidance=[TEACHER]))


def test_the_teachers_tokens_are_matched_to_the_students():
    # A student with a distillation token behind CLS: both follow the teacher's CLS, so copying its
    # row gives divergence 0.
    teacher = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    student = torch.cat([teacher[:, :1], teacher], dim=1)
    assert RouterKl()(step(record(probs=student), guidance=[teacher])).item() == pytest.approx(0)
    with pytest.raises(UserError, match="teacher guidance: the teacher's routing has shape"):
        RouterKl()(step(record(probs=student[..., :1]), guidance=[teacher]))


def test_the_oracle_teaches_each_token_the_expert_of_its_kind():
    # Kinds 1 and 3 are taught expert 0 of two, an unknown one too, kind 2 expert 1.
    taught = record(probs=torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    for truth, by_hand in (([1, 2], 4 * 2), ([2, 1], 4 / 3 * 2), ([3, 0], 4 * 2)):
        divergence = truth_kl(truth=torch.tensor([truth]), record=taught).item()
        assert divergence == pytest.approx(math.log(by_hand) / 2)


# Mean probs (¾, ¼): mean ½, population variance 1/16, CV² = ¼. Entropies ln 2 and 0: mean ½ ln 2.
TEACHER_PROBS = [[[0.5, 0.5], [1.0, 0.0]]]


def test_terms_by_hand_with_factors_and_layers():
    even = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # balanced and sure: 0 and 0
    terms = balance_and_entropy_terms(probs=(torch.tensor(TEACHER_PROBS), even))
    found = {name: term.item() for name, term in terms.items()}
    assert found == pytest.approx({"balance": 0.25, "entropy": 0.5 * math.log(2)})
    guided = step(guidance=[TEACHER_PROBS, TEACHER_PROBS])
    expected = 2 * (0.3 * 0.25 + 0.7 * 0.5 * math.log(2))
    assert TeacherRouter(balance=0.3, entropy=0.7)(guided).item() == pytest.approx(expected)


def test_only_the_teachers_probs_are_read():
    student = torch.tensor(TEACHER_PROBS, requires_grad=True)
    teacher = torch.randn(1, 2, 2, requires_grad=True)
    TeacherRouter()(step(record(probs=student), guidance=[teacher.softmax(-1)])).backward()
    assert student.grad is None and teacher.grad.abs().sum() > 0


def region_routing(scores, belongs):
    """Of two layers; the second layer's scores are three times as large."""
    inputs = step(record(logits=scores), record(logits=3 * scores))
    return RegionRouting()(inputs._replace(batch=inputs.batch._replace(belongs=belongs)))


def test_region_routing_by_hand():
    # token 0 belongs to expert 1: scores 0, 0.1 / 0.1 = 0, 1 → −log(e / (1 + e)); token 1 to none;
    # token 2 to expert 0: 0.2, 0 → 2, 0
    scores = torch.tensor([[[0.0, 0.1], [5.0, 0.0], [0.2, 0.0]]])
    belongs = torch.tensor([[1, -1, 0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    found = region_routing_loss(scores=scores, belongs=belongs, temperature=0.1)
    assert float(found) == pytest.approx(expected)
    steep = (math.log(1 + math.exp(-3)) + math.log(1 + math.exp(-6))) / 2
    assert float(region_routing(scores, belongs)) == pytest.approx((expected + steep) / 2)


def test_no_label_no_loss():
    scores = torch.rand(1, 3, 2, requires_grad=True)
    loss = region_routing_loss(scores=scores, belongs=torch.full((1, 3), -1), temperature=0.1)
    loss.backward()
    assert loss == 0 and (scores.grad == 0).all() and region_routing(torch.rand(1, 3, 2), None) == 0


SWITCH = [
    [[0.4, 0.3, 0.2, 0.1], [0.5, 0.1, 0.3, 0.1]],
    [[0.1, 0.2, 0.3, 0.4], [0.4, 0.35, 0.15, 0.1]],
]


def routed_record(probs, k):
    probs = torch.as_tensor(probs)
    most = probs.topk(k, dim=-1).indices
    return record(probs=probs)._replace(chosen=torch.zeros_like(probs).scatter(-1, most, 1).bool())


@pytest.mark.parametrize(
    ("probs", "k", "level", "value"),
    [
        # f = (3, 2, 2, 1)/8, P = (1.4, .95, .95, .7)/4: 4/32 · (4.2 + 1.9 + 1.9 + .7)
        (SWITCH, 2, "batch", 1.0875),
        (SWITCH, 2, "group", 1.0875),
        # images: f = (2, 1, 1, 0)/4 and P = (.45, .2, .25, .1): 1.35; (1, 1, 1, 1)/4: 1
        (SWITCH, 2, "sequence", 1.175),
        # f = (¾, ¼), P = (.385, .615): below 1, as both oppose
        ([[[0.51, 0.49], [0.51, 0.49], [0.51, 0.49], [0.01, 0.99]]], 1, "batch", 0.885),
    ],
)
def test_switch_balance_by_hand(probs, k, level, value):
    term = switch_balance.SwitchBalance(level=level, group_size=len(probs))
    assert term(step(routed_record(probs, k))).item() == pytest.approx(value)


def test_the_gradient_of_switch_balance_is_the_share_of_choices():
    # E f_e / N with f = (3, 2, 2, 1)/8: 4 f / 4 = f
    probs = torch.tensor(SWITCH, requires_grad=True)
    switch_balance.SwitchBalance()(step(routed_record(probs, 2))).backward()
    expected = torch.tensor([0.375, 0.25, 0.25, 0.125])
    torch.testing.assert_close(probs.grad, expected.expand_as(probs))


@pytest.mark.parametrize(("counts", "value"), [("routed", 1.116587), ("probs", 1.225962)])
def test_deepseeks_loss_counts_as_it_is_told(counts, value):
    # The first expert's bias −.3 changes the second choice alone: .7 − .3 < .5; .9 − .3 ≥ .6.
    scores = torch.tensor([[[0.9, 0.6, 0.3], [0.7, 0.5, 0.4]], [[0.2, 0.8, 0.6], [0.9, 0.1, 0.3]]])
    biased = torch.nn.functional.one_hot(torch.tensor([[0, 1], [1, 0]]), 3).bool()
    layer = record(probs=scores / scores.sum(dim=-1, keepdim=True))._replace(chosen=biased)
    term = switch_balance.SwitchBalance(level="sequence", count_from=counts)
    assert term(step(layer)).item() == pytest.approx(value, abs=1e-6)


def test_groups_that_do_not_divide_a_step_are_refused():
    with pytest.raises(UserError, match=r"^switch_balance.group_size: found 8, .*; allowed: a div"):
        switch_balance.SwitchBalance(level="group")(step(routed_record(SWITCH, 2)))


def test_simbal_by_hand():
    # WWᵀ − I = (−.18, .53; .53, −.07); its gradient 2 sign(·) W, 0 at orthonormal rows
    weight = torch.tensor([[0.9, 0.1, 0], [0.5, 0.8, 0.2]], requires_grad=True)
    loss = simbal.router_orthonormality_loss(weight=weight)
    assert loss.item() == pytest.approx(1.31)
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient, torch.tensor([[-0.8, 1.4, 0.4], [0.8, -1.4, -0.4]]))
    assert simbal.router_orthonormality_loss(weight=torch.eye(2, 3)).item() == 0
    with pytest.raises(UserError, match="^simbal: no router's rows start orthonormal; give"):
        simbal.Simbal(weight=1.0)(step(record(probs=PROBS))._replace(model=torch.nn.Linear(1, 1)))
