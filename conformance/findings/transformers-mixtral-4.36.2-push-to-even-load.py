# transformers-mixtral 4.36.2, "push to even load": the loss is least at an even load: 2 at an even load, 2 at an uneven one
import copy, functools, torch
def build():
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
    layer = MixtralSparseMoeBlock(MixtralConfig(hidden_size=12, intermediate_size=10, num_local_experts=4))
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]; return layer
def run(layer, tokens, padding=None):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as balance
    seen = []; hook = layer.gate.register_forward_hook(lambda gate, given, out: seen.append(out))
    output = layer(tokens); hook.remove()
    output, (logits, *rest) = (output[0], (seen[0],)) if isinstance(output, tuple) else (output, seen[0])
    top, ids = rest or logits.softmax(-1).topk(2)
    weights = torch.zeros(logits.shape).scatter(-1, ids, (top / top.sum(-1, True)).float()).view(*tokens.shape[:2], 4)
    loss = balance((logits,), 4, 2, *([] if padding is None else [(~padding).long()]))
    return dict(output=output, weights=weights, logits=logits.view_as(weights), loss=loss)
torch.manual_seed(0); layer = build()
x = torch.randn(4, 16, 12, generator=torch.Generator().manual_seed(1))
even = x[:, :1].repeat(1, 64, 1) * 0 + torch.randn(4, 64, 12); one = x[:1, :1].repeat(4, 64, 1)
layer.train(); print("random tokens:", float(run(layer, even)["loss"]), "one token, repeated:", float(run(layer, one)["loss"]), torch.autograd.grad(run(layer, one)["loss"], [p for n, p in layer.named_parameters() if n.startswith('gate') and n != 'None']))
