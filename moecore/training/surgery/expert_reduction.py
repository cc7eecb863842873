"""Shared by pruning and merging: measure the use of E experts, and build a model with M."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Config, validate_again
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.nn import dispatch, predict
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.nn.routers.base import exact_fraction

BATCH = 64  # images per forward pass; small, because every expert computes every token


class ExpertUse(NamedTuple):
    """Tokens, REAP score and mean output of each expert of one MoE layer, in fp64 on the CPU."""

    counts: Tensor  # (E,), tokens that chose each expert
    reap: Tensor  # (E,), mean of weight · output norm over these tokens; 0 without tokens
    means: Tensor  # (E, d), mean output over all tokens


class ExpertUseSums:
    def __init__(self, experts: int) -> None:
        self.tokens = 0
        self.counts, self.lengths = torch.zeros(2, experts, dtype=torch.float64)
        self.outputs: list[Any] = [0.0] * experts

    def add_outputs(self, expert: int, outputs: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Add an expert's outputs (N, d), weights (N,) and mask ``chosen`` (N,) for N tokens."""
        outputs = outputs.double()
        weighted = weights.double() * outputs.norm(dim=-1)
        self.counts[expert] += chosen.sum().cpu()
        self.lengths[expert] += weighted[chosen].sum().cpu()
        self.outputs[expert] = self.outputs[expert] + outputs.sum(dim=0).cpu()

    def average(self) -> ExpertUse:
        reap = self.lengths / self.counts.clamp(min=1)
        return ExpertUse(self.counts, reap, torch.stack(self.outputs) / self.tokens)


def measure_expert_use(model: Model, split: Split, images: int) -> dict[str, ExpertUse]:
    """Measure each MoE layer's use of experts on ``images`` images of ``split``, by layer name."""
    # Every expert computes every token, so a layer costs E / k times as much.
    sums: dict[str, ExpertUseSums] = {}
    pixels = split.images[evenly_spaced_indices(len(split.labels), images)]

    def add_batch(name: str, layer: MoEFeedForward, tokens: Tensor, record: RoutingRecord) -> None:
        weights, chosen = record.combine.flatten(0, 1), record.chosen.flatten(0, 1)
        layer_sums = sums.setdefault(name, ExpertUseSums(layer.number))
        layer_sums.tokens += len(weights)
        for expert, outputs in enumerate(outputs_of_all_experts(layer, tokens.flatten(0, 1))):
            layer_sums.add_outputs(expert, outputs, weights[:, expert], chosen[:, expert])

    with calling_after_each_routing(model, add_batch):
        predict.predict_in_batches(model, pixels, BATCH, routing=False, prediction=False)
    return {name: layer_sums.average() for name, layer_sums in sums.items()}


@contextmanager
def calling_after_each_routing(
    model: nn.Module, watch: Callable[[str, MoEFeedForward, Tensor, RoutingRecord], None]
) -> Iterator[None]:
    """Call ``watch(name, layer, tokens, record)`` after every routing in the ``with`` block."""

    def make_hook(name: str, layer: MoEFeedForward) -> Callable[..., None]:
        return lambda _, inputs, decided: watch(name, layer, inputs[0], decided[1])

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, MoEFeedForward):
                hooks.enter_context(layer.router.register_forward_hook(make_hook(name, layer)))
        yield


def outputs_of_all_experts(layer: MoEFeedForward, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the output (N, d) of each network of a layer for all tokens (N, d)."""
    for expert in range(layer.number):
        ends = torch.zeros(layer.number, dtype=torch.int32, device=tokens.device)
        ends[expert:] = len(tokens)
        yield layer.experts(dispatch.Rows(tokens, ends))


class ExpertReduction(Config, ABC):
    """Base settings of pruning and merging: the share of experts that remains in every layer."""

    section: ClassVar[str]  # of params.yaml, as messages name it

    left: float = Field(0.5, gt=0, lt=1, description="share of a layer's experts kept, rounded up")
    images: int = Field(1000, ge=1, description="training images, evenly spread, to measure use")

    @abstractmethod
    def reduced_settings(self, moe: MoESettings) -> MoESettings:
        """Return MoE settings with fewer experts; UserError, naming the key, if impossible."""

    @abstractmethod
    def reduce_experts(self, model: Model, uses: Mapping[str, ExpertUse]) -> Model:
        """Return a model with fewer experts, chosen by ``uses`` (MoE layer → use)."""

    def reduce_model(self, model: Model, split: Split) -> Model:
        """Return a model with fewer experts, by use on ``split``; a dense model is unchanged."""
        if model.moe is None:
            return model
        self.reduced_settings(model.moe)  # raises before images are processed
        return self.reduce_experts(model, measure_expert_use(model, split, self.images))

    def count_remaining_experts(self, moe: MoESettings) -> int:
        number = moe.experts.number
        min_experts = max(2, getattr(moe.router, "k", None) or 1)
        remaining = ceil(exact_fraction(self.left) * number)
        if not min_experts <= remaining < number:
            raise UserError.at(
                f"{self.section}.left",
                found=f"{self.left:g}, which leaves {remaining} of {number} experts",
                allowed=f"shares that leave {min_experts} (router.k, or 2) to {number - 1}",
            )
        return remaining


def check_tokens_choose_experts(moe: MoESettings, action: str) -> None:
    """Raise UserError unless tokens choose among complete networks; ``action``: for the message."""
    if not moe.router.chooses_per_token or "teacher" in moe.router.wants:
        raise UserError.at(
            "router.kind",
            found=f"{moe.router.kind}, whose experts cannot be {action}",
            allowed="routers by which tokens choose",
        )
    if moe.experts.choices != moe.experts.number:
        raise UserError.at(
            "experts.number",
            found=f"{moe.experts.choices} choices for {moe.experts.number} experts",
            allowed="experts without fine and zero_computation",
        )


def build_untrained_with_moe_settings(model: Model, moe: MoESettings) -> Model:
    with torch.random.fork_rng(devices=[]):
        return model.config.build(model.image, moe).eval()


def build_reduced_model(model: Model, moe: MoESettings, weights: Mapping[str, Tensor]) -> Model:
    reduced = build_untrained_with_moe_settings(model, moe)
    reduced.load_state_dict(dict(weights))
    return reduced.to(next(model.parameters()).device)


def set_expert_number(moe: MoESettings, number: int) -> MoESettings:
    fewer = moe.experts.model_copy(update={"number": number})
    experts = validate_again(fewer, f"experts.number: found {number} remaining experts")
    return moe.model_copy(update={"experts": experts})
