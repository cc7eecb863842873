"""st-moe-pytorch: top-n gating with capacity per sequence (lucidrains)."""

from importlib.metadata import version
from moecore.testing import Target


def build():
    from st_moe_pytorch import MoE
    return MoE(dim=12, num_experts=4, gating_top_n=2, threshold_train=0.0, threshold_eval=0.0,
               capacity_factor_train=4.0, capacity_factor_eval=4.0)


def run(layer, tokens):
    output, _, loss, _ = layer(tokens)
    _, combine, _, _ = layer.gate(tokens)
    logits = layer.gate.to_gates(tokens)
    return dict(output=output, weights=combine.sum(-1), loss=loss, logits=logits,
                probs=logits.softmax(-1))


TARGETS = [
    Target(
        name="st-moe-pytorch", version=version("st-moe-pytorch"), build=build, run=run, width=12, experts=4,
        router="gate", networks="experts.experts", k=2, score="softmax", weights_sum=1.0,
        loss_mean="sequence", even_loss=1.0,
    )
]
