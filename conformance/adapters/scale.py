"""fairscale's top-2 gate (GShard), with experts in one process."""

from importlib.metadata import version

import torch
from moecore.testing import Target


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


TARGETS = [
    Target(
        name="fairscale", version=version("fairscale"), build=build, run=run, width=12, experts=4,
        router="gate", loss_mean="batch", even_loss=1.0,
        not_promised={"permute experts": "a random choice, which is not permuted", "permute tokens": "tokens are served in their order", "isolate sequences": "a capacity over the batch"},
    )
]
