"""fairscale's top-2 gate (GShard), with experts in one process."""

from importlib.metadata import version

import torch
from moecore.testing import Target


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


TARGETS = [
    Target(
        name="fairscale", version=version("fairscale"), build=build, run=run, width=12, experts=4,
        router="gate", loss_mean="batch", even_loss=1.0,
        not_promised={"permute experts": "a random choice, which is not permuted", "permute tokens": "tokens are served in their order", "isolate sequences": "a capacity over the batch"},
    )
]
