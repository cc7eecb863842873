# megatron-core 0.16.1: with groups, the loss counts other experts than those that get tokens
import torch
from megatron.core.transformer.moe import moe_utils
grouped = dict(score_function="sigmoid", num_groups=4, group_topk=1)
def route(logits):
    _, dispatched = moe_utils.topk_routing_with_score_function(logits, 2, **grouped)
    counted, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    loss = moe_utils.switch_load_balancing_loss_func(scores, counted.sum(0), len(logits), 2, 8, 1.0)
    return dispatched.sum(0), counted.sum(0), float(loss)
torch.manual_seed(0)
routed = [route(torch.randn(32, 8)) for _ in range(2000)]
routed.sort(key=lambda each: each[0].float().var())
for name, (dispatched, counted, loss) in (("most even", routed[0]), ("most uneven", routed[-1])):
    print(f"{name} load: dispatched {dispatched.tolist()}, counted {counted.tolist()}, loss {loss:.4f}")
