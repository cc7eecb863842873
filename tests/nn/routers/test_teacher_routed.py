"""The teacher's router decides, the student's imitates."""

import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.routers.teacher_routed import TeacherRouted
from moecore.training.regularizers.router_kl import router_kl
from tests.nn.routers import reference


def teacher_of(batch=2, tokens=9, experts=4, seed=2):
    scores = torch.randn(batch, tokens, experts, generator=torch.Generator().manual_seed(seed))
    return (2 * scores).softmax(-1)


def test_evaluation_by_hand():
    # The teacher says (0.1, 0.6, 0.2, 0.1): k = 2 takes experts 1 and 2 with 0.6 and 0.2, not
    # renormalised.
    # load: τ = ln 0.2, σ = 1/4: Φ(4·ln(0.6/0.2)) for expert 1, Φ(0) for 2, Φ(4·ln(0.1/0.2)) for 0
    # and 3. What the student (identity router) says, (8, 4, 2, 2)/16, is recorded in training only.
    router = TeacherRouted(k=2).build(4, 4).eval()
    router.weight.data = torch.eye(4)
    teacher = torch.tensor([[[0.1, 0.6, 0.2, 0.1]]])
    token = torch.tensor([4.0, 2, 1, 1]).log().view(1, 1, 4)
    plan, record = router(token, RoutingContext(teacher=teacher))
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([0, 0.6, 0.2, 0]))
    assert record.chosen.flatten().tolist() == [False, True, True, False]
    low, high = reference.phi(-4 * math.log(2)), reference.phi(4 * math.log(3))
    torch.testing.assert_close(record.load.flatten(), torch.tensor([low, high, 0.5, low]))
    torch.testing.assert_close(record.logits, teacher.log())
    torch.testing.assert_close(record.probs, teacher)
    torch.testing.assert_close(plan.weights.flatten(), torch.tensor([0.6, 0.2]))
    _, learned = router.train()(token, RoutingContext(teacher=teacher))
    torch.testing.assert_close(learned.logits, token)
    torch.testing.assert_close(learned.probs.flatten(), torch.tensor([0.5, 0.25, 0.125, 0.125]))


def test_training_adds_noise_to_the_teachers_log_probs():
    layer = reference.layer_of(TeacherRouted(k=2, noise_std=3.0)).train()
    tokens = torch.randn(2, 9, 8)
    teacher = teacher_of()
    torch.manual_seed(7)
    _, record = layer.router(tokens, RoutingContext(teacher=teacher))
    torch.manual_seed(7)
    noisy = teacher.log() + torch.randn_like(teacher) * 3 / 4  # σ = noise_std / E
    gates, order = noisy.softmax(-1).sort(dim=-1, descending=True)
    expected = torch.zeros_like(teacher).scatter(-1, order[..., :2], gates[..., :2])
    torch.testing.assert_close(record.combine, expected)
    torch.testing.assert_close(record.probs, (tokens @ layer.router.weight.t()).softmax(-1))


@pytest.mark.parametrize(("k", "training"), [(1, True), (2, False)])
def test_outputs_and_all_gradients_agree_with_every_expert_on_every_token(k, training):
    layer = reference.layer_of(TeacherRouted(k=k)).train(training)
    teacher = teacher_of().requires_grad_()
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    context = RoutingContext(teacher=teacher)

    def slow(values):
        noise = torch.randn(teacher.shape) / 4 if training else 0
        gates = (teacher.log() + noise).softmax(-1)
        combine = torch.where(gates >= gates.topk(k).values[..., -1:], gates, 0)
        return reference.weighted_sum(layer, values, combine)

    reference.assert_like(layer, tokens, slow, context, further=[teacher])


def test_the_task_teaches_the_teachers_router_and_the_imitation_only_the_students():
    layer = reference.layer_of(TeacherRouted(k=1)).train()
    teacher = teacher_of().requires_grad_()
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    outputs, (record,) = layer(tokens, RoutingContext(teacher=teacher))
    leaves = [teacher, tokens, layer.router.weight]
    for loss in (outputs.square().sum(), record.load.square().sum()):  # of task and balance
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        assert found[0].norm() > 1e-3 and found[2] is None
    imitation = router_kl(teacher=teacher, student=record.probs)
    to_teacher, to_tokens, to_router = torch.autograd.grad(imitation, leaves, allow_unused=True)
    assert to_teacher is None and to_tokens is None
    # of softmax and KL, averaged over 2·9 tokens
    difference = (record.probs - teacher).detach().flatten(0, 1) / 18
    torch.testing.assert_close(to_router, difference.t() @ tokens.detach().flatten(0, 1))


def test_the_student_may_decide_in_evaluation_only():
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    teacher = teacher_of()
    layer = reference.layer_of(TeacherRouted(k=2, inference="student"))
    outputs, (record,) = layer.eval()(tokens)  # without any teacher
    top = record.probs.topk(2)
    expected = torch.zeros_like(record.probs).scatter(-1, top.indices, top.values)
    torch.testing.assert_close(record.combine, expected)
    torch.testing.assert_close(record.logits, tokens @ layer.router.weight.t())

    def slow(values):  # attacks see the whole gradient, through the router too
        gates = (values @ layer.router.weight.t()).softmax(-1)
        return reference.weighted_sum(layer, values, torch.where(record.chosen, gates, 0))

    reference.assert_like(layer, tokens, slow)
    found = []
    for one in (layer, reference.layer_of(TeacherRouted(k=2))):
        torch.manual_seed(3)
        found.append(one.train()(tokens, RoutingContext(teacher=teacher))[1][0].combine)
    assert torch.equal(*found)


def test_probs_that_were_rounded_to_0_stay_finite():
    teacher = torch.tensor([[[1.0, 0, 0, 0]]], requires_grad=True)
    layer = reference.layer_of(TeacherRouted(k=2)).train()
    outputs, (record,) = layer(torch.randn(1, 1, 8), RoutingContext(teacher=teacher))
    (gradient,) = torch.autograd.grad(outputs.sum() + record.load.sum(), teacher)
    assert gradient.isfinite().all() and all(field.isfinite().all() for field in record[:-1])


@pytest.mark.parametrize(
    "inference, training", [("teacher", True), ("teacher", False), ("student", True)]
)
def test_a_teacher_that_has_to_decide_must_be_there_and_fit(inference, training):
    router = TeacherRouted(inference=inference).build(8, 4).train(training)
    with pytest.raises(UserError, match="the teacher decides, but its routing is missing"):
        router(torch.randn(2, 9, 8))
    with pytest.raises(UserError, match=r"shape \(2, 8, 4\).*student's \(2, 9, 4\)"):
        router(torch.randn(2, 9, 8), RoutingContext(teacher=teacher_of(tokens=8)))
