# transformers 5.2.0 to 5.23.0, NLLB-MoE: every token goes to experts 0 and 1
import torch
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
torch.manual_seed(0)
layer = NllbMoeSparseMLP(NllbMoeConfig(d_model=32, num_experts=8), ffn_dim=16).eval()
chosen, calls = [], {}
layer.router.register_forward_hook(lambda router, given, out: chosen.append(out))
for name, expert in layer.experts.items():
    expert.register_forward_hook(lambda m, given, out, name=name: calls.update({name: len(given[0])}))
layer(torch.randn(4, 16, 32))
weights = next(value for value in chosen[0] if value.is_floating_point() and value.shape[-1] == 8)
print("tokens that the router gives each expert:", (weights != 0).flatten(0, -2).sum(0).tolist())
print("tokens that experts process:", calls)
