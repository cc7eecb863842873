"""Swin V2 (Liu et al. 2022)."""

from typing import ClassVar, Literal

from moecore.nn.backbones.swin import SwinSettings


class SwinV2(SwinSettings):
    """Post-norm blocks, cosine attention and a continuous position bias.

    At k = 1 the norm after the experts removes the length that the router's weight gave to an
    expert's output, and with it almost all of the router's task gradient.
    """

    normalises_experts: ClassVar[bool] = True

    kind: Literal["swin_v2"] = "swin_v2"
