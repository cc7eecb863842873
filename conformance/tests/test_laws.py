"""Every law holds for a correct mixture of plain torch, and catches mutations of it."""

from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

from moecore.conformance.laws import LAWS, check_law
from moecore.conformance.targets import NotPromised, Target

EXPERTS = 4


class Mixture(nn.Module):
    """Top-2 of 4 experts, weights that sum to 1, and Switch's loss, mean over sequences."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        nn.init.normal_(self.router.weight, std=0.5)

    def forward(self, tokens, padding=None):
        logits = self.read_logits(tokens)
        probs = logits.softmax(dim=-1)
        chosen = torch.zeros_like(probs, dtype=torch.bool)
        chosen = chosen.scatter(-1, self.choose_experts(probs + self.bias), True)
        weights = self.weigh_experts(probs, chosen)
        is_token = torch.ones_like(chosen[..., :1]) if padding is None else ~padding.unsqueeze(-1)
        outputs = self.list_outputs(tokens)
        counts = (chosen & is_token).flatten(0, -2).sum(dim=0)
        return {
            "output": self.combine_outputs(outputs, weights),
            "logits": logits,
            "probs": probs,
            "chosen": chosen,
            "weights": weights,
            "loss": self.balance_load(probs * is_token, chosen & is_token),
            "counts": counts,
            "statistics": self.log_load(counts.double()),
        }

    def read_logits(self, tokens):
        with torch.autocast("cpu", enabled=False):
            return self.router(tokens.to(self.router.weight.dtype))

    def choose_experts(self, scores):
        return scores.argsort(dim=-1, descending=True, stable=True)[..., :2]

    def weigh_experts(self, probs, chosen):
        weights = probs * chosen
        return weights / weights.sum(dim=-1, keepdim=True)

    def list_outputs(self, tokens):
        return torch.stack([expert(tokens) for expert in self.experts], dim=2)

    def combine_outputs(self, outputs, weights):
        return (outputs * weights.unsqueeze(-1)).sum(dim=2)

    def balance_load(self, probs, chosen):
        shares = chosen.sum(dim=1) / chosen.sum(dim=(1, 2)).unsqueeze(-1)
        return EXPERTS * (shares * probs.sum(dim=1) / probs.sum(dim=(1, 2))[:, None]).sum(-1).mean()

    def log_load(self, counts):
        return {"max_violation": float(counts.max() / counts.mean() - 1)}

    def end_step(self, outcome):
        counts = outcome["chosen"].flatten(0, -2).sum(dim=0).float()
        if distributed.is_initialized():
            distributed.all_reduce(counts)
        self.bias += 0.01 * (counts.mean() - counts).sign()


CORRECT = Target(
    name="mixture",
    build=Mixture,
    run=lambda layer, tokens, *padding: layer(tokens, *padding),
    width=8,
    experts=EXPERTS,
    k=2,
    score="softmax",
    weights_sum=1.0,
    loss_mean="sequence",
    even_loss=1.0,
    causal=True,
    padded=True,
    selection_bias="bias",
    parts=lambda layer, tokens, outcome: (layer.list_outputs(tokens), 0.0),
    after_step=lambda layer, outcome: layer.end_step(outcome),
)


def after(name, change):
    """Return a mutation: ``name`` returns ``change`` of (layer, its result, *arguments)."""
    correct = getattr(Mixture, name)
    return {name: lambda layer, *given: change(layer, correct(layer, *given))}


def before(name, change):
    """Return a mutation: ``change`` is applied to the method's first argument."""
    correct = getattr(Mixture, name)
    return {name: lambda layer, first, *given: correct(layer, change(first), *given)}


def count_call(layer, result):
    layer.calls = getattr(layer, "calls", 0) + layer.training
    return result * (1 + 0.1 * layer.calls)


def count_in_buffer(layer, result):
    layer.bias += 1.0 * layer.training
    return result


def make_bias_temporary(layer, _):
    layer.register_buffer("bias", torch.zeros(EXPERTS), persistent=False)


def weigh_with_bias(layer, probs, chosen):
    return Mixture.weigh_experts(layer, probs + layer.bias, chosen)


def weigh_experts_by_halves(layer, probs, chosen):
    is_rounded = torch.is_autocast_enabled("cpu")
    weights = Mixture.weigh_experts(layer, probs, chosen)
    return (8 * weights).round() / 8 if is_rounded else weights


def read_logits_in_bf16(layer, tokens):
    return layer.router(tokens) + torch.is_autocast_enabled("cpu") * tokens[..., :EXPERTS]


def balance_whole_batch(layer, probs, chosen):
    return EXPERTS * (chosen.float().mean(dim=(0, 1)) * probs.mean(dim=(0, 1))).sum() / 2


def balance_with_padding(layer, probs, chosen):
    return EXPERTS * (chosen.float().mean(dim=1) / 2 * probs.mean(dim=1)).sum(dim=-1).mean()


def balance_the_others(layer, probs, chosen):
    return Mixture.balance_load(layer, probs, ~chosen)


def choose_randomly(layer, scores):
    return (scores + 1e-6 * torch.rand_like(scores)).topk(2).indices


def choose_within_group(layer, scores):  # masked by 0, not −∞
    return (scores * (torch.arange(EXPERTS) < 2)).topk(2).indices


