"""soft-moe-pytorch: soft slots (lucidrains). The mask is true for tokens."""

from importlib.metadata import version

import torch
from moecore.testing import Target


def build():
    from soft_moe_pytorch import SoftMoE
    return SoftMoE(12, num_experts=4, num_slots=2, offload_unused_experts_to_cpu=False)


def run(layer, tokens, padding=None):
    mask = None if padding is None else ~padding
    logits = torch.einsum("bnd,esd->bnes", layer.norm(tokens), layer.slot_norm(layer.slot_embeds))
    return dict(output=layer(tokens, mask=mask), weights=logits.flatten(2).softmax(-1).view_as(logits).sum(-1))


TARGETS = [
    Target(
        name="soft-moe-pytorch", version=version("soft-moe-pytorch"), build=build, run=run, width=12,
        experts=4, router="slot_embeds", networks="experts.experts", padded=True,
    )
]
