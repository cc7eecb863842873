# transformers-mixtral 5.2.0, "normalise weights": the weights are the softmax of the logits, as stated: the weight differs by up to 0.266
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
layer.eval(); out = run(layer, x); w = out["weights"][0, 0]; s = out["logits"][0, 0].float().softmax(-1)
print("weights:", w, "softmax of the returned logits:", s)
print("stated sum: 1.0, scale 1.0; sum:", w.sum().item())
