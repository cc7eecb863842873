"""A slow MoE layer to compare routers' plans with, and what several tests of routers ask of a
layer.
"""

import copy

import torch
from torch.nn.functional import gelu

from moecore.core.routing_records import RoutingContext
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoEFeedForward


def layer_of(router, width=8, experts=4, seed=0):
    """A layer of a router's settings and Mlp experts, all parameters drawn with std 0.5."""
    torch.manual_seed(seed)
    layer = MoEFeedForward(
        router.build(width, experts),
        Mlp(number=experts, hidden_ratio=1.5).build(width),
        router.wants,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def expert_output(layer, expert, values):
    """Expert ``expert`` on values (..., d)."""
    experts = layer.experts
    return (
        gelu(values @ experts.up[expert] + experts.up_bias[expert]) @ experts.down[expert]
        + experts.down_bias[expert]
    )


def weighted_sum(layer, tokens, combine):
    """Every expert on every token, times ``combine`` (B, T, E)."""
    return sum(
        combine[..., e].unsqueeze(-1) * expert_output(layer, e, tokens)
        for e in range(combine.shape[-1])
    )


def outputs_and_gradients(forward, inputs):
    """forward() and the gradients of a fixed random projection of it to ``inputs``
    (0 where one takes no part).
    """
    outputs = forward()
    towards = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(9)).to(
        outputs.dtype
    )
    return outputs, torch.autograd.grad(outputs, inputs, towards, materialize_grads=True)


def assert_like(layer, tokens, slow, context=RoutingContext(), further=()):
    """The layer and slow(tokens) agree in outputs and in the gradients of tokens, all parameters
    and ``further``; same noise for both.
    """
    inputs = [tokens, *layer.parameters(), *further]
    torch.manual_seed(3)
    actual, ours = outputs_and_gradients(lambda: layer(tokens, context)[0], inputs)
    torch.manual_seed(3)
    expected, theirs = outputs_and_gradients(lambda: slow(tokens), inputs)
    assert expected.any() and theirs[0].any()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def relabelled(layer, order, axes):
    """The layer with expert order[i] as expert i; ``axes``: name of each router parameter that has
    an expert axis -> that axis.
    """
    other = copy.deepcopy(layer)
    for parameter in other.experts.parameters():
        parameter.data = parameter.data[order]
    for name, axis in axes.items():
        parameter = getattr(other.router, name)
        parameter.data = parameter.data.index_select(axis, order)
    return other


def assert_relabelling_changes_nothing(
    layer, tokens, axes, context=RoutingContext(), other_context=None, order=(2, 0, 3, 1)
):
    """Outputs stay, and every field of the record is permuted."""
    order = torch.tensor(order)
    outputs, (record,) = layer.eval()(tokens, context)
    others, (permuted,) = relabelled(layer, order, axes)(tokens, other_context or context)
    torch.testing.assert_close(others, outputs)
    for mine, other in zip(record, permuted, strict=True):
        torch.testing.assert_close(other, mine[..., order])


def assert_permuted_tokens_give_permuted_outputs(
    layer, tokens, context=RoutingContext(), other_context=None, order=None
):
    if order is None:
        order = torch.randperm(tokens.shape[1])
    outputs, (record,) = layer.eval()(tokens, context)
    others, (permuted,) = layer(tokens[:, order], other_context or context)
    torch.testing.assert_close(others, outputs[:, order])
    for mine, other in zip(record, permuted, strict=True):
        torch.testing.assert_close(other, mine[:, order])


def first_image(context):
    """The context of a batch's first image alone."""
    return RoutingContext(
        *(field[:1] if isinstance(field, torch.Tensor) else field for field in context)
    )


def assert_one_image_alone_is_predicted_alike(layer, tokens, context=RoutingContext()):
    torch.testing.assert_close(
        layer.eval()(tokens[:1], first_image(context))[0], layer(tokens, context)[0][:1]
    )


def assert_autocast_keeps_the_record(layer, tokens, context=RoutingContext()):
    """Under bf16 autocast the record is bit-equal and fp32, and outputs are bf16 and close."""
    layer.eval()
    expected, (plain,) = layer(tokens, context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, (record,) = layer(tokens, context)
        rounded = layer.router(tokens.bfloat16(), context)[1]
    assert all(torch.equal(a, b) for a, b in zip(record, plain, strict=True))
    assert all(field.dtype in (torch.float32, torch.bool) for field in (*record, *rounded))
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).norm() < 0.03 * expected.norm()


def assert_well_formed(record, tokens, experts):
    """Shapes and dtypes of the record, finite, and probs that sum to 1 for every token."""
    assert all(field.shape == (*tokens.shape[:2], experts) for field in record)
    assert record.chosen.dtype == torch.bool and all(field.isfinite().all() for field in record)
    torch.testing.assert_close(record.probs.sum(-1), torch.ones(tokens.shape[:2]))
    assert not record.combine[~record.chosen].any()


def assert_padding_takes_no_part(layer, tokens, context=RoutingContext()):
    """A plan with more rows than chosen pairs: the layer still agrees with every expert on every
    token, in gradients too.
    """
    plan, record = layer.router(tokens, context)
    assert len(plan.dispatch(tokens).values) > record.chosen.sum()
    assert_like(
        layer,
        tokens,
        lambda x: weighted_sum(layer, x, layer.router(x, context)[1].combine),
        context,
    )
