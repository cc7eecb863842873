# fairscale 0.4.13, "repeat evaluation": evaluation draws no number
import copy, functools, torch
def build():
    from fairscale.nn.moe import Top2Gate
    experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    layer = torch.nn.ModuleDict({"gate": Top2Gate(12, 4), "experts": experts})
    torch.nn.init.normal_(layer.gate.wg.weight, std=0.5); return layer
def run(layer, tokens):
    loss, combine, _ = layer.gate(tokens.flatten(0, 1))
    weights = combine.sum(-1).view(*tokens.shape[:2], 4)
    output = sum(weights[..., e, None] * expert(tokens) for e, expert in enumerate(layer.experts))
    return dict(output=output, weights=weights, loss=16 * loss, logits=layer.gate.wg(tokens))
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()), "experts per token:", (a["weights"] != 0).sum(-1).unique())
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
