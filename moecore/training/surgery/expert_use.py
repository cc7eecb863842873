"""What each expert of a trained model does on images of the training split.

N tokens, E experts, d width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    pixels = split.images[evenly_spaced_indices(len(split.labels), images)]
    with watch_layers(model, partial(_add_batch, sums)):
        predict_in_batches(model, pixels, BATCH, routing=False, prediction=False)
    return {name: own.average() for name, own in sums.items()}


@contextmanager
def watch_layers(
    model: nn.Module, watch: Callable[[str, MoEFeedForward, Tensor, RoutingRecord], None]
) -> Iterator[None]:
    """Inside the ``with`` call ``watch`` each time that the router of a layer of this name has
    decided on tokens (B, T, d).
    """
    hooks = [
        layer.router.register_forward_hook(
            lambda _, inputs, decided, name=name, layer=layer: watch(
                name, layer, inputs[0], decided[1]
            )
        )
        for name, layer in model.named_modules()
        if isinstance(layer, MoEFeedForward)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compute_all_outputs(layer: MoEFeedForward, tokens: Tensor) -> Iterator[Tensor]:
    """Yield what each network of a layer makes of all tokens (N, d): (N, d)."""
    for expert in range(layer.number):
        ends = torch.zeros(layer.number, dtype=torch.int32, device=tokens.device)
        ends[expert:] = len(tokens)
        yield layer.experts(Rows(tokens, ends))


def _add_batch(
    sums: dict[str, ExpertUseSums],
    name: str,
    layer: MoEFeedForward,
    tokens: Tensor,
    record: RoutingRecord,
) -> None:
    """Add the tokens that a router has just decided on to the sums of its layer."""
    weights, chosen = record.combine.flatten(0, 1), record.chosen.flatten(0, 1)
    own = sums.setdefault(name, ExpertUseSums(layer.number))
    own.tokens += len(weights)
    for expert, outputs in enumerate(compute_all_outputs(layer, tokens.flatten(0, 1))):
        own.add_outputs(expert, outputs, weights[:, expert], chosen[:, expert])
