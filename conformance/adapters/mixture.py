"""mixture-of-experts: top-2 gating with capacity per sequence (lucidrains)."""

from importlib.metadata import version
from moecore.testing import Target


def build():
    from mixture_of_experts import MoE
    return MoE(dim=12, num_experts=4, hidden_dim=10, second_policy_train="all",
               second_policy_eval="all", capacity_factor_train=4.0, capacity_factor_eval=4.0,
               loss_coef=1.0)


def run(layer, tokens):
    output, loss = layer(tokens)
    _, combine, _ = layer.gate(tokens)
    logits = tokens @ layer.gate.w_gating
    return dict(output=output, weights=combine.sum(-1), loss=loss, logits=logits,
                probs=logits.softmax(-1))


TARGETS = [
    Target(
        name="mixture-of-experts", version=version("mixture-of-experts"), build=build, run=run, width=12, experts=4,
        router="gate", networks="experts", k=2, score="softmax", weights_sum=1.0,
        loss_mean="sequence", even_loss=1.0,
    )
]
