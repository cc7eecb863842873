"""DeepSpeed's MOELayer in one process, for k = 1, 2, 3, without drops and with its defaults.

Its ``exp_counts`` are of the choice before drops, so they are compared where none is dropped.
"""

from functools import partial
from importlib.metadata import version

import torch
from moecore.testing import Target

DROPS = 'its defaults drop tokens ("drop_tokens: setting to False is equivalent to infinite capacity")'
REASONS = dict.fromkeys(("permute experts", "permute tokens", "isolate sequences"), DROPS)
REASONS |= {"push to even load": "not measured: the choice before drops is not exposed"}
SCRIPTS = dict.fromkeys(("repeat evaluation", "break ties"), "deepspeed-defaults.py")
WHOLE = dict(drop_tokens=False, min_capacity=0, use_rts=False, top2_2nd_expert_sampling=False)


def build(k, **options):
    from deepspeed.moe import experts, sharded_moe as moe
    gate, networks = moe.TopKGate(12, 4, k=k, **options), experts.Experts(torch.nn.Linear(12, 12), 4)
    layer = moe.MOELayer(gate, networks, "", 1, 4)
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]; return layer


def run(layer, tokens):
    seen = []; hook = layer.gate.register_forward_hook(lambda gate, given, out: seen.append(out))
    output = layer(tokens, None); hook.remove(); layer.l_aux = layer.exp_counts = None
    (loss, _, _, ids, _, gates, counts), = seen  # ids (k, tokens), -1 where dropped
    weights = torch.zeros(ids.shape[1], 5, dtype=gates.dtype).scatter(-1, ids.T.long() % 5, gates.T)[:, :4]
    logits, counts = layer.gate.wg(tokens), None if layer.gate.drop_tokens else counts
    return dict(output=output, weights=weights.view(logits.shape), loss=loss, logits=logits, counts=counts)


def targets():
    named = dict(version=version("deepspeed"), run=run, width=12, experts=4, even_loss=1.0)
    named |= dict(router="gate", networks="experts.deepspeed_experts", loss_mean="batch")
    for k, total in ((1, None), (2, 1.0), (3, 1.0)):
        yield Target(name=f"deepspeed-top{k}", build=partial(build, k, **WHOLE), k=k, score="softmax",
                     weights_sum=total, **named)
        yield Target(name=f"deepspeed-top{k}-defaults", build=partial(build, k), not_promised=REASONS,
                     scripts=SCRIPTS, **named)


TARGETS = targets
