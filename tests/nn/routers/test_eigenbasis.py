from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu
from torch.utils.flop_counter import FlopCounterMode

from moecore.core.files import UserError
from moecore.experts import Eigen, Mlp
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.eigenbasis import (
    BasisProjectionPlan,
    Eigenbasis,
    project_contexts,
    project_on_bases,
    safe_cosine,
)
from moecore.parts import RoutingContext, SparsePlan


def layer_of(width=8, number=4, rank=5, seed=0, own=False, factored=False, **router):
    """A layer in fp64 whose parameters are all drawn, so that no score or scale is special."""
    torch.manual_seed(seed)
    if own:
        experts = Mlp(number=number, hidden_ratio=1.5)
    else:
        experts = Eigen(number=number, rank=rank, hidden_ratio=1.5, factored_output=factored)
    settings = Eigenbasis(rank=rank if own else None, **router)
    lends = experts.provides
    experts = experts.build(width)
    routing = settings.build(width, number, None if own else experts.basis)
    layer = MoEFeedForward(routing, experts, settings.wants, lends).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def inputs_of(batch=2, tokens=6, width=8, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=dtype)
    values = draw(batch, tokens, width)
    attention = (2 * draw(batch, tokens, tokens)).softmax(-1)
    attended = values + draw(batch, tokens, width)
    return values, RoutingContext(attention=attention, attended=attended)


def slow_choice(scores, k, threshold, selection):
    """The chosen experts of one token's scores, a list: the definitions, word by word."""
    order = sorted(range(len(scores)), key=lambda e: (-scores[e], e))
    above = [e for e in order if scores[e] > threshold]
    if selection == "literal":
        return above[:k] if len(above) >= k else order[:k]
    return above[:k] if above else order[:k]


def slow_layer(layer, tokens, context):
    """Outputs and scores of a layer of eigen experts, token by token and expert by expert."""
    router, config, experts = layer.router, layer.router.config, layer.experts
    outputs = []
    scores = []
    for image, place in product(range(tokens.shape[0]), range(tokens.shape[1])):
        x, of_token = tokens[image, place], []
        for e, basis in enumerate(experts.basis if router.basis is None else router.basis):
            if config.context == "learned":
                v = router.target[e]
            elif config.context == "tokens":
                v = basis.T @ (context.attention[image, place] @ tokens[image])
            else:
                v = basis.T @ context.attended[image, place]
            u = basis.T @ x
            of_token.append((u @ v) / (u.norm() * v.norm()))
        values = [score.item() for score in of_token]
        chosen = slow_choice(values, config.k, config.threshold, config.selection)
        weights = [of_token[e].clamp_min(1e-6) for e in chosen]
        answers = [slow_expert(experts, e, x) for e in chosen]
        outputs.append(sum(w / sum(weights) * y for w, y in zip(weights, answers, strict=True)))
        scores.append(torch.stack(of_token))
    return torch.stack(outputs).view_as(tokens), torch.stack(scores).view(*tokens.shape[:2], -1)


def slow_expert(experts, e, x):
    first = experts.up[e].T
    if hasattr(experts, "basis"):
        first = first @ torch.diag(experts.scale[e]) @ experts.basis[e].T
    hidden = gelu(first @ x + experts.up_bias[e])
    if getattr(experts, "down_inner", None) is not None:
        hidden = experts.down_inner[e].T @ hidden
    return experts.down[e].T @ hidden + experts.down_bias[e]


def by_hand(*scores, **router):
    """The record of one token with these scores."""
    return Eigenbasis(**router).build(8, len(scores)).decide(torch.tensor([[scores]]))[2]


EYE = torch.eye(3)
AXES = torch.stack([EYE[:, :2], EYE[:, 1:]])  # expert 0 sees axes 0 and 1, expert 1 axes 1 and 2


