"""The model of MoGE's study of invariance (§2.4): one token, one MoE layer, a classifier."""

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones import base_model
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.layers.block import Activation, DenseMlp, trunc_normal_linear
from moecore.nn.layers.moe import OptionalMoE


class SingleLayer(base_model.Backbone):
    """One feed-forward layer without residual or norm, then a classifier (MoGE, §2.4)."""

    free_settings: ClassVar[frozenset[str]] = frozenset({"hidden", "activation"})

    kind: Literal["single_layer"] = "single_layer"
    hidden: int = Field(64, ge=1, description="hidden width of a dense model's layer")
    activation: Activation = Field("gelu", description="of a dense model's layer; linear: none")

    @property
    def depth(self) -> int:
        return 1

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        return (1,) * len(image.shape)

    def build(self, image: ImageSpec, moe: OptionalMoE = None) -> "SingleLayerModel":
        base_model.check_needs_no_attention(self.kind, moe)
        if moe is not None:
            moe.indices(self.depth)
        return SingleLayerModel(self, image, moe)


class SingleLayerModel(base_model.BackboneModel):
    """``model(images)``: (B, C, H, W) in [0, 1] to ModelOutput; T = 1, d = C·H·W."""

    def __init__(self, config: SingleLayer, image: ImageSpec, moe: OptionalMoE = None) -> None:
        super().__init__(config, image, moe)
        self.width = image.channels * math.prod(image.shape)
        if moe is None:
            self.mlp = DenseMlp(self.width, config.hidden, config.activation)
        else:
            self.mlp = moe.build(self.width)
        self.head = trunc_normal_linear(self.width, image.outputs)

    def width_of(self, block: int) -> int:
        return self.width

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        """Return the layer's output and record; the feature "mlp_input" is normalised pixels."""
        if set(options.blocks) - {0}:
            raise UserError.at("blocks", found=list(options.blocks), allowed="0, the only block")
        entering = self.normalised(images).flatten(1).unsqueeze(1)
        contexts = self.routing_contexts(images, options)
        tokens, records = self.mlp(entering, contexts.get(0, RoutingContext()))
        feature = options.select_tokens(entering, tokens)
        return base_model.Encoded(tokens, records, (feature,) * len(options.blocks))

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.head(tokens[:, 0]),)
