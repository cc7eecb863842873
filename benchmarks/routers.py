"""Contestants of the race of routers: a ViT's training step with each router, balance and kind of
experts in the place of V-MoE's, at as many active FLOPs.

What no setting makes equal has a note; ``step_flops`` counts what is computed. Losses are those of
pipelines/ours/routers.yaml and balancing.yaml.
"""

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training_step import PROGRESS, Size
from moecore.training.method import Method

Settings = dict[str, Any]  # of a part, as in params.yaml

TOP_2: Settings = {"kind": "noisy_top_k", "k": 2}
QUIET: Settings = TOP_2 | {"noise_std": 0}
SIGMOID: Settings = QUIET | {"score": "sigmoid"}
COMPETITION: Settings = {
    "kind": "competition",
    "k": 2,
    "router_weight": 1e-3,
    "chosen_weight": 0.2,
    "diversity_weight": 0,
    "warmup": 0,
}
EVEN: Settings = {"kind": "switch_balance", "weight": 0.01}
VMOE: tuple[Settings, ...] = (
    {"kind": "importance", "weight": 0.005},
    {"kind": "load", "weight": 0.005},
)
ALL_SLOTS = "computes all 8 experts for every token, of which it uses about 4 at its start"


class Contestant(NamedTuple):
    """A method that differs from V-MoE in router, experts or losses."""

    router: Settings = TOP_2
    losses: tuple[Settings, ...] = (EVEN,)
    experts: Settings = {}  # in addition to number and width
    hidden: float = 1.0  # width of an expert / width of V-MoE's
    note: str = ""

    def method(self, size: Size) -> Method:
        """Return the method's settings for models of this size."""
        experts = {"kind": "mlp", "number": 8, "hidden_ratio": self.hidden * size.hidden_ratio}
        parts = {"router": self.router, "experts": experts | self.experts}
        return Method.model_validate(parts | {"regularizers": self.losses})


CONTESTANTS = {
    "cosine": Contestant({"kind": "cosine", "k": 2}),
    "relu": Contestant(
        {"kind": "relu", "k": 2}, ({"kind": "adaptive_l1"},), note=f"{ALL_SLOTS}; its aim is 2"
    ),
    "top_p, at most 2": Contestant(
        {"kind": "top_p", "k": 2}, (EVEN, {"kind": "entropy", "weight": 1e-4})
    ),
    "dynamic": Contestant(
        {"kind": "dynamic"},
        ({"kind": "diversity_simplicity", "weight": 0.01}, EVEN),
        note=ALL_SLOTS,
    ),
    "competition": Contestant(
        COMPETITION | {"share": 0}, note="a step in which no experts compete: 93 % of them"
    ),
    "competition, competing": Contestant(
        COMPETITION | {"share": 1},
        note="a step in which experts compete, in every layer: 7 % of the layers' steps",
    ),
    "merged": Contestant(
        {"kind": "merged"},
        (),
        hidden=2,
        note="experts of twice the width, one for each image; to merge costs as much as 8 tokens",
    ),
    "depth": Contestant(
        {"kind": "depth", "share": 0.5, "router": TOP_2 | {"k": 4}},
        note="half of the tokens, 4 experts each",
    ),
    "sigmoid, loss_free": Contestant(SIGMOID | {"balance": {"kind": "loss_free"}}, ()),
    "sigmoid, quantile": Contestant(SIGMOID | {"balance": {"kind": "quantile"}}, ()),
    "sinkhorn": Contestant(QUIET | {"balance": {"kind": "sinkhorn"}}, ()),
    "switch_balance": Contestant(QUIET),
    "simbal": Contestant(QUIET | {"start": "orthonormal"}, ({"kind": "simbal", "weight": 0.01},)),
    "groups, 2 of 4": Contestant(TOP_2 | {"groups": {"number": 4, "kept": 2}}),
    "shared 1": Contestant(TOP_2 | {"k": 1}, VMOE, {"shared": 1}, note="1 expert shared, 1 chosen"),
    "fine 4": Contestant(TOP_2, VMOE, {"fine": 4}, note="8 of 32 experts of a quarter's width"),
    "swiglu": Contestant(TOP_2, VMOE, {"activation": "swiglu"}, hidden=2 / 3),
    "zero_computation": Contestant(
        TOP_2 | {"k": 3, "residual": True},
        ({"kind": "zero_computation_balance", "weight": 0.01},),
        {"zero_computation": {"constants": 2}},
        note="3 of 12, of which 8 are networks, so 2 if it chooses evenly",
    ),
}
UPDATED = ("sigmoid, loss_free", "sigmoid, quantile")  # whose routers learn at the end of a step


def step_flops(size: Size, method: Method) -> int:
    """Return FLOPs of a training step's forward pass, counted without computing it.

    As ``moecore.measure.cost`` counts them: products, of every row that an expert gets.
    """
    counter = FlopCounterMode(display=False)
    with torch.device("meta"):
        model = size.model.build(size.image, method.moe)
        images = torch.empty(size.batch, size.channels, size.side, size.side)
        with counter:
            model(images, None, PROGRESS)
    return counter.get_total_flops()
