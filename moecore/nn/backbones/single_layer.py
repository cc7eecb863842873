"""The model of MoGE's study of invariance (§2.4): the image is one token, one MoE layer, a linear
classifier.

B images, C channels, H × W pixels, d = C·H·W the width of the token, K classes.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import Feature, Guidance, Layout, RoutingContext
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import BackboneConfig, BackboneModel
from moecore.nn.correspondence import match_tokens
from moecore.nn.layers.block import DenseMlp, timm_linear
from moecore.nn.layers.moe import MoE


class SingleLayer(BackboneConfig):
    """One feed-forward layer without residual or norm, then a linear classifier; its only block has
    index 0 (MoGE, §2.4).
    """

    kind: Literal["single_layer"] = "single_layer"
    hidden: int = Field(
        default=64,
        ge=1,
        description="hidden width of a dense model's layer; experts have their own hidden_ratio",
    )

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return 1

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        """One patch along each axis: the whole image."""
        return (1,) * len(image.shape)

    def build(self, image: ImageSpec, moe: MoE | None = None) -> "SingleLayerModel":
        """The model for such images; raises UserError where ``moe`` does not fit a model of one
        block without attention.
        """
        if moe is not None and (lacking := sorted(moe.router.wants & {"attention", "attended"})):
            reads = f"but the router {moe.router.kind} reads {', '.join(lacking)}"
            raise UserError(
                f"model.kind: single_layer has no attention, {reads}; choose another model or "
                "router"
            )
        if moe is not None:
            moe.indices(self.depth)
        return SingleLayerModel(self, image, moe)


class SingleLayerModel(BackboneModel):
    """``model(images)`` with images (B, C, H, W) in [0, 1] gives ModelOutput(prediction (B, K),
    routing of fields (B, 1, E), heads).
    """

    def __init__(self, config: SingleLayer, image: ImageSpec, moe: MoE | None = None) -> None:
        super().__init__(config, image, moe)
        self.width = image.channels * math.prod(image.shape)
        if moe is None:
            self.mlp = DenseMlp(self.width, config.hidden)
        else:
            self.mlp = moe.build(self.width)
        self.head = timm_linear(self.width, image.outputs)

    @property
    def layout(self) -> Layout:
        """One patch that is the whole image."""
        return Layout(0, self.config.grid(self.image), self.image.shape)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.config.depth

    def width_of(self, block: int) -> int:
        """The image's pixels in all channels."""
        return self.width

    def encode(
        self,
        images: Tensor,
        at: Feature | None = None,
        blocks: tuple[int, ...] = (),
        guidance: Guidance | None = None,
        progress: float = 1.0,
    ) -> tuple[Tensor, tuple, tuple[Tensor, ...]]:
        """Images to (tokens (B, 1, d) after the layer, routing records, features (B, 1, d) of each
        of ``blocks``, which may only be 0).

        ``at``: "mlp_input" the normalised pixels, "block_out" or "final" the output of the layer.
        """
        if set(blocks) - {0}:
            raise UserError(
                f"blocks: found {list(blocks)}; allowed: 0, the only block of a single_layer model"
            )
        entering = self.normalised(images).flatten(1).unsqueeze(1)
        tokens, records = self.mlp(entering, self._context(images, guidance, progress))
        feature = entering if at == "mlp_input" else tokens
        return tokens, records, (feature,) * len(blocks)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens (B, 1, d) to the logits (B, K) of the only head."""
        return (self.head(tokens[:, 0]),)

    def _context(
        self, images: Tensor, guidance: Guidance | None, progress: float
    ) -> RoutingContext:
        context = RoutingContext(progress=progress)
        if self.moe is None:
            return context
        wants = self.moe.router.wants
        if "patches" in wants:
            context = context._replace(patches=images.flatten(1).unsqueeze(1))
        if guidance is not None and "teacher" in wants:
            probs = guidance.probs[0]
            student = torch.Size((len(images), 1, probs.shape[-1]))
            context = context._replace(teacher=match_tokens(probs, student))
        return context
