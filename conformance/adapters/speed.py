"""DeepSpeed's gate for k = 1, 2, 3, without drops and with its defaults; experts in one process."""

from importlib.metadata import version

import torch
from moecore.testing import Target


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


def targets():
    from functools import partial
    options = dict(version=version("deepspeed"), run=run, width=12, experts=4, router="gate", loss_mean="batch")
    stated = {1: dict(even_loss=1.0), 2: dict(even_loss=1.0, weights_sum=1.0), 3: dict(even_loss=1.0, weights_sum=1.0)}
    order = {"push to even load": "the choice before drops is not exposed", "permute experts": "a random choice, which is not permuted", "permute tokens": "tokens are served in their order", "isolate sequences": "a capacity over the batch"}
    whole = dict(drop_tokens=False, min_capacity=0, use_rts=False, top2_2nd_expert_sampling=False)
    return [
        *(Target(name=f"deepspeed-top{k}", build=partial(build, k, **whole), k=k, **options, **stated[k], score="softmax") for k in stated),
        *(Target(name=f"deepspeed-top{k}-defaults", build=partial(build, k), not_promised=order, **options, even_loss=1.0) for k in stated),
    ]


TARGETS = targets
