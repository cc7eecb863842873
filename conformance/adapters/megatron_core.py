"""Megatron-core's routing and loss functions, with a linear router: its layer needs a GPU.

Group-limited choice, as in DeepSeek-V3: 8 experts in 4 groups, of which a token keeps 1.
"""

from functools import partial
from importlib.metadata import version

import torch
from moecore.testing import Target


GROUPED = {"round to bf16": "groups are chosen, too, by margins that no record has"}


def build(bias=False):
    experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(8))
    layer = torch.nn.ModuleDict({"router": torch.nn.Linear(12, 8, bias=False), "experts": experts})
    layer.register_buffer("expert_bias", 0.2 * torch.randn(8) if bias else None)
    torch.nn.init.normal_(layer.router.weight, std=0.5); return layer


def run(layer, tokens, padding=None, score="softmax", **options):
    from megatron.core.transformer.moe import moe_utils
    logits = layer.router(tokens.flatten(0, 1))
    weights, chosen = moe_utils.topk_routing_with_score_function(logits, 2, score_function=score, expert_bias=layer.expert_bias, **options)
    mask = None if padding is None else padding.flatten()
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score, padding_mask=mask)
    counts = routing_map.sum(0)  # as get_tokens_per_expert_and_token_count on one rank
    loss = moe_utils.switch_load_balancing_loss_func(scores, counts, counts.sum() / 2, 2, 8, 1.0)
    output = sum(weights[:, e, None] * expert(tokens.flatten(0, 1)) for e, expert in enumerate(layer.experts))
    named = dict(weights=weights, chosen=chosen.bool(), logits=logits, probs=scores)
    return dict(output=output.view_as(tokens), loss=loss, counts=counts, **{n: v.view(*tokens.shape[:2], 8) for n, v in named.items()})


def targets():
    options = dict(version=version("megatron-core"), width=12, experts=8, k=2, loss_mean="batch", even_loss=1.0, causal=True, padded=True)
    grouped = dict(score="sigmoid", num_groups=4, group_topk=1)
    return [
        Target(name="megatron-core-softmax", build=build, run=partial(run, use_pre_softmax=True), score="softmax", **options),
        Target(name="megatron-core-groups", build=partial(build, True), run=partial(run, **grouped), score="sigmoid", weights_sum=1.0, selection_bias="expert_bias", not_promised=GROUPED, **options),
    ]


TARGETS = targets
