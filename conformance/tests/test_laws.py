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


def of(name, change):
    """Return a mutation: ``name`` returns ``change`` of (layer, its result, *arguments)."""
    correct = getattr(Mixture, name)
    return {name: lambda layer, *given: change(layer, correct(layer, *given), *given)}


def logits_of(change):
    return {"read_logits": lambda layer, tokens: Mixture.read_logits(layer, change(layer, tokens))}


def count_call(layer, result, *given):
    layer.calls = getattr(layer, "calls", 0) + layer.training
    return result * (1 + 0.1 * layer.calls)


def count_in_buffer(layer, result, *given):
    layer.bias += 1.0 * layer.training
    return result


def drop_late(probs_or_weights):
    return probs_or_weights * (torch.arange(probs_or_weights.shape[1]) < 12)[:, None]


def mean_over_batch(layer, _, probs, chosen):
    return EXPERTS * (chosen.float().mean(dim=(0, 1)) * probs.mean(dim=(0, 1))).sum() / 2


def bias_in_gate(layer, _, probs, chosen):
    return Mixture.weigh_experts(layer, probs + layer.bias, chosen)


def noise(layer, result, *given):
    return result + torch.randn_like(result)


MUTATIONS = {
    "sum weighted experts": [
        of("combine_outputs", lambda layer, result, *given: 2 * result),
        of(
            "combine_outputs",
            lambda layer, _, outputs, weights: (outputs * weights.detach().unsqueeze(-1)).sum(
                dim=2
            ),
        ),
    ],
    "reach the router": [
        of("read_logits", lambda layer, logits, _: logits.detach()),
        of(
            "balance_load",
            lambda layer, loss, *given: loss.detach() + 0 * layer.router.weight.sum(),
        ),
        of("balance_load", lambda layer, loss, *given: loss + layer.experts[0].weight.sum()),
    ],
    "repeat evaluation": [
        of("read_logits", noise),
        of("read_logits", count_in_buffer)
        | {"train": lambda layer, mode=True: nn.Module.train(layer, True)},
    ],
    "isolate sequences": [
        logits_of(lambda layer, tokens: tokens - tokens.mean(dim=(0, 1))),
        of(
            "weigh_experts", lambda layer, weights, *given: weights * (weights.sum(dim=(0, 1)) < 12)
        ),
    ],
    "round to bf16": [
        {
            "read_logits": lambda layer, tokens: (
                layer.router(8 * tokens) / 8
                + (torch.is_autocast_enabled("cpu") * tokens[..., :EXPERTS])
            )
        },
        of(
            "weigh_experts",
            lambda layer, weights, *given: (
                (8 * weights).round() / 8 if torch.is_autocast_enabled("cpu") else weights
            ),
        ),
    ],
    "restore state": [
        of("read_logits", count_call),
        of(
            "__init__",
            lambda layer, _: layer.register_buffer("bias", torch.zeros(4), persistent=False),
        ),
    ],
    "hide later tokens": [
        logits_of(lambda layer, tokens: tokens.roll(-1, dims=1)),
        of("weigh_experts", lambda layer, weights, *given: weights / weights.sum(1, keepdim=True)),
    ],
    "split the batch": [
        of("balance_load", lambda layer, loss, probs, chosen: loss * len(probs)),
        of("balance_load", mean_over_batch),
    ],
    "append padding": [
        {
            "balance_load": lambda layer, probs, chosen: (
                EXPERTS * (chosen.float().mean(dim=1) / 2 * probs.mean(dim=1)).sum(-1).mean()
            )
        },
        {
            "weigh_experts": lambda layer, probs, chosen: (
                Mixture.weigh_experts(layer, probs, chosen) * probs.shape[1] / 16
            )
        },
    ],
    "permute tokens": [
        of("weigh_experts", lambda layer, weights, *given: drop_late(weights)),
        of(
            "read_logits",
            lambda layer, logits, _: (
                logits + torch.arange(logits.shape[1])[:, None] % 2 * torch.arange(EXPERTS)
            ),
        ),
    ],
    "permute experts": [
        of("read_logits", lambda layer, logits, _: logits + 0.3 * torch.arange(EXPERTS)),
        of("combine_outputs", lambda layer, result, outputs, weights: result + outputs[:, :, 0]),
    ],
    "recompute activations": [of("read_logits", count_call), of("read_logits", count_in_buffer)],
    "count dispatched tokens": [
        of("list_outputs", lambda layer, outputs, _: outputs.roll(1, dims=2)),
        of(
            "combine_outputs",
            lambda layer, _, outputs, weights: Mixture.combine_outputs(
                layer, outputs, drop_late(weights)
            ),
        ),
    ],
    "normalise weights": [
        of("weigh_experts", lambda layer, _, probs, chosen: probs * chosen),
        of(
            "weigh_experts",
            lambda layer, _, probs, chosen: Mixture.weigh_experts(
                layer, probs.softmax(dim=-1), chosen
            ),
        ),
        of("choose_experts", lambda layer, chosen, scores: chosen[..., :1]),
    ],
    "keep bias out of weights": [
        of("weigh_experts", bias_in_gate),
        {
            "choose_experts": lambda layer, scores: (scores * (torch.arange(EXPERTS) < 2)).argsort(
                dim=-1, descending=True
            )[..., :2]
        },
        {"choose_experts": lambda layer, scores: (scores - layer.bias).topk(2).indices},
    ],
    "break ties": [
        {
            "choose_experts": lambda layer, scores: (
                (scores + 1e-6 * torch.rand_like(scores)).topk(2).indices
            )
        },
        {
            "weigh_experts": lambda layer, probs, chosen: (
                probs * (probs >= (probs * chosen).topk(2).values[..., 1:])
            )
        },
    ],
    "sum load shares": [
        of("balance_load", lambda layer, loss, *given: 2 * loss),
        of("balance_load", lambda layer, loss, *given: loss / EXPERTS),
    ],
    "push to even load": [
        of("balance_load", lambda layer, loss, *given: 2 - loss),
        of(
            "balance_load",
            lambda layer, loss, probs, chosen: Mixture.balance_load(layer, probs, ~chosen),
        ),
    ],
    "log load statistics": [
        {"log_load": lambda layer, counts: {"max_violation": float(counts.max() / counts.mean())}},
        {"log_load": lambda layer, counts: {"balancedness": float(counts.min() / counts.max())}},
    ],
    "agree over ranks": [
        {"end_step": lambda layer, outcome: layer.bias.add_(outcome["chosen"].sum((0, 1)))},
        of("balance_load", lambda layer, loss, probs, _: loss * (1 + len(probs) % 4)),
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
