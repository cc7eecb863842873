# deepspeed-top1-defaults 0.19.8, law "break ties"
import copy, torch
def build(k=2, **options):
    from deepspeed.moe.sharded_moe import TopKGate
    layer = torch.nn.Module()
    layer.gate = TopKGate(12, 4, k=k, **options)
    layer.experts = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
    torch.nn.init.normal_(layer.gate.wg.weight, std=0.5)
    return layer
def run(layer, tokens):
    flat = tokens.flatten(0, 1)
    loss, combine, _, counts = layer.gate(flat)
    weights, shape = combine.sum(-1), (*tokens.shape[:2], 4)
    output = sum(weights[:, e, None] * expert(flat) for e, expert in enumerate(layer.experts))
    logits = layer.gate.wg(flat.float()).view(shape)
    kept = counts if not layer.gate.drop_tokens else None  # with drops they are of the choice before
    return dict(output=output.view_as(tokens), weights=weights.view(shape), loss=loss, logits=logits, probs=logits.softmax(-1), counts=kept)
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
[p.data.zero_() for p in [p for n, p in layer.named_parameters() if n.startswith('gate') and n != 'None']]
layer.eval(); state = torch.get_rng_state(); a, b = run(layer, x), run(layer, x)
print("experts used per token:", (a["weights"] != 0).sum(-1).unique().tolist())
print("draws random numbers:", not torch.equal(state, torch.get_rng_state()))
print("largest change of weights, of the output:", *((a[n] - b[n]).abs().max().item() for n in ("weights", "output")))
# ties are broken the same each time
