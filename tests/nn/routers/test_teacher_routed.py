import math

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

from moecore import Target, UserError
from moecore.attacks import Apgd, Pgd
from moecore.attacks.base import seed_generator_per_image
from moecore.backbones import LanguageModel, SwinV2, Vit
from moecore.core.routing_records import RoutingContext
from moecore.experts import Eigen, Mlp
from moecore.nn.backbones.base_model import majority_token_kinds
from moecore.nn.layers.moe import MoESettings, build_moe_feed_forward
from moecore.nn.predict import text_perplexity
from moecore.nn.routers.competition import Competition, mean_cosine_among_chosen
from moecore.routers import Merged, NoisyTopK, TeacherRouted, Told
from moecore.training.regularizers.router_kl import router_kl
from tests.measure.test_truth import IMAGE
from tests.nn.backbones.test_language_model import stream, text
from tests.nn.routers import reference
from tests.training import small

MOE = MoESettings(router=Told(), experts=Mlp(number=3), blocks="all")
VIT = Vit(patch=4, width=16, depth=2, heads=2)
SWIN = SwinV2(patch=4, width=16, depths=(2,), heads=(2,), window=2)
ATTACKS = [Pgd(steps=3, form="strong"), Apgd(steps=4), Pgd(steps=2, inside=True)]
WEIGHTS = ("router_weight", "chosen_weight", "diversity_weight", "bal_comp")
OUTPUTS = [[[1.0, -1], [0.5, 0.5], [-2, 0]], [[0, 3], [1, 1], [2, -1]]]
LOGITS = [[1.0, 0, 0], [0, 1, 0.5]]


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


