"""torchtitan's MoE on a CPU: experts in a loop, no Triton, and torch.histc of floats."""

import sys
from importlib.metadata import version
from types import ModuleType

import torch
from moecore.testing import Target


def build():
    from torchtitan.models.moe.moe import MoE, MoEArgs
    args = MoEArgs(num_experts=4, top_k=2, route_norm=True, num_shared_experts=0, use_grouped_mm=False, score_before_experts=False)
    layer = MoE(args, dim=12, hidden_dim=10)
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]
    return layer


def run(layer, tokens):
    flat = tokens.flatten(0, 1)
    top, ids, _ = layer.router(flat, layer.expert_bias)
    before = layer.tokens_per_expert.clone()
    output = layer(tokens)
    shape = (*tokens.shape[:2], 4)
    weights = torch.zeros(len(flat), 4).scatter(-1, ids, top.float()).view(shape)
    return dict(output=output, weights=weights, logits=layer.router.gate(flat).view(shape), counts=layer.tokens_per_expert - before)


def targets():
    kernels = ModuleType("torchtitan.models.moe.kernels")  # needs Triton; for grouped_mm only
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    torch.histc = lambda values, *given, histc=torch.histc, **named: histc(values.float(), *given, **named)
    options = dict(width=12, experts=4, k=2, score="sigmoid", weights_sum=1.0, causal=True)
    return [Target(name="torchtitan", version=version("torchtitan"), build=build, run=run, selection_bias="expert_bias", **options)]


TARGETS = targets
