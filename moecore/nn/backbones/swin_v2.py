"""Swin V2 (Liu et al. 2022)."""

from typing import ClassVar, Literal

from moecore.nn.backbones.swin import SwinSettings


class SwinV2(SwinSettings):
    """Post-norm blocks, cosine attention and a continuous position bias.

    With one expert per token the norm behind it leaves the router almost no gradient of the task.
    """

    normalises_experts: ClassVar[bool] = True

    kind: Literal["swin_v2"] = "swin_v2"
