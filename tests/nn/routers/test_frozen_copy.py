"""A router that learns and is then frozen."""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.core.records import RoutingContext
from moecore.nn.routers.frozen_copy import FrozenCopy
from moecore.nn.routers.noisy_top_k import NoisyTopK
from tests.nn.routers import reference

EARLY = RoutingContext(progress=0.49)
LATE = RoutingContext(progress=0.5)


def both(**settings):
    """The frozen copy's layer and the same layer with its inner router."""
    inner = NoisyTopK(**settings)
    return reference.layer_of(FrozenCopy(router=inner)), reference.layer_of(inner)


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


SETTINGS = [{}, {"k": 1, "noise_std": 3.0}, {"k": 2, "capacity_factor": 0.5}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_before_it_is_frozen_it_is_the_inner_router(settings):
    ours, theirs = both(**settings)
    tokens = torch.randn(2, 9, 8)
    results = []
    for layer, context in ((ours, EARLY), (theirs, RoutingContext())):
        torch.manual_seed(4)
        outputs, (record,) = layer.train()(tokens, context)
        results.append(
            [
                outputs,
                *record,
                *torch.autograd.grad(outputs.square().sum(), list(layer.parameters())),
            ]
        )
    assert equal(*results)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_once_frozen_it_is_the_inner_router_without_noise_and_without_gradient(settings):
    ours, theirs = both(**settings)
    theirs = reference.layer_of(NoisyTopK(**settings | {"noise_std": 0.0}))
    theirs.router.weight.requires_grad_(False)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    results = []
    for layer, context in ((ours, LATE), (theirs, RoutingContext())):
        outputs, (record,) = layer.train()(tokens, context)
        outputs.square().sum().add(record.load.square().sum()).backward()
        results.append(
            [
                outputs,
                *record,
                tokens.grad,
                *(parameter.grad for parameter in layer.experts.parameters()),
            ]
        )
        tokens.grad = None
        assert layer.router.weight.grad is None
    assert equal(*results)


def test_evaluation_does_not_look_at_progress():
    ours, theirs = both(k=2)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    expected, (record,) = theirs.eval()(tokens)
    for context in (EARLY, LATE):
        outputs, (mine,) = ours.eval()(tokens, context)
        assert torch.equal(outputs, expected) and equal(mine, record)
        assert torch.autograd.grad(outputs.square().sum(), ours.router.weight)[0].any()
    ours.train()(tokens, LATE)
    # nothing is left over from the frozen step
    assert equal(ours.eval()(tokens, EARLY)[1][0], record)


def test_adamw_with_weight_decay_leaves_a_frozen_router_alone():
    layer = reference.layer_of(FrozenCopy())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    router = []
    expert = []
    for progress in (0.0, 0.25, 0.5, 0.75):
        optimizer.zero_grad(set_to_none=True)
        layer.train()(torch.randn(2, 9, 8), RoutingContext(progress=progress))[
            0
        ].square().sum().backward()
        optimizer.step()
        router.append(layer.router.weight.detach().clone())
        expert.append(layer.experts.up.detach().clone())
    assert not torch.equal(router[0], router[1])
    assert torch.equal(router[1], router[2]) and torch.equal(router[2], router[3])
    assert not torch.equal(expert[2], expert[3])


def test_a_whole_run_may_be_the_first_phase():
    layer = reference.layer_of(FrozenCopy(until=1.0)).train()
    layer(torch.randn(2, 9, 8), RoutingContext(progress=0.99))[0].sum().backward()
    assert layer.router.weight.grad.any()


def test_outputs_and_all_gradients_agree_with_every_expert_on_every_token():
    layer = reference.layer_of(FrozenCopy(router=NoisyTopK(k=2))).train()
    tokens = torch.randn(3, 7, 8, requires_grad=True)
    for context in (EARLY, LATE):
        reference.assert_like(
            layer,
            tokens,
            lambda x, at=context: reference.weighted_sum(layer, x, layer.router(x, at)[1].combine),
            context,
        )


def test_padding_takes_no_part():
    layer = reference.layer_of(FrozenCopy(router=NoisyTopK(k=2))).train()
    reference.assert_padding_takes_no_part(layer, torch.randn(3, 61, 8, requires_grad=True), LATE)


def test_invariances():
    layer = reference.layer_of(FrozenCopy())
    tokens = torch.randn(3, 9, 8)
    reference.assert_relabelling_changes_nothing(layer, tokens, {"weight": 0})
    reference.assert_permuted_tokens_give_permuted_outputs(layer, tokens)
    reference.assert_one_image_alone_is_predicted_alike(layer, tokens)
    reference.assert_autocast_keeps_the_record(layer, tokens)


def test_its_weights_have_the_inner_routers_names():
    ours, theirs = both(k=2)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_settings():
    router = FrozenCopy(router=NoisyTopK(k=3, noise_std=2.0), until=0.3)
    assert (
        router.k == router.active(8) == 3
        and router.provides == {"load"}
        and router.wants == frozenset()
    )
    fewer = router.with_k(1)
    assert isinstance(fewer, FrozenCopy) and (
        fewer.k,
        fewer.until,
        fewer.router.noise_std,
        router.k,
    ) == (1, 0.3, 2.0, 3)
    assert FrozenCopy.model_validate(router.model_dump()) == router
    with pytest.raises(UserError, match="k is 3, but there are 2 experts"):
        router.build(6, 2)
    for until in (-0.1, 1.1):
        with pytest.raises(ValidationError):
            FrozenCopy(until=until)


def test_it_stays_frozen_while_its_model_is_fine_tuned():
    router = FrozenCopy(router=NoisyTopK(k=2), until=0.5).finetuned().with_k(1).build(6, 4).train()
    assert router.until == 0 and router.config.k == 1
    _, record = router(torch.randn(2, 3, 6), RoutingContext(progress=0.0))
    assert not record.combine.requires_grad
