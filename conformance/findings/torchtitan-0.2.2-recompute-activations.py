# torchtitan 0.2.2, "recompute activations": recomputing activations in the backward pass changes nothing: tokens_per_expert differs by up to 50
import copy, functools, torch
def build():
    import sys, types; sys.modules["torchtitan.models.moe.kernels"] = types.SimpleNamespace(generate_permute_indices=None)
    torch.histc = lambda ids, bins, min, max: ids.flatten().bincount(minlength=bins); from torchtitan.models.moe.moe import MoE, MoEArgs
    options = dict(route_norm=True, top_k=2, use_grouped_mm=False, score_before_experts=False)
    layer = MoE(MoEArgs(num_experts=4, num_shared_experts=0, **options), 12, 10)
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]; return layer
def run(layer, tokens):
    flat, before = tokens.flatten(0, 1), layer.tokens_per_expert.clone()
    top, ids, _ = layer.router(flat, layer.expert_bias)
    weights = torch.zeros(len(flat), 4).scatter(-1, ids, top.float()).view(*tokens.shape[:2], 4)
    output, logits = layer(tokens), layer.router.gate(flat).view_as(weights)
    return dict(output=output, weights=weights, logits=logits, counts=layer.tokens_per_expert - before)
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
from torch.utils.checkpoint import checkpoint
for again in (False, True):
    twin = copy.deepcopy(layer).train(); f = lambda x: run(twin, x)["output"].square().mean(); y = x.clone().requires_grad_()
    (checkpoint(f, y, use_reentrant=False) if again else f(y)).backward(); print("checkpointed:", again, dict(twin.named_buffers()))
