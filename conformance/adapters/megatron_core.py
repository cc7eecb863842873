"""Megatron-core's MoELayer on a CPU: router, losses, dispatcher ("allgather") and sequential experts.

``loss`` has the gradient that the backward pass adds to that of 0 × output.
"""

from functools import partial
from importlib.metadata import version

import torch
from megatron_layer import build
from moecore.testing import Target

SCRIPTS = {"agree over ranks": "megatron-core-aux-per-token.py"}


def run(layer, tokens, padding=None):
    from megatron.core.transformer.moe import moe_utils as moe
    gate, seen, attach = layer.router, [], layer.router.attach_and_log_load_balancing_loss
    hook = gate.register_forward_hook(lambda gate, given, out: seen.append(out))
    gate.attach_and_log_load_balancing_loss = lambda *given, **named: seen.append(given[2]) or attach(*given, **named)
    scale = 1 / tokens[..., 0].numel() if gate.calculate_per_token_loss else 1.0 * gate.tp_cp_group.size()
    moe.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
    output = layer(tokens.transpose(0, 1).contiguous(), padding_mask=padding)[0].transpose(0, 1)
    hook.remove(); del gate.attach_and_log_load_balancing_loss; layer.token_dispatcher.local_probs = None
    logits, weights = gate.gating(tokens.contiguous()).float(), seen[-1][0].unflatten(0, tokens.shape[1::-1])
    options = dict(score_function=gate.score_function, padding_mask=None if padding is None else padding.flatten())
    counted, scores = moe.compute_routing_scores_for_aux_loss(logits.flatten(0, 1), 2, **options)
    loss = seen[0].detach() + 0 * output.sum() if len(seen) > 1 else None
    named = dict(logits=logits, probs=scores.view_as(logits), counts=counted.sum(0), loss=loss)
    return dict(output=output, weights=weights.transpose(0, 1), **named)


def targets():
    named = dict(version=version("megatron-core"), run=run, width=12, experts=8, k=2, even_loss=1.0)
    named |= dict(causal=True, padded=True, networks="experts.local_experts", score="softmax")
    named |= dict(reduces_ranks=True, loss_mean="batch")
    first = partial(build, True, moe_router_pre_softmax=True)
    token = dict(build=partial(build, True, calculate_per_token_loss=True), weights_sum=1.0)
    yield Target(name="megatron-core-softmax", build=first, **named)
    yield Target(name="megatron-core-aux-per-token", scripts=SCRIPTS, **token, **named)


TARGETS = targets