def pictures(kinds: list[list[int]]) -> torch.Tensor:
    """Noise, and the four kinds of each image's patches in the last channel."""
    truth = torch.tensor(kinds).view(-1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    noise = torch.rand(len(kinds), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return torch.cat([noise, truth / 255], dim=1)


def test_kinds_go_to_their_experts_in_a_circle_and_what_is_not_known_to_the_first():
    router = Told().build(8, 2)
    _, record = router(torch.randn(1, 5, 8), RoutingContext(truth=torch.tensor([[0, 1, 2, 3, 4]])))
    assert record.chosen.int().argmax(-1).tolist() == [[0, 0, 1, 0, 1]]
    assert torch.equal(record.combine, record.chosen.float()) and Told().active(8) == 1
    families = Told(together=2).build(8, 2)
    _, record = families(torch.randn(1, 6, 8), RoutingContext(truth=torch.arange(6)[None]))
    assert record.chosen.int().argmax(-1).tolist() == [[0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("model", [VIT, SWIN])
def test_a_model_routes_by_the_last_channel_and_does_not_see_it(model):
    kinds = [[1, 2, 3, 1], [3, 3, 2, 2]]
    made = model.build(IMAGE, MOE).eval()
    for record, layout in zip(made(pictures(kinds)).routing, made.layouts, strict=True):
        chosen = record.chosen.int().argmax(-1)[:, layout.special :]
        assert chosen.tolist() == [[kind - 1 for kind in one] for one in kinds]
    torch.manual_seed(0)
    blind = model.build(IMAGE, MOE.model_copy(update={"router": NoisyTopK()})).eval()
    first, second = (blind(pictures([one, one])).prediction for one in kinds)
    assert torch.equal(first, second)


def test_every_kind_is_read_back():
    kinds = torch.arange(256).view(64, 4)
    layout = VIT.build(IMAGE, MOE).layout
    read = majority_token_kinds(pictures(kinds.tolist()), layout)
    assert torch.equal(read[:, layout.special :], kinds) and not read[:, : layout.special].any()
    moved = pictures(kinds.tolist()).roll(1, dims=3)  # a column of each patch is its neighbour's
    assert torch.equal(majority_token_kinds(moved, layout), read)


@torch.no_grad()
def test_a_text_is_routed_by_the_kinds_after_its_words():
    spec = text(4, 3).model_copy(update={"truth": 3})
    settings = LanguageModel(width=8, depth=3, heads=2, span=4, dropout=0.0)
    made = settings.build(spec, MOE).eval()
    rows = torch.stack([stream(40), torch.randint(4, (40,))])
    states = made.initial_states(1, rows.device)
    (final, records, _), _ = made.read(rows[:1], states, kinds=rows[1:])
    expected = (rows[1] - 1).clamp_min(0)
    assert all(torch.equal(one.chosen.int().argmax(-1)[0], expected) for one in records)
    windows = torch.stack([rows[:, start : start + 16].reshape(8, 4) for start in range(0, 24, 4)])
    torch.testing.assert_close(made.encode(windows).tokens.flatten(0, 1), final[0, 12:36])
    nats = spec.task.token_loss(made.predict(final[:, :-1]), rows[:1, 1:])
    assert text_perplexity(made, rows, 1, False) == pytest.approx(float(nats.mean().exp()))
    made.train().remember(1)
    steps = [made(rows[None, :, start : start + 4]).prediction for start in range(0, 40, 4)]
    torch.testing.assert_close(torch.cat(steps, dim=1), made.predict(final))
    blind = settings.build(spec, MOE.model_copy(update={"router": NoisyTopK()})).eval()
    other = torch.cat([windows[:, :4], windows[:, 4:].flip(0)], dim=1)
    assert torch.equal(blind(windows).prediction, blind(other).prediction)


def test_without_truth_it_is_refused():
    with pytest.raises(UserError, match="router.kind: found told.*allowed: data whose card has"):
        VIT.build(IMAGE.model_copy(update={"truth": 0}), MOE)
    model = LanguageModel(width=8, depth=3, heads=2, span=4)
    with pytest.raises(UserError, match="found told, which reads truth; this text has none"):
        model.build(text(4, 3), MOE)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_leave_the_truth(attack):
    images = pictures([[1, 2, 3, 1], [3, 3, 2, 2]])
    model = VIT.build(IMAGE, MOE).eval()
    drawn = seed_generator_per_image(0, range(2))
    attacked = attack(model, IMAGE.task, images, torch.tensor([0, 1]), 8 / 255, drawn)
    assert torch.equal(attacked[:, 1], images[:, 1])
    assert not torch.equal(attacked[:, 0], images[:, 0])
    target = Target(model, IMAGE.task, images, torch.tensor([0, 1]), 2, precision="bfloat16")
    assert torch.equal(target.attacked(attack, 8 / 255)[:, 1], images[:, 1])


def competing(*weights, bal_comp=0.0, **settings) -> Competition:
    """The router with these weights; without what balances strengths, unless it is asked for."""
    return Competition(**dict(zip(WEIGHTS, (*weights, bal_comp), strict=True)), **settings)


def decide(*weights, padding=None, **settings):
    """What a step of competition says of the outputs, of a router whose logits are its tokens."""
    router = competing(*weights, **settings).build(3, 3).train()
    router.weight.data = torch.eye(3)
    outputs = torch.tensor([OUTPUTS], requires_grad=True)
    context = RoutingContext(outputs=outputs, padding=padding)
    return router, outputs, router(torch.tensor([LOGITS]), context)[1]


def test_competition_by_hand():
    # Strengths, (softplus 1 + softplus −1) / 2 = .813262 first: (.813262, .974077, .410038) and
    # (1.870867, 1.313262, 1.220095); the two largest over their sums.
    _, _, record = decide(1.0, 0.0, 0.0)
    combine = [[[0.455013, 0.544987, 0], [0.58756, 0.41244, 0]]]
    torch.testing.assert_close(record.combine, torch.tensor(combine), atol=1e-6, rtol=0)
    torch.testing.assert_close(record.probs, torch.tensor([LOGITS]).softmax(dim=-1))
    assert record.penalty.mean().item() == pytest.approx(0.038972, abs=1e-6)
    both = decide(1.0, 1.0, 0.0)[2].penalty.mean().item()
    assert both - record.penalty.mean().item() == pytest.approx(0.057481, abs=1e-6)
    # (1, −1) and (½, ½) are at right angles; (0, 3) and (1, 1) have .707107, twice of four
    alike = mean_cosine_among_chosen(torch.tensor([OUTPUTS]), torch.tensor([[[1, 0], [0, 1]]]))
    torch.testing.assert_close(alike, torch.tensor([[0, 0.353553]]), atol=1e-6, rtol=0)
    assert decide(0.0, 0.0, 1.0)[2].penalty.mean().item() == pytest.approx(0.176777 / 2, abs=1e-6)


def test_the_balance_of_strengths_by_hand():
    # Softmax of the strengths above: (.351787, .413162, .235051) and (.477504, .273409, .249087).
    # Expert 1 is the first token's strongest, 0 the second's: 3 (½ P_0 + ½ P_1) of each.
    penalty = decide(0.0, 0.0, 0.0, bal_comp=1.0)[2].penalty
    torch.testing.assert_close(penalty, torch.tensor([[1.147424, 1.126370]]), atol=1e-6, rtol=0)
    # where the second only pads, expert 1 has won all: 3 P_1
    alone = decide(0.0, 0.0, 0.0, bal_comp=1.0, padding=torch.tensor([[False, True]]))[2].penalty
    assert alone[0, 0].item() == pytest.approx(1.239487, abs=1e-6)
    # the code's default; weighted as it says; it moves the experts and not the router
    assert Competition(router_weight=0, chosen_weight=0, diversity_weight=0).bal_comp == 0.01
    router, outputs, record = decide(0.0, 0.0, 0.0, bal_comp=0.01)
    torch.testing.assert_close(record.penalty, 0.01 * penalty)
    inputs = (router.weight, outputs)
    to_router, to_experts = torch.autograd.grad(record.penalty.sum(), inputs, allow_unused=True)
    assert not to_router.any() and to_experts.any()


def test_who_learns_from_a_competition():
    router, outputs, record = decide(1.0, 0.5, 0.0)
    inputs = (router.weight, outputs)
    of_task = torch.autograd.grad(record.combine[..., 0].sum(), inputs, allow_unused=True)
    assert of_task[0] is None and of_task[1].any()
    to_router, to_experts = torch.autograd.grad(record.penalty.sum(), inputs, allow_unused=True)
    assert to_router.any() and to_experts is None
    _, outputs, record = decide(0.0, 0.0, 1.0)
    assert torch.autograd.grad(record.penalty.sum(), outputs)[0].any()


def test_only_training_competes_and_else_the_largest_probs_choose():
    layer = reference.layer_of(competing(1.0, 0.0, 0.0))
    tokens = torch.randn(2, 7, 8)
    top = (tokens @ layer.router.weight.T).topk(2)
    expected = torch.zeros(2, 7, 4).scatter(-1, top.indices, top.values.softmax(dim=-1))
    for training, progress, like in ((False, 0.0, True), (True, 1.0, True), (True, 0.0, False)):
        _, (record,) = layer.train(training)(tokens, RoutingContext(progress=progress))
        assert torch.allclose(record.combine, expected, atol=1e-6) == like
        assert (record.penalty is None) != training
        assert not training or record.penalty.any() != like


def test_the_schedule_is_drawn_from_the_step_alone():
    router = competing(0.0, 0.0, 0.0, share=0.1, warmup=0.25)

    def phases(progress):
        torch.manual_seed(4)
        return [router.phase(progress) for _ in range(1000)]

    assert phases(0.25) == phases(0.9) and 70 < phases(0.25).count(0.0) < 130
    for progress in (0.24, 1.0):  # before the warm-up's end; evaluation
        torch.manual_seed(4)
        before = torch.get_rng_state()
        assert router.phase(progress) == 1.0 and torch.equal(torch.get_rng_state(), before)


def test_layers_compete_by_step_and_layer_whatever_else_is_drawn():
    moe = MoESettings(router=small.COMPETITION, experts=Mlp(number=4), blocks="all")
    vit = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.3).build(small.IMAGE, moe).train()

    def competing_layers(step, images):
        pixels = torch.rand(images, 1, 8, 8)
        torch.manual_seed(step)
        return tuple(bool(record.penalty.any()) for record in vit(pixels, progress=0.5).routing)

    schedule = [competing_layers(step, 3) for step in range(8)]
    assert schedule == [competing_layers(step, 5) for step in range(8)]
    assert len(set(schedule)) > 4 and len(set(zip(*schedule, strict=True))) == 4


def test_merged_experts_by_hand():
    # The mean token (2, ½) has logits (1, ½): shares .622459 and .377541. The merged expert sees
    # (1, 2) as 1.37754 and answers with that times (.81123, .377541).
    mlps = Mlp(number=2, hidden_ratio=0.5, activation="relu")
    layer = build_moe_feed_forward(Merged(normalise=False), mlps, 2)
    layer.router.weight.data = torch.tensor([[0.5, 0], [0, 1.0]])
    layer.experts.up.data = torch.tensor([[[1.0], [0]], [[0], [1.0]]])
    layer.experts.down.data = torch.tensor([[[1.0, 0]], [[0.5, 1]]])
    output, (record,) = layer(torch.tensor([[[1.0, 2], [3, -1]]]))
    expected = torch.tensor([[[1.117502, 0.520078], [1.2086, 0.562474]]])
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    shares = torch.tensor([0.622459, 0.377541]).expand(1, 2, 2)
    for field in (record.probs, record.combine):
        torch.testing.assert_close(field, shares, atol=1e-6, rtol=0)
    assert record.chosen.all() and record.load.all()


def test_outputs_and_all_gradients_agree_with_image_by_image():
    layer = reference.layer_of(Merged())
    router, experts = layer.router, layer.experts

    def slow(tokens):
        outputs = []
        for image in tokens:
            rows = layer_norm(router.weight, (8,)) * router.gain
            shares = (rows @ layer_norm(image.mean(dim=0), (8,)) + router.bias).softmax(dim=0)
            up, up_bias, down, down_bias = (
                sum(share * one for share, one in zip(shares, parameter, strict=True))
                for parameter in (experts.up, experts.up_bias, experts.down, experts.down_bias)
            )
            outputs.append(gelu(image @ up + up_bias) @ down + down_bias)
        return torch.stack(outputs)

    reference.assert_like(layer, torch.randn(3, 5, 8, requires_grad=True), slow)


def test_a_merged_token_costs_one_expert_and_what_cannot_be_is_refused():
    layer = build_moe_feed_forward(Merged(), Mlp(number=4, hidden_ratio=1.5), 8).to("meta")
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(3, 20, 8, device="meta"))
    expert = 2 * 8 * 12
    assert counter.get_total_flops() == 2 * 3 * (20 * expert + (4 * (expert + 12 + 8)) + 4 * 8)
    assert Merged().active(4) == 4  # of all parameters, each image's are made
    assert competing(0.1, 0.1, 0.0, k=1).active(8) == 1  # one expert has nobody to differ from
    with pytest.raises(ValidationError, match="diversity_weight: found 0.1, .*; allowed: 0"):
        competing(0.1, 0.1, 0.1, k=1)
    with pytest.raises(UserError, match="^experts.kind: found experts with bases, .*; allowed"):
        build_moe_feed_forward(Merged(), Eigen(number=4), 8)
