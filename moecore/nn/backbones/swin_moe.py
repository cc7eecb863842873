"""Swin-MoE's backbone (Hwang et al. 2023), which MoGE calls SwinV2."""

from typing import Literal

from moecore.nn.backbones.swin import SwinSettings


class SwinMoe(SwinSettings):
    """Swin V1 with a continuous position bias; its routers get the task's gradient at k = 1."""

    kind: Literal["swin_moe"] = "swin_moe"
