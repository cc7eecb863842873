# deepspeed-top1-defaults 0.19.8, "repeat evaluation": evaluation draws no number
import copy, functools, torch
def build(k=2, **options):
    from deepspeed.moe.sharded_moe import TopKGate
    experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    layer = torch.nn.ModuleDict({"gate": TopKGate(12, 4, k=k, **options), "experts": experts})
    torch.nn.init.normal_(layer.gate.wg.weight, std=0.5); return layer
def run(layer, tokens):
    flat = tokens.flatten(0, 1)
    loss, combine, _, counts = layer.gate(flat)
    weights = combine.sum(-1).view(*tokens.shape[:2], 4)
    output = sum(weights[..., e, None] * expert(tokens) for e, expert in enumerate(layer.experts))
    logits, counts = layer.gate.wg(tokens), None if layer.gate.drop_tokens else counts  # before drops
    return dict(output=output, weights=weights, loss=loss, logits=logits, probs=logits.softmax(-1), counts=counts)
torch.manual_seed(0); layer = build(*(1,), **{})
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()), "experts per token:", (a["weights"] != 0).sum(-1).unique())
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
