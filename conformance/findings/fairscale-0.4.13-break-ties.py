# fairscale 0.4.13, law "break ties"
import copy, torch
def build():
    from fairscale.nn.moe import Top2Gate
    layer = torch.nn.Module()
    layer.gate = Top2Gate(12, 4)
    layer.experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    torch.nn.init.normal_(layer.gate.wg.weight, std=0.5)
    return layer
def run(layer, tokens):
    flat = tokens.flatten(0, 1)
    loss, combine, _ = layer.gate(flat)
    weights = combine.sum(-1)
    output = sum(weights[:, e, None] * expert(flat) for e, expert in enumerate(layer.experts))
    shape = (*tokens.shape[:2], 4)
    logits = layer.gate.wg(flat)
    return dict(output=output.view_as(tokens), weights=weights.view(shape), loss=16 * loss, logits=logits.view(shape))
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
[p.data.zero_() for p in [p for n, p in layer.named_parameters() if n.startswith('gate') and n != 'None']]
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("experts used per token:", (a["weights"] != 0).sum(-1).unique().tolist())
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()))
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
# ties are broken the same each time
