"""How the experts of an upcycled model differ from plain copies of the dense MLP.

E experts, k chosen per token, d width, h hidden units of an expert.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Config, part_classes_by_kind
from moecore.core.streams import derived_seed, generator_for
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.base import Router
from moecore.nn.routers.capacity import exact_fraction


class MlpPieceScales(NamedTuple):
    """Into how many experts a dense MLP is cut, and what its second map and that one's bias are
    times in them.
    """

    number: int = 1
    output_scale: float = 1.0
    bias_scale: float = 1.0


WHOLE_MLP = MlpPieceScales()


class Granular(Config):
    """Each copy of the dense MLP is cut along its hidden units into ``pieces`` experts, which begin
    with one row of the router and so are chosen together (He et al. 2024).
    """

    kind: Literal["granular"] = "granular"
    pieces: int = Field(2, ge=2, description="experts that a copy of the dense MLP is cut into")

    def list_parting_settings(
        self, router: Router, experts: Experts
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield the key, and what is found and allowed there, of what would part the pieces."""
        words = "with granular upcycling"
        if not router.has_equal_rows:
            every = part_classes_by_kind(Router).items()
            allowed = ", ".join(kind for kind, part in every if part.has_equal_rows)
            yield ("router", "kind"), f"found {router.kind}; allowed {words}: {allowed}"
            return
        if not experts.has_hidden_units:
            yield ("experts", "kind"), f"found {experts.kind}; allowed {words}: mlp"
            return
        for key, name, number in (
            ("router", "k", int(router.active(experts.number))),
            ("experts", "number", experts.number),
        ):
            if number % self.pieces:
                multiple = f"multiples of upcycle.pieces, {self.pieces}"
                yield (key, name), f"found {number}; allowed: {multiple}"
        if experts.choices != experts.number:
            problem = f"found {experts.choices} to choose among where this is {experts.number}"
            allowed = f"experts {words} without fine and zero_computation"
            yield ("experts", "number"), f"{problem}; allowed: {allowed}"
        if std := getattr(router, "noise_std", 0.0):
            yield ("router", "noise_std"), f"found {std:g}, which breaks ties; allowed {words}: 0"
        if balance := getattr(router, "balance", None):
            yield ("router", "balance"), f"found {balance.kind}; allowed {words}: null"
        if not _is_renormalised(router) and getattr(router, "score", "softmax") != "softmax":
            problem = "whose size at the start nobody knows; allowed: softmax, or renormalise: true"
            yield ("router", "score"), f"found {getattr(router, 'score', '')}, {problem}"

    def cut_mlp(self, router: Router, experts: int) -> MlpPieceScales:
        """Return the pieces for a router of so many experts.

        Where weights sum to 1 the layer begins as the dense MLP; else it would if all were 1/E.
        """
        if _is_renormalised(router):
            return MlpPieceScales(self.pieces, self.pieces)
        share = experts / router.active(experts)
        return MlpPieceScales(self.pieces, self.pieces * share, share)


class Drop(Config):
    """A share of each expert's hidden units is drawn anew (Nakamura et al. 2025)."""

    kind: Literal["drop"] = "drop"
    ratio: float = Field(0.5, ge=0, le=1, description="share of the hidden units drawn anew")

    @torch.no_grad()
    def redraw_experts(self, model: nn.Module, seed: int) -> None:
        """Draw anew units of every expert, its own ones each, of all MoE layers of ``model``."""
        layers = [one for one in model.modules() if isinstance(one, MoEFeedForward)]
        drawn = derived_seed("upcycling", seed)
        for place, layer in enumerate(layers):
            maps = _maps_by_unit(layer.experts)
            hidden = maps[0].shape[1]
            number = math.floor(exact_fraction(self.ratio) * hidden)
            for expert in range(len(maps[0])):
                generator = generator_for(drawn, place, expert)
                units = torch.randperm(hidden, generator=generator)[:number]
                for values in maps:
                    shape = (number, *values.shape[2:])
                    redraw_units(values[expert], units, torch.randn(shape, generator=generator))


Upcycling = bool | Annotated[Granular | Drop, Field(discriminator="kind")]


def redraw_units(values: Tensor, units: Tensor, normals: Tensor) -> None:
    """Replace rows of ``values`` (h, …) by normals of their own mean and standard deviation.

    units: (n,) which rows.  normals: (n, …) standard ones.
    """
    if len(units):
        replaced = values[units]
        spread = replaced.std(correction=min(1, replaced.numel() - 1))  # 0 of a single number
        values[units] = replaced.mean() + spread * normals


def repeat_router_rows(router: nn.Module, pieces: int) -> None:
    """Give every ``pieces`` experts the row of their first: of each parameter (E, …)."""
    for values in router.parameters():
        values.copy_(values[::pieces].repeat_interleave(pieces, dim=0))


def _is_renormalised(router: Router) -> bool:
    """Return whether weights sum to 1: those of top_k_softmax always do."""
    return bool(getattr(router, "renormalise", True))


def _maps_by_unit(experts: ExpertsModule) -> list[Tensor]:
    """Return views (E, h, …) of what belongs to hidden units: both maps and the first bias."""
    assert isinstance(experts.up, Tensor) and isinstance(experts.up_bias, Tensor)
    assert isinstance(experts.down, Tensor)
    return [experts.up.transpose(1, 2), experts.up_bias, experts.down]
