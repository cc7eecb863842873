"""What pruning and merging share: each expert's use, how many are left, and their model.

Use is measured on images of the training split. N tokens, E experts before, M after, d width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Config, validate_again
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.nn.backbones.base_model import Model
from moecore.nn.dispatch import Rows
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.nn.predict import predict_in_batches
from moecore.nn.routers.capacity import exact_fraction

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


class ExpertReduction(Config, ABC):
    """The settings of a way to fewer experts, the same number in every layer."""

    section: ClassVar[str]  # of params.yaml, as messages name it

    left: float = Field(
        0.5, gt=0, lt=1, description="share of a layer's experts that is left, rounded up"
    )
    images: int = Field(
        1000, ge=1, description="training images that tell what experts do, evenly spread"
    )

    @abstractmethod
    def reduced_settings(self, moe: MoESettings) -> MoESettings:
        """Return router and experts afterwards; UserError, naming the key, where none can be."""

    @abstractmethod
    def reduce_experts(self, model: Model, uses: Mapping[str, ExpertUse]) -> Model:
        """Return a new model; UserError as ``reduced_settings``. uses: by MoE layer."""

    def reduce_model(self, model: Model, split: Split) -> Model:
        """Return a new model, by images of the training split; a dense model as it is."""
        if model.moe is None:
            return model
        self.reduced_settings(model.moe)  # refused before images are looked at
        return self.reduce_experts(model, measure_expert_use(model, split, self.images))

    def number_left(self, moe: MoESettings) -> int:
        """Return M; UserError where that is all, or fewer than a token chooses."""
        number = moe.experts.number
        least = max(2, getattr(moe.router, "k", None) or 1)
        left = ceil(exact_fraction(self.left) * number)
        if not least <= left < number:
            problem = f"found {self.left:g}, which leaves {left} of {number} experts"
            allowed = f"shares that leave {least} (router.k, or 2) to {number - 1}"
            raise UserError(f"{self.section}.left: {problem}; allowed: {allowed}")
        return left


def check_token_choice(moe: MoESettings, words: str) -> None:
    """Raise UserError for routers in which tokens choose nothing, or a teacher chooses for them,
    and for pieces of experts and experts without a network.

    words: what is done with the model.
    """
    if not moe.router.chooses_per_token or "teacher" in moe.router.wants:
        problem = f"found {moe.router.kind}, whose experts cannot be {words}"
        raise UserError(f"router.kind: {problem}; allowed: routers by which tokens choose")
    if moe.experts.choices != moe.experts.number:
        problem = f"found {moe.experts.choices} to choose among where experts.number is"
        allowed = "experts without fine and zero_computation"
        raise UserError(f"experts.number: {problem} {moe.experts.number}; allowed: {allowed}")


def rebuild_with_moe_settings(model: Model, moe: MoESettings) -> Model:
    """Return a model as ``model`` with another router and experts, of first weights."""
    with torch.random.fork_rng(devices=[]):
        return model.config.build(model.image, moe).eval()


def build_reduced_model(model: Model, moe: MoESettings, weights: Mapping[str, Tensor]) -> Model:
    """Return a model with these settings and weights, where ``model`` lies."""
    reduced = rebuild_with_moe_settings(model, moe)
    reduced.load_state_dict(dict(weights))
    return reduced.to(next(model.parameters()).device)


def with_number(moe: MoESettings, number: int) -> MoESettings:
    """Return the settings with another number of experts; UserError where these refuse it."""
    fewer = moe.experts.model_copy(update={"number": number})
    experts = validate_again(fewer, f"experts.number: found {number} that are left")
    return moe.model_copy(update={"experts": experts})