def test_score_by_hand():
    # Token 0 = (1, 0, 1), token 1 = (3, 4, 0); token 0 attends to itself by ¾ and to token 1 by ¼:
    # c = (3/4 + 3/4, 1, 3/4) = (3/2, 1, 3/4).
    # Expert 0: cos((1, 0), (3/2, 1)) = 1.5/sqrt(3.25). Expert 1: cos((0, 1),
    # (1, 3/4)) = 0.75/sqrt(1 + 9/16) = 0.6.
    # Token 1 attends to itself only: 1 and 1.
    tokens = torch.tensor([[[1.0, 0, 1], [3, 4, 0]]])
    attention = torch.tensor([[[0.75, 0.25], [0, 1]]])
    router = Eigenbasis(k=1).build(3, 2, AXES)
    plan, record = router(tokens, RoutingContext(attention=attention, basis=AXES))
    torch.testing.assert_close(record.logits, torch.tensor([[[1.5 / 3.25**0.5, 0.6], [1, 1]]]))
    # The rows of expert 0: token 0 on axes 0, 1, then token 1 (a tie goes to the lowest index).
    # Expert 1 has none.
    rows = plan.dispatch(tokens)
    assert rows.projected and rows.values.tolist() == [[1, 0], [3, 4]]
    assert rows.offsets.tolist() == [2, 2]
    # The attention's output instead, for token 1 with (3, 4) and (4, 0). c = (0, 1, 0): cos((3, 4),
    # (0, 1)) = 0.8, cos((4, 0), (1, 0)) = 1. c = (0, 0, 5): Bᵀc = (0, 0) scores 0, cos((4, 0),
    # (0, 5)) = 0. c = (3, 0, 0): cos((3, 4), (3, 0)) = 0.6, and (0, 0) again.
    contexts, scores = [(0.0, 1, 0), (0.0, 0, 5), (3.0, 0, 0)], [(0.8, 1), (0.0, 0), (0.6, 0)]
    for attended, expected in zip(contexts, scores, strict=True):
        router = Eigenbasis(context="attention_output").build(3, 2, AXES)
        context = RoutingContext(attended=torch.tensor([[attended]]), basis=AXES)
        record = router(tokens[:, 1:], context)[1]
        torch.testing.assert_close(record.logits.flatten(), torch.tensor(expected))


def test_learned_context_by_hand():
    # The brain model: cos(Bᵀx, ψ). Bᵀx = (3, 4) for expert 0 and (4, 0) for expert 1; ψ = (2, 0)
    # and (−1, 1): 0.6 and −1/sqrt 2.
    router = Eigenbasis(context="learned").build(3, 2, AXES)
    router.target.data = torch.tensor([[2.0, 0], [-1, 1]])
    record = router(torch.tensor([[[3.0, 4, 0]]]), RoutingContext(basis=AXES))[1]
    torch.testing.assert_close(record.logits.flatten(), torch.tensor([0.6, -(0.5**0.5)]))


def test_prune_by_hand():
    # A = {1, 3} of scores (0.1, 0.6, 0.4, 0.9): experts 3 and 1 with 0.9/1.5 and 0.6/1.5. probs:
    # scores over their sum, 2.
    record = by_hand(0.1, 0.6, 0.4, 0.9)
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([0, 0.4, 0, 0.6]))
    torch.testing.assert_close(record.probs.flatten(), torch.tensor([0.05, 0.3, 0.2, 0.45]))
    assert torch.equal(record.load, record.chosen.float())
    # A = {3}: that one alone, although k = 2. At T itself an expert is not eligible.
    for second in (0.4, 0.5):
        record = by_hand(0.1, second, 0.4, 0.9)
        assert record.combine.flatten().tolist() == [0, 0, 0, 1]
        assert record.chosen.flatten().tolist() == [False, False, False, True]
    # A empty: the global best two, 0.4/0.7 and 0.3/0.7. A of three with k = 2: the best two.
    for scores, expected in (
        ((0.1, 0.4, 0.3, -0.9), (0, 4 / 7, 3 / 7, 0)),
        ((0.6, 0.7, 0.8, 0.1), (0, 7 / 15, 8 / 15, 0)),
    ):
        torch.testing.assert_close(by_hand(*scores).combine[0, 0], torch.tensor(expected))


