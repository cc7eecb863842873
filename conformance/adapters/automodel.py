"""NeMo AutoModel's MoE on a CPU: gate, experts, bias, mask, and the loss as training adds it.

``loss`` has the gradient that the backward pass adds to that of 0 × output.
"""

from functools import partial
from importlib.metadata import version

import torch
from moecore.testing import Target

SCRIPTS = dict.fromkeys(("reach the router", "push to even load"), "automodel-loss.py")
REASONS = {"agree over ranks": "not measured: it sums the loads of DTensors"}


def build(**options):
    from nemo_automodel.components.moe import layers
    sizes = dict(dim=12, inter_dim=10, moe_inter_dim=10, n_routed_experts=8, n_activated_experts=2)
    sizes |= dict(n_shared_experts=0, n_expert_groups=1, n_limited_groups=1, route_scale=1.0, train_gate=True)
    config = layers.MoEConfig(**sizes, **options, norm_topk_prob=True, dtype=torch.float32)
    layer = layers.MoE(config, layers.BackendConfig(linear="torch", enable_deepep=False))
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]; return layer


def run(layer, tokens, padding=None):
    seen = []; hook = layer.gate.register_forward_hook(lambda gate, given, out: seen.append(out))
    output = layer(tokens, padding); hook.remove(); top, ids, loss = seen[0]
    weights = torch.zeros(len(ids), 8).scatter(-1, ids, top.float()).view(*tokens.shape[:2], 8)
    named = dict(weights=weights, logits=tokens @ layer.gate.weight.T)
    return dict(output=output, loss=None if loss is None else loss.detach() + 0 * output.sum(), **named)


def targets():
    named = dict(version=version("nemo-automodel"), run=run, width=12, experts=8, router="gate", k=2)
    named |= dict(weights_sum=1.0, causal=True, padded=True)
    loss = dict(score_func="softmax", softmax_before_topk=True, aux_loss_coeff=1.0, gate_bias_update_factor=0)
    bias = dict(score_func="sigmoid", aux_loss_coeff=0, gate_bias_update_factor=0.01)
    yield Target(name="automodel-loss", build=partial(build, **loss), score="softmax", loss_mean="batch",
                 even_loss=1.0, scripts=SCRIPTS, **named)
    yield Target(name="automodel-bias", build=partial(build, **bias), score="sigmoid",
                 selection_bias="gate.e_score_correction_bias", not_promised=REASONS,
                 after_step=lambda layer, outcome: layer.gate.update_bias(), **named)


TARGETS = targets
