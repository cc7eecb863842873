"""Mixtral's sparse block in any version of transformers, and the loss of its logits.

``load_balancing_loss_func`` says that it is equations 4 to 6 of Switch Transformers, in which the
shares f sum to 1, so that the loss at an even load is 1.
"""

from importlib.metadata import version

import torch
from moecore.testing import Target
from moecore.training.teachers.timm import define_missing_operators


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


def targets():
    define_missing_operators()  # where torchvision is not of this torch
    number = version("transformers")
    options = dict(build=build, run=run, width=12, experts=4, router="gate", k=2, score="softmax")
    options |= dict(scripts={"sum load shares": "transformers-sum-load-shares.py"}, weights_sum=1.0, loss_mean="batch", even_loss=1.0, causal=True, version=number)
    return [Target(name="transformers-mixtral", padded=number >= "4.37", **options)]


TARGETS = targets
