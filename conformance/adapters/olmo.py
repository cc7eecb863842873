"""OLMo-core's router, with linear experts: the kernels of its dispatch are Triton's, for a GPU."""

from functools import partial
from importlib.metadata import version

import torch
from moecore.testing import Target


def build(granularity):
    from olmo_core.nn.moe.router import MoELinearRouter
    layer = torch.nn.Module()
    layer.router = MoELinearRouter(
        d_model=12, num_experts=4, top_k=2, lb_loss_weight=1.0, normalize_expert_weights=1.0,
        bias_gamma=0.01, lb_loss_granularity=granularity)
    layer.experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    layer.router.reset_parameters(); torch.nn.init.normal_(layer.router.weight, std=0.5)
    return layer


def run(layer, tokens):
    top, ids, counts, loss = layer.router(tokens)
    logits = layer.router.get_expert_logits(tokens).float()
    weights = torch.zeros(logits.shape).scatter(-1, ids, top.float())
    output = sum(weights[..., e, None] * expert(tokens) for e, expert in enumerate(layer.experts))
    return dict(output=output, weights=weights, logits=logits, counts=counts, loss=loss)


def targets():
    named = dict(version=version("ai2-olmo-core"), run=run, width=12, experts=4, k=2, score="softmax")
    named |= dict(weights_sum=1.0, even_loss=1.0, selection_bias="router.score_bias", causal=True)
    named |= dict(after_step=lambda layer, outcome: layer.router.post_batch())
    named |= dict(runs="router and losses; dispatch and experts are plain torch")
    for name, mean in (("instance", "sequence"), ("local_batch", "batch")):
        yield Target(name=f"olmo-core-{name}", build=partial(build, name), loss_mean=mean, **named)


TARGETS = targets