def test_scores_that_are_clamped():
    # Fallback with 0.5 and −0.3: −0.3 counts 1e-6. All clamped: both chosen get ½, all probs ¼.
    # Both sum to 1.
    record = by_hand(-0.3, 0.5, -0.9, -0.9)
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([1e-6, 0.5, 0, 0]) / 0.500001)
    record = by_hand(-0.3, 0.0, -0.9, -0.2)
    assert record.combine.flatten().tolist() == [0, 0.5, 0, 0.5]
    assert record.probs.flatten().tolist() == [0.25] * 4
    # the scores themselves are not
    assert record.logits.flatten().tolist() == torch.tensor([-0.3, 0.0, -0.9, -0.2]).tolist()


@given(st.integers(0, 999), st.integers(1, 4), st.floats(-1, 1, width=32))
@settings(max_examples=60, deadline=None)
def test_choice_is_the_definition_and_literal_is_the_global_top_k(seed, k, threshold):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 5, (2, 5, 4), generator=generator) / 4  # many ties
    for selection in ("prune", "literal"):
        router = Eigenbasis(k=k, threshold=threshold, selection=selection).build(8, 4)
        record = router.decide(scores)[2]
        best = torch.zeros_like(scores, dtype=torch.bool)
        for row, token in zip(best.view(-1, 4), scores.flatten(0, 1).tolist(), strict=True):
            row[slow_choice(token, k, threshold, selection)] = True
        assert torch.equal(record.chosen, best) and torch.equal(record.combine > 0, best)
        torch.testing.assert_close(record.combine.sum(-1), torch.ones(2, 5))
        torch.testing.assert_close(record.probs.sum(-1), torch.ones(2, 5))
    # Algorithm 1 as printed ignores the threshold: the same as with any other one.
    other = Eigenbasis(k=k, threshold=-threshold, selection="literal").build(8, 4).decide(scores)[2]
    assert all(torch.equal(a, b) for a, b in zip(record[:-1], other[:-1], strict=True))


@pytest.mark.parametrize(
    ("selection", "context", "own", "factored"),
    [
        *(("prune", "tokens", False, False), ("literal", "tokens", True, False)),
        *(("prune", "attention_output", False, True), ("prune", "learned", False, False)),
        ("literal", "learned", True, False),
    ],
)
def test_layer_and_its_gradients_are_those_of_the_slow_reference(selection, context, own, factored):
    layer = layer_of(own=own, factored=factored, selection=selection, context=context)
    tokens, given_ = inputs_of()
    inputs = (tokens, given_.attention, given_.attended)
    leaves = [*(values.requires_grad_() for values in inputs), *layer.parameters()]
    outputs, (record,) = layer(tokens, given_)
    expected, scores = slow_layer(layer, tokens, given_)
    torch.testing.assert_close(record.logits, scores)
    torch.testing.assert_close(outputs, expected)
    if selection == "prune" and context == "tokens":
        assert (scores > 0.5).sum(-1).clamp(max=2).unique().tolist() == [0, 1, 2]
    towards = torch.randn_like(outputs)
    sums = [(values * towards).sum() for values in (outputs, expected)]
    ours, theirs = (torch.autograd.grad(one, leaves, allow_unused=True) for one in sums)
    names = ["tokens", "attention", "attended", *dict(layer.named_parameters())]
    for name, leaf, *both in zip(names, leaves, ours, theirs, strict=True):
        found = [torch.zeros_like(leaf) if gradient is None else gradient for gradient in both]
        torch.testing.assert_close(*found, msg=lambda text, name=name: f"{name}: {text}")


