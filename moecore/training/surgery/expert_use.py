"""What each expert of a trained model does on images of the training split.

N tokens, E experts, d width.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.nn.backbones.base_model import Model
from moecore.nn.dispatch import Rows
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import predict_in_batches

BATCH = 64  # images of a forward pass, in which every expert computes every token


class ExpertUse(NamedTuple):
    """The experts of one MoE layer, in fp64 on the CPU."""

    counts: Tensor  # (E,) how many tokens chose each
    reap: Tensor  # (E,) mean over these of weight times length of its output; 0 without any
    means: Tensor  # (E, d) its mean output over all tokens


class ExpertUseSums:
    """Sums over the tokens that were met so far, expert by expert."""

    def __init__(self, experts: int) -> None:
        self.tokens = 0
        self.counts, self.lengths = torch.zeros(2, experts, dtype=torch.float64)
        self.outputs: list[Any] = [0.0] * experts

    def add_outputs(self, expert: int, outputs: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Add an expert's outputs (N, d), its weights in the layer's output and whether each token
        chose it, both (N,).
        """
        outputs = outputs.double()
        weighted = weights.double() * outputs.norm(dim=-1)
        self.counts[expert] += chosen.sum().cpu()
        self.lengths[expert] += weighted[chosen].sum().cpu()
        self.outputs[expert] = self.outputs[expert] + outputs.sum(dim=0).cpu()

    def average(self) -> ExpertUse:
        """Return the means over the tokens, and over those that chose each expert (REAP)."""
        reap = self.lengths / self.counts.clamp(min=1)
        return ExpertUse(self.counts, reap, torch.stack(self.outputs) / self.tokens)


def measure_expert_use(model: Model, split: Split, images: int) -> dict[str, ExpertUse]:
    """Return the use of the experts of each MoE layer that images pass, by the layer's name.

    On ``images`` of a split, evenly spread, in evaluation mode. Every expert computes every token,
    so a layer costs E / k times as much.
    """
    sums: dict[str, ExpertUseSums] = {}
    hooks = [
        layer.router.register_forward_hook(partial(_add_batch, sums, name, layer.experts))
        for name, layer in model.named_modules()
        if isinstance(layer, MoEFeedForward)
    ]
    pixels = split.images[evenly_spaced_indices(len(split.labels), images)]
    try:
        predict_in_batches(model, pixels, BATCH, routing=False, prediction=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: own.average() for name, own in sums.items()}


def _add_batch(
    sums: dict[str, ExpertUseSums],
    name: str,
    experts: nn.Module,
    router: nn.Module,
    inputs: tuple[Any, ...],
    decided: tuple[Any, RoutingRecord],
) -> None:
    """Add the tokens that a router has just decided on to the sums of its layer; its hook."""
    tokens, record = inputs[0].flatten(0, 1), decided[1]
    weights, chosen = record.combine.flatten(0, 1), record.chosen.flatten(0, 1)
    number = weights.shape[-1]
    own = sums.setdefault(name, ExpertUseSums(number))
    own.tokens += len(tokens)
    for expert in range(number):
        ends = torch.zeros(number, dtype=torch.int32, device=tokens.device)
        ends[expert:] = len(tokens)
        outputs = experts(Rows(tokens, ends))
        own.add_outputs(expert, outputs, weights[:, expert], chosen[:, expert])
