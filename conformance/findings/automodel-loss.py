# nemo-automodel 0.2.0: the gradient of the balance loss reaches no parameter in training
import torch
from nemo_automodel.components.moe.layers import Gate, MoEConfig
sizes = dict(dim=12, inter_dim=10, moe_inter_dim=10, n_routed_experts=8, n_activated_experts=2)
sizes |= dict(n_shared_experts=0, n_expert_groups=1, n_limited_groups=1, route_scale=1.0)
options = dict(score_func="softmax", softmax_before_topk=True, norm_topk_prob=True)
options |= dict(train_gate=True, gate_bias_update_factor=0, aux_loss_coeff=1.0, dtype=torch.float32)
torch.manual_seed(0)
gate = Gate(MoEConfig(**sizes, **options)).train()
torch.nn.init.normal_(gate.weight)
weights, ids, loss = gate(torch.randn(64, 12), torch.ones(64, dtype=torch.bool), None)
stated = torch.autograd.grad(loss, gate.weight, retain_graph=True)[0]
(0 * weights.sum()).backward()  # what training adds is in the backward pass of the weights
print("loss:", loss.item(), "norm of its gradient:", stated.norm().item())
print("norm of the gradient that the backward pass adds:", gate.weight.grad.norm().item())
