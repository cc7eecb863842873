"""OLMo-core's router, with experts in one process: its experts' kernels need a GPU."""

from importlib.metadata import version

import torch
from moecore.testing import Target


def build(**options):
    from olmo_core.nn.moe.router import MoELinearRouter
    layer = torch.nn.Module()
    layer.router = MoELinearRouter(d_model=12, num_experts=4, top_k=2, lb_loss_weight=1.0, normalize_expert_weights=1.0, bias_gamma=0.01, **options)
    layer.experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    layer.router.reset_parameters(); torch.nn.init.normal_(layer.router.weight, std=0.5)
    return layer


def run(layer, tokens):
    top, ids, counts, extra = layer.router(tokens)
    shape = (*tokens.shape[:2], 4)
    weights = torch.zeros(shape).scatter(-1, ids.view(*shape[:2], 2), top.view(*shape[:2], 2).float())
    output = sum(weights[..., e, None] * expert(tokens) for e, expert in enumerate(layer.experts))
    logits = layer.router.get_expert_logits(tokens).float().view(shape)
    return dict(output=output, weights=weights, logits=logits, counts=counts, loss=extra)


def targets():
    from functools import partial
    options = dict(version=version("ai2-olmo-core"), run=run, width=12, experts=4, k=2, score="softmax", weights_sum=1.0)
    options |= dict(loss_mean="sequence", even_loss=1.0, selection_bias="router.score_bias", causal=True)
    options |= dict(not_promised={"permute experts": "the router's rows are one flat parameter"})
    after = lambda layer, outcome: layer.router.post_batch()
    return [Target(name="olmo-core", build=partial(build, lb_loss_granularity="instance"), after_step=after, **options)]


TARGETS = targets
