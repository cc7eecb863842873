"""What pruning and merging share: how many experts are left, and the model that holds them.

E experts before, M after.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import ceil
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config, validate_again
from moecore.core.files import UserError
from moecore.data.prepared import Split
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.capacity import exact_fraction
from moecore.training.surgery.expert_reduction import ExpertUse, measure_expert_use


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
