"""A slow MoE layer to compare routers' plans with, and what tests of routers ask of a layer."""

import math

import torch
from torch.nn.functional import gelu

from moecore.core.routing_records import RoutingContext
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoEFeedForward


def layer_of(router, width=8, experts=4, seed=0):
    """A layer of a router's settings and Mlp experts, all parameters drawn with std 0.5."""
    torch.manual_seed(seed)
    module = Mlp(number=experts, hidden_ratio=1.5).build(width)
    layer = MoEFeedForward(router.build(width, experts), module, router.wants)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def expert_output(layer, expert, values):
    experts = layer.experts
    hidden = gelu(values @ experts.up[expert] + experts.up_bias[expert])
    return hidden @ experts.down[expert] + experts.down_bias[expert]


def weighted_sum(layer, tokens, combine):
    return sum(
        combine[..., e].unsqueeze(-1) * expert_output(layer, e, tokens)
        for e in range(combine.shape[-1])
    )


def outputs_and_gradients(forward, inputs):
    """Outputs, and a fixed random projection's gradients (0 where ``inputs`` take no part)."""
    outputs = forward()
    towards = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(9))
    towards = towards.to(outputs.dtype)
    return outputs, torch.autograd.grad(outputs, inputs, towards, materialize_grads=True)


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def assert_like(layer, tokens, slow, context=RoutingContext(), further=()):
    """Agree with slow(tokens), at the same noise: outputs and gradients, also of ``further``."""
    inputs = [tokens, *layer.parameters(), *further]
    torch.manual_seed(3)
    actual, ours = outputs_and_gradients(lambda: layer(tokens, context)[0], inputs)
    torch.manual_seed(3)
    expected, theirs = outputs_and_gradients(lambda: slow(tokens), inputs)
    assert expected.any() and theirs[0].any()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
