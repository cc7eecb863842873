"""mlx-lm's sparse block of LFM2-MoE, with the weights of a torch module; its outputs only.

Conventions of the reference in transformers: sigmoid, a bias that only selects, weights sum to 1.
"""

from importlib.metadata import version

import torch
from moecore.testing import Target

NO_GRADIENT = "not measured: gradients of MLX are not read"
REASONS = dict.fromkeys(("reach the router", "restore state", "recompute activations"), NO_GRADIENT)
SCRIPTS = dict.fromkeys(("normalise weights", "keep bias out of weights"), "mlx-lm-lfm2_moe.py")
REASONS |= {"round to bf16": "not measured: MLX has no autocast"}


def build():
    layer, shapes = torch.nn.Module(), dict(gate_proj=(4, 10, 12), up_proj=(4, 10, 12), down_proj=(4, 12, 10))
    layer.router = torch.nn.Linear(12, 4, bias=False)
    layer.experts = torch.nn.ParameterDict({name: torch.empty(shapes[name]) for name in shapes})
    layer.register_buffer("expert_bias", torch.zeros(4))
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]; return layer


def run(layer, tokens):
    import mlx.core as mx, numpy, types
    from mlx_lm.models.lfm2_moe import Lfm2MoeSparseMoeBlock
    sizes = dict(hidden_size=12, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0)
    block = Lfm2MoeSparseMoeBlock(types.SimpleNamespace(**sizes))
    read = lambda tensor: mx.array(tensor.detach().float().numpy())
    block.gate.weight, block.expert_bias = read(layer.router.weight), read(layer.expert_bias)
    [setattr(block.switch_mlp[name], "weight", read(weight)) for name, weight in layer.experts.items()]
    output, block.switch_mlp = block(read(tokens)), lambda values, ids: mx.eye(4)[ids]
    output, weights = (torch.from_numpy(numpy.array(each)) for each in (output, block(read(tokens))))
    return dict(output=output, weights=weights, logits=layer.router(tokens))


TARGETS = [
    Target(name="mlx-lm-lfm2_moe", version=version("mlx-lm"), build=build, run=run, width=12, experts=4,
           k=2, score="sigmoid", weights_sum=1.0, causal=True, selection_bias="expert_bias",
           not_promised=REASONS, scripts=SCRIPTS)
]
