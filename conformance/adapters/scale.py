"""fairscale's MOELayer with its top-2 gate (GShard) in one process, which is its own group."""

from importlib.metadata import version

import torch
from moecore.testing import Target

DROPS = 'experts have a capacity of 2 S / E tokens of the batch ("Remove locations outside capacity")'


def build():
    from types import SimpleNamespace
    from fairscale.nn.moe import MOELayer, Top2Gate
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


TARGETS = [
    Target(
        name="fairscale", version=version("fairscale"), build=build, run=run, width=12, experts=4,
        router="gate", loss_mean="batch", even_loss=1.0, not_promised=dict.fromkeys(
            ("permute experts", "permute tokens", "isolate sequences"), DROPS),
    )
]
