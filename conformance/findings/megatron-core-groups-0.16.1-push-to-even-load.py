# megatron-core-groups 0.16.1, "push to even load": the loss is least at an even load: 1.077 at an even load, 1.039 at an uneven one
import copy, functools, torch
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
run = functools.partial(run, **{'score': 'sigmoid', 'num_groups': 4, 'group_topk': 1})
torch.manual_seed(0); layer = build(*(True,), **{})
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
even = x[:, :1].repeat(1, 64, 1) * 0 + torch.randn(4, 64, 12); one = x[:1, :1].repeat(4, 64, 1)
layer.train(); print("random tokens:", float(run(layer, even)["loss"]), "one token, repeated:", float(run(layer, one)["loss"]), torch.autograd.grad(run(layer, one)["loss"], [p for n, p in layer.named_parameters() if n.startswith('router') and n != 'expert_bias']))
