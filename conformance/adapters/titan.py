"""torchtitan's MoE on a CPU: experts in a loop, without Triton, and torch.histc of integers."""

from importlib.metadata import version

import torch
from moecore.testing import Target


def build():
    import sys, types
    sys.modules["torchtitan.models.moe.kernels"] = types.SimpleNamespace(generate_permute_indices=None)
    torch.histc = lambda ids, bins, min, max: ids.flatten().bincount(minlength=bins)
    from torchtitan.models.moe.moe import MoE, MoEArgs
    options = dict(route_norm=True, top_k=2, use_grouped_mm=False, score_before_experts=False)
    layer = MoE(MoEArgs(num_experts=4, num_shared_experts=0, **options), 12, 10)
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]
    return layer


def run(layer, tokens):
    flat, before = tokens.flatten(0, 1), layer.tokens_per_expert.clone()
    top, ids, _ = layer.router(flat, layer.expert_bias)
    weights = torch.zeros(len(flat), 4).scatter(-1, ids, top.float()).view(*tokens.shape[:2], 4)
    output, logits = layer(tokens), layer.router.gate(flat).view_as(weights)
    return dict(output=output, weights=weights, logits=logits, counts=layer.tokens_per_expert - before)


TARGETS = [
    Target(
        name="torchtitan", version=version("torchtitan"), build=build, run=run, width=12, experts=4,
        k=2, score="sigmoid", weights_sum=1.0, causal=True, selection_bias="expert_bias",
    )
]