def test_projections_are_linear_in_the_context_and_the_cheaper_product_is_taken():
    # T = 2, d = 8, E·r = 12: per token T·d + d·E·r = 112 or T·E·r = 24 products. T = 20, d = 3,
    # E·r = 8: 60 + 24 or 160.
    for length, width, number, rank, cheaper in ((2, 8, 4, 3, 24), (20, 3, 4, 2, 84)):
        tokens, (attention, *_) = inputs_of(3, length, width)
        basis = torch.randn(number, width, rank, dtype=torch.float64)
        with FlopCounterMode(display=False) as counter:
            projected = project_contexts(attention, tokens, project_on_bases(tokens, basis), basis)
        # without those of project(tokens, basis)
        spent = counter.get_total_flops() - 2 * 3 * length * width * number * rank
        assert spent == 2 * 3 * length * cheaper
        for expected in (
            torch.einsum("bij,bjd,edr->bier", attention, tokens, basis),
            project_on_bases(attention @ tokens, basis),
            (attention @ project_on_bases(tokens, basis).flatten(2)).unflatten(2, (number, rank)),
        ):
            torch.testing.assert_close(projected, expected)


def test_full_rank_cannot_route():
    # A square orthonormal Bᵀ is a rotation: every expert scores cos(x, c). Hence the default of two
    # thirds.
    basis = Eigen(number=4, rank=8).build(8).double().basis
    tokens, given_ = inputs_of()
    record = Eigenbasis().build(8, 4, basis)(tokens, given_._replace(basis=basis))[1]
    expected = torch.cosine_similarity(tokens, given_.attention @ tokens, dim=-1)[..., None]
    torch.testing.assert_close(record.logits, expected.expand(-1, -1, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("context", ["tokens", "attention_output", "learned"])
def test_zero_vectors_score_0_and_have_no_gradient(context):
    layer = layer_of(context=context)
    tokens, given_ = inputs_of()
    tokens[0, 0] = 0  # Bᵀx = 0
    # Bᵀc = 0
    given_.attention[1, 2] = 0
    given_.attended[1, 2] = 0
    if context == "learned":
        layer.router.target.data[1] = 0
    tokens.requires_grad_()
    record = layer(tokens, given_)[1][0]
    assert not record.logits[0, 0].any() and record.logits.isfinite().all()
    assert not record.logits[1, 2].any() or context == "learned"
    assert not record.logits[..., 1].any() or context != "learned"
    assert record.combine[0, 0].tolist() == [0.5, 0.5, 0, 0]  # the fallback, uniform
    alone = record.logits[0, 0].sum()
    for total in (alone, record.logits.sum() + layer(tokens, given_)[0].sum()):
        leaves, how = [tokens, *layer.parameters()], {"retain_graph": True, "allow_unused": True}
        gradients = torch.autograd.grad(total, leaves, **how)
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient.any() for gradient in torch.autograd.grad(alone, [tokens]))


def test_cosine():
    # (3, 4)·(4, 3) = 24 over 25; lengths do not matter, as long as squares of them are numbers.
    first = torch.tensor([3.0, 4])
    second = torch.tensor([4.0, 3])
    for scale in (1e-12, 1.0, 1e12):
        assert safe_cosine(first * scale, second).item() == pytest.approx(0.96)
        assert safe_cosine(first, -second * scale).item() == pytest.approx(-0.96)
    tiny = torch.full((2,), 1e-30, requires_grad=True)  # its square is not
    assert safe_cosine(tiny, second).item() == 0
    assert not torch.autograd.grad(safe_cosine(tiny, second), tiny)[0].any()
    vectors = torch.randn(2, 5, 3, dtype=torch.float64).unbind()
    assert torch.autograd.gradcheck(safe_cosine, [vector.requires_grad_() for vector in vectors])


def test_padded_rows_are_finite_and_get_no_gradient():
    # 2·120·2 pairs over 4 experts. Padding repeats pair 0, whose projection must not collect its
    # gradient.
    tokens, given_ = inputs_of(2, 120)
    layer = layer_of(threshold=-1.0)
    plan, record = layer.router(tokens, given_._replace(basis=layer.experts.basis))
    assert isinstance(plan, BasisProjectionPlan)
    plan = plan._replace(projections=plan.projections.detach().requires_grad_())
    rows = plan.dispatch(tokens)
    assert len(rows.values) == rows.offsets[-1] > 480 and rows.values.isfinite().all()
    read = torch.zeros(len(rows.values), dtype=torch.bool).index_fill_(0, plan.plan.rows, True)
    assert read.sum() == 480
    # Every pair's row is its token on its expert's basis. Each row's gradient goes to its own
    # projection; that of padding, even where there is one, goes nowhere.
    numbers = torch.searchsorted(rows.offsets, plan.plan.rows.int(), right=True).view(2, 120, 2)
    assert torch.equal(torch.zeros_like(record.chosen).scatter(-1, numbers, True), record.chosen)
    towards = torch.randn_like(rows.values)
    (gradient,) = torch.autograd.grad((rows.values * towards).sum(), plan.projections)
    expected = torch.zeros_like(gradient)
    pairs = zip(plan.plan.rows.tolist(), numbers.flatten().tolist(), strict=True)
    for pair, (row, expert) in enumerate(pairs):
        token = tokens.flatten(0, 1)[pair // 2]
        torch.testing.assert_close(rows.values[row], token @ layer.experts.basis[expert])
        expected[pair // 2 * 4 + expert] += towards[row]
    assert torch.equal(gradient, expected)


def test_gradients_of_the_projected_rows_in_double_precision():
    layer = layer_of()
    tokens, given_ = inputs_of()
    plan, _ = layer.router(tokens, given_._replace(basis=layer.experts.basis))
    projections = torch.randn_like(plan.projections).requires_grad_()
    read = plan.plan.rows  # padding gives no gradient
    dispatch = lambda values: plan._replace(projections=values).dispatch(tokens).values[read]
    assert torch.autograd.gradcheck(dispatch, projections)
    assert torch.autograd.gradgradcheck(dispatch, projections)


def test_whose_basis_it_is():
    shared = layer_of()
    own = layer_of(own=True)
    assert "basis" not in dict(shared.router.named_parameters())
    assert own.router.basis.shape == (4, 8, 5)
    assert Eigenbasis().build(96, 4).basis.shape == (4, 96, 64)  # two thirds
    assert Eigenbasis().build(5, 4).basis.shape == (4, 5, 5)
    start = Eigenbasis().build(96, 4).basis
    torch.testing.assert_close(start.mT @ start, torch.eye(64).expand(4, -1, -1), atol=1e-5, rtol=0)
    assert isinstance(own.router(*inputs_of())[0], SparsePlan)


def test_reorthonormalising_its_own_basis():
    router = Eigenbasis(rank=4).build(8, 3)
    before = router.basis.detach().clone()
    router.reorthonormalise()
    torch.testing.assert_close(router.basis, before, atol=1e-6, rtol=0)  # signs stay
    triangle = torch.tensor([[2.0, 1, 0, 0], [0, 3, 5, 0], [0, 0, 1, 0], [0, 0, 0, 0.1]])
    router.basis.data = router.basis.data @ triangle
    router.reorthonormalise()
    # Q of QR with positive diagonal
    torch.testing.assert_close(router.basis, before, atol=1e-5, rtol=0)
    # Bases that the experts lend are theirs to change.
    layer = layer_of()
    before = layer.experts.basis.detach().clone()
    layer.router.reorthonormalise()
    assert torch.equal(layer.experts.basis, before)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="router.rank: found 7; allowed: at most 6"):
        Eigenbasis(rank=7).build(6, 4)
    with pytest.raises(UserError, match="router.rank: found 3; allowed: null: the router uses"):
        Eigenbasis(rank=3).build(6, 4, torch.zeros(4, 6, 3))