def weigh_all_ties(layer, probs, chosen):
    return probs * (probs >= (probs * chosen).topk(2).values[..., 1:])


def drop_late(values):
    return values * (torch.arange(values.shape[1]) < 12)[:, None]


def scale_by_length(layer, weights):
    return weights * weights.shape[1] / 16


WEIGHTS, LOGITS, LOSS, OUTPUT = "weigh_experts", "read_logits", "balance_load", "combine_outputs"
EVEN = torch.arange(EXPERTS)
MUTATIONS = {
    "sum weighted experts": [
        after(OUTPUT, lambda layer, output: 2 * output),
        {OUTPUT: lambda layer, outputs, weights: (outputs * weights.detach()[..., None]).sum(2)},
    ],
    "reach the router": [
        after(LOGITS, lambda layer, logits: logits.detach()),
        after(LOSS, lambda layer, loss: loss.detach() + 0 * layer.router.weight.sum()),
        after(LOSS, lambda layer, loss: loss + layer.experts[0].weight.sum()),
    ],
    "repeat evaluation": [
        after(LOGITS, lambda layer, logits: logits + torch.randn_like(logits)),
        {
            "train": lambda layer, mode=True: nn.Module.train(layer),
            **after(LOGITS, count_in_buffer),
        },
    ],
    "isolate sequences": [
        before(LOGITS, lambda tokens: tokens - tokens.mean(dim=(0, 1))),
        after(WEIGHTS, lambda layer, weights: weights * (weights.sum(dim=(0, 1)) < 12)),
    ],
    "round to bf16": [{LOGITS: read_logits_in_bf16}, {WEIGHTS: weigh_experts_by_halves}],
    "restore state": [after(LOGITS, count_call), after("__init__", make_bias_temporary)],
    "hide later tokens": [
        before(LOGITS, lambda tokens: tokens.roll(-1, dims=1)),
        after(WEIGHTS, lambda layer, weights: weights / weights.sum(dim=1, keepdim=True)),
    ],
    "split the batch": [
        before(LOSS, lambda probs: probs.cumsum(dim=0).softmax(dim=-1)),
        {LOSS: balance_whole_batch},
    ],
    "append padding": [{LOSS: balance_with_padding}, after(WEIGHTS, scale_by_length)],
    "permute tokens": [
        after(WEIGHTS, lambda layer, weights: drop_late(weights)),
        after(LOGITS, lambda layer, logits: logits + torch.arange(16)[:, None] % 2 * EVEN),
    ],
    "permute experts": [
        after(LOGITS, lambda layer, logits: logits + 0.3 * EVEN),
        {OUTPUT: lambda layer, outputs, weights: outputs[:, :, 0] * weights.sum(-1, keepdim=True)},
    ],
    "recompute activations": [after(LOGITS, count_call), after(LOGITS, count_in_buffer)],
    "count dispatched tokens": [
        after("list_outputs", lambda layer, outputs: outputs.roll(1, dims=2)),
        after(OUTPUT, lambda layer, output: drop_late(output)),
    ],
    "normalise weights": [
        {WEIGHTS: lambda layer, probs, chosen: probs * chosen},
        before(WEIGHTS, lambda probs: probs.softmax(dim=-1)),
        after("choose_experts", lambda layer, chosen: chosen[..., :1]),
    ],
    "keep bias out of weights": [
        {WEIGHTS: weigh_with_bias},
        {"choose_experts": choose_within_group},
        {"choose_experts": lambda layer, scores: (scores - layer.bias).topk(2).indices},
    ],
    "break ties": [{"choose_experts": choose_randomly}, {WEIGHTS: weigh_all_ties}],
    "sum load shares": [
        after(LOSS, lambda layer, loss: 2 * loss),
        after(LOSS, lambda layer, loss: loss / EXPERTS),
    ],
    "push to even load": [after(LOSS, lambda layer, loss: 2 - loss), {LOSS: balance_the_others}],
    "log load statistics": [
        {"log_load": lambda layer, counts: {"max_violation": float(counts.max() / counts.mean())}},
        {"log_load": lambda layer, counts: {"balancedness": float(counts.min() / counts.max())}},
    ],
    "agree over ranks": [
        {"end_step": lambda layer, outcome: layer.bias.add_(outcome["chosen"].sum((0, 1)))},
        {
            LOSS: lambda layer, probs, chosen: (
                Mixture.balance_load(layer, probs, chosen) * len(probs)
            )
        },
    ],
}


@pytest.mark.parametrize("law", LAWS.values(), ids=lambda law: law.name)
def test_a_correct_mixture_keeps_every_law(law):
    check_law(law, CORRECT)


CASES = [(law, number) for law, changes in MUTATIONS.items() for number in range(len(changes))]


@pytest.mark.parametrize(("law", "number"), CASES)
def test_a_law_catches_a_mutation(law, number):
    mutated = type("Mutated", (Mixture,), MUTATIONS[law][number])
    with pytest.raises(AssertionError):
        check_law(LAWS[law], replace(CORRECT, build=mutated))


def test_every_law_has_two_mutations():
    assert LAWS.keys() == MUTATIONS.keys()
    assert min(map(len, MUTATIONS.values())) >= 2


def test_another_convention_is_not_promised():
    with pytest.raises(NotPromised, match="causal"):
        check_law(LAWS["hide later tokens"], replace(CORRECT, causal=False))
