"""Megatron-core's MoELayer: the loss per sequence and token; group-limited routing with a bias.

With a mask of padding and a bias its router raises an error, so that this law is not run.
"""

from functools import partial
from importlib.metadata import version

from megatron_core import run
from megatron_layer import build
from moecore.testing import Target

REASONS = {"round to bf16": "not measured: groups are chosen, too, by margins that no record has"}
REASONS["recompute activations"] = 'its own checkpoint is reentrant, and "torch.is_grad_enabled()" keeps it from counting twice'
COUNTS = {"count dispatched tokens": "megatron-core-groups.py"}
SPLIT = dict.fromkeys(("split the batch", "agree over ranks"), "megatron-core-seq-per-token.py")
GROUPS = dict(moe_router_num_groups=4, moe_router_group_topk=1, moe_router_enable_expert_bias=True)
SEQUENCE = dict(moe_router_load_balancing_type="seq_aux_loss", calculate_per_token_loss=True)


def targets():
    named = dict(version=version("megatron-core"), run=run, width=12, experts=8, k=2, even_loss=1.0)
    named |= dict(causal=True, padded=True, networks="experts.local_experts", weights_sum=1.0)
    sequence = dict(build=partial(build, **SEQUENCE), score="softmax", loss_mean="sequence")
    groups = dict(build=partial(build, moe_router_score_function="sigmoid", **GROUPS), score="sigmoid")
    groups |= dict(loss_mean="batch", selection_bias="router.expert_bias", not_promised=REASONS)
    yield Target(name="megatron-core-seq-per-token", scripts=SPLIT, **sequence, **named)
    yield Target(name="megatron-core-groups", scripts=COUNTS, **groups, **named)


TARGETS = targets
