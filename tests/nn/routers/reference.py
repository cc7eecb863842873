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
