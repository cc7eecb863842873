"""The Switch and GShard load balancing loss, per sequence, group of images or batch."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import config, routing_records
from moecore.core.files import UserError
from moecore.core.ranks import total_over_ranks
from moecore.nn.routers.base import group_images
from moecore.training.regularizers.base import Regularizer, sum_over_layers

Level = Literal["sequence", "group", "batch"]


class SwitchBalance(Regularizer):
    """The load balancing loss E Σ_e f_e P_e of Switch and GShard, summed over MoE layers.

    f_e is expert e's share of the choices in a set of tokens, P_e its mean probability; ``level``
    says what a set is, and the loss is the mean over sets. With level sequence, count_from probs
    and weight 1e-4 it is DeepSeek-V3's.
    """

    balances_load: ClassVar[bool] = True

    kind: Literal["switch_balance"] = "switch_balance"
    weight: float = Field(0.01, ge=0, description="factor in the objective")
    level: Level = Field(
        "batch",
        description="tokens over which the load is even: each image or sequence, each group of "
        "images, or the batch over all ranks, in which images may differ",
    )
    group_size: int = Field(8, ge=1, description="images per group; for the level group only")
    count_from: Literal["routed", "probs"] = Field(
        "routed", description="experts that count: the chosen, or those with the largest probs"
    )

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        yield from super().misfits(around)
        router = around.router
        if router is not None and not router.chooses_per_token:
            text = f"found {self.kind}, a constant for the router {router.kind}, which uses all"
            allowed = "a router whose tokens choose, or another loss"
            yield (), f"{text} experts equally; allowed: {allowed}"
        if self.level != "group":
            reason = f"the level is {self.level}"
            yield from config.list_idle_misfits(self, ["group_size"], reason, "level: group")
            return
        for phase, images in around.images.items():
            if images % self.group_size:
                text = f"found {self.group_size}, and a step of {phase} has {images} images"
                yield ("group_size",), f"{text}; allowed: a divisor of these"

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, self.of_layer)

    def of_layer(self, record: routing_records.RoutingRecord) -> Tensor:
        """Return E Σ_e f_e P_e, mean over the sets of tokens (Switch, eq. 4–6; GShard)."""
        # Levels: arXiv 2501.11873. f: share of a set's choices; P: mean probability. 1 if f or P is
        # even; E/k if k experts share all choices and all probability evenly.
        counted = record.chosen
        if self.count_from == "probs":  # as many of the most probable experts as were chosen
            order = record.probs.detach().argsort(dim=-1, descending=True, stable=True)
            ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
            ranks = torch.zeros_like(order).scatter(-1, order, ranks)
            counted = ranks < record.chosen.sum(dim=-1, keepdim=True)
        images = len(counted)
        if self.level == "group" and images % self.group_size:
            raise UserError.at(
                "switch_balance.group_size",
                found=f"{self.group_size}, and a rank's step has {images} images",
                allowed="a divisor of these",
            )
        size = {"sequence": 1, "group": self.group_size, "batch": images}[self.level]
        counts = group_images(counted, size)[0].sum(dim=1)
        probs = group_images(record.probs, size)[0].sum(dim=1)
        if self.level == "batch":
            counts, probs = total_over_ranks(counts), total_over_ranks(probs)
        # Shares without gradient; means, as a token's probs sum to 1.
        shares = counts / counts.sum(dim=-1, keepdim=True).clamp_min(1)
        means = probs / probs.sum(dim=-1, keepdim=True).detach()
        return probs.shape[-1] * (shares * means).sum(dim=-1).mean()
