"""Variants of upcycling: cut MLPs into pieces (granular), or redraw hidden units (drop)."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core import config, streams
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.base import Router, exact_fraction


class MlpPieceScales(NamedTuple):
    """The number of pieces of a dense MLP, and factors of its output weights and bias."""

    number: int = 1
    output_scale: float = 1.0
    bias_scale: float = 1.0


WHOLE_MLP = MlpPieceScales()


class Granular(config.Config):
    """Cut each copy of the dense MLP along its hidden units into ``pieces`` experts.

    They start with equal rows of the router and so are chosen together (He et al. 2024).
    """

    kind: Literal["granular"] = "granular"
    pieces: int = Field(default=2, ge=2, description="experts that a copy of the MLP is cut into")

    def list_settings_parting_pieces(
        self, router: Router, experts: Experts
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield (key, message) per setting that could let a token choose only some pieces."""
        allowed = "allowed with granular upcycling"
        if not router.has_equal_rows:
            parts = config.part_classes_by_kind(Router).items()
            kinds = ", ".join(kind for kind, part in parts if part.has_equal_rows)
            yield ("router", "kind"), f"found {router.kind}; {allowed}: {kinds}"
            return
        if not experts.has_hidden_units:
            yield ("experts", "kind"), f"found {experts.kind}; {allowed}: mlp"
            return
        multiples = f"multiples of upcycle.pieces, {self.pieces}"
        k = int(router.active(experts.number))
        if k % self.pieces:
            yield ("router", "k"), f"found {k}; allowed: {multiples}"
        if experts.number % self.pieces:
            yield ("experts", "number"), f"found {experts.number}; allowed: {multiples}"
        if experts.choices != experts.number:
            text = f"found {experts.choices} choices for {experts.number} experts; {allowed}"
            yield ("experts", "number"), f"{text}: experts without fine and zero_computation"
        if std := getattr(router, "noise_std", 0.0):
            yield ("router", "noise_std"), f"found {std:g}, which breaks ties; {allowed}: 0"
        if balance := getattr(router, "balance", None):
            yield ("router", "balance"), f"found {balance.kind}; {allowed}: null"
        score = getattr(router, "score", "softmax")
        if not _is_renormalised(router) and score != "softmax":
            text = f"found {score}, whose sum at the start is unknown"
            yield ("router", "score"), f"{text}; allowed: softmax, or renormalise: true"

    def piece_scales(self, router: Router, experts: int) -> MlpPieceScales:
        """Return scales with which the layer starts as the MLP if combine weights sum to 1."""
        if _is_renormalised(router):  # the layer starts as the dense MLP
            return MlpPieceScales(self.pieces, self.pieces)
        share = experts / router.active(experts)  # exact if all combine weights are 1/E
        return MlpPieceScales(self.pieces, self.pieces * share, share)


class Drop(config.Config):
    """Draw a share of each expert's hidden units again at random (Nakamura et al. 2025)."""

    kind: Literal["drop"] = "drop"
    ratio: float = Field(default=0.5, ge=0, le=1, description="share of hidden units drawn again")

    @torch.no_grad()
    def redraw_experts(self, model: nn.Module, seed: int) -> None:
        """Draw a share of each expert's hidden units again, independently, in all MoE layers."""
        layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
        redraw_seed = streams.derived_seed("upcycling", seed)
        for index, layer in enumerate(layers):
            experts = layer.experts
            assert isinstance(experts.up, Tensor) and isinstance(experts.up_bias, Tensor)
            assert isinstance(experts.down, Tensor)
            # Views (E, h, …) by hidden unit; the output bias has no hidden units.
            maps = [experts.up.transpose(1, 2), experts.up_bias, experts.down]
            hidden = maps[0].shape[1]
            number = math.floor(exact_fraction(self.ratio) * hidden)
            for expert in range(len(maps[0])):
                generator = streams.generator_for(redraw_seed, index, expert)
                units = torch.randperm(hidden, generator=generator)[:number]
                for values in maps:
                    shape = (number, *values.shape[2:])
                    redraw_rows(values[expert], units, torch.randn(shape, generator=generator))


Upcycling = bool | Annotated[Granular | Drop, Field(discriminator="kind")]


def redraw_rows(values: Tensor, units: Tensor, normals: Tensor) -> None:
    """Replace rows ``units`` of ``values`` by ``normals``, scaled to the rows' mean and spread."""
    if len(units):
        replaced = values[units]
        spread = replaced.std(correction=min(1, replaced.numel() - 1))  # 0 for a single number
        values[units] = replaced.mean() + spread * normals


def repeat_router_rows(router: nn.Module, pieces: int) -> None:
    """Give every ``pieces`` consecutive experts the first one's row in each parameter (E, …)."""
    for values in router.parameters():
        values.copy_(values[::pieces].repeat_interleave(pieces, dim=0))


def _is_renormalised(router: Router) -> bool:
    """Return whether combine weights sum to 1: ``renormalise``, or True without that setting."""
    return bool(getattr(router, "renormalise", True))
