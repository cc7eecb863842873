# fairscale 0.4.13, "repeat evaluation": evaluation draws no number
import copy, functools, torch
def build():
    from types import SimpleNamespace; from fairscale.nn.moe import MOELayer, Top2Gate
    torch.distributed.all_to_all_single = lambda output, given, group: output.copy_(given)
    experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    layer = MOELayer(Top2Gate(12, 4), experts, SimpleNamespace(size=lambda: 1))
    torch.nn.init.normal_(layer.gate.wg.weight, std=0.5)
    return layer
def run(layer, tokens):
    seen = []; hook = layer.gate.register_forward_hook(lambda gate, given, out: seen.append(out))
    output = layer(tokens.reshape(4, -1, 12)).view_as(tokens); hook.remove(); layer.l_aux = None
    loss, combine, _ = seen[0]
    weights = combine.sum(-1).view(*tokens.shape[:2], 4)
    return dict(output=output, weights=weights, loss=16 * loss, logits=layer.gate.wg(tokens))
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()), "experts per token:", (a["weights"] != 0).sum(-1).unique())
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
