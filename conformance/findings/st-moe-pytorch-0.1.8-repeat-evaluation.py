# st-moe-pytorch 0.1.8, "repeat evaluation": evaluation draws no number
import copy, functools, torch
def build():
    from st_moe_pytorch import MoE
    return MoE(dim=12, num_experts=4, gating_top_n=2, threshold_train=0.0, threshold_eval=0.0,
               capacity_factor_train=4.0, capacity_factor_eval=4.0)
def run(layer, tokens):
    output, _, loss, _ = layer(tokens)
    _, combine, _, _ = layer.gate(tokens)
    logits = layer.gate.to_gates(tokens)
    return dict(output=output, weights=combine.sum(-1), loss=loss, logits=logits,
                probs=logits.softmax(-1))
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()), "experts per token:", (a["weights"] != 0).sum(-1).unique())
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
