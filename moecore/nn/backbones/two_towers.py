"""Two towers, of images and of captions, whose embeddings lie in one space (CLIP; LiT, Zhai et al.
2022; SigLIP). The image tower is any backbone of images with any method.

B images, C captions of each, M tokens of a caption, w numbers of an embedding.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.routing_records import Guidance, ModelOutput, RoutingRecord, TokenLayout
from moecore.core.surroundings import Surroundings
from moecore.nn.backbones import base_model
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.swin_moe import SwinMoe
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.backbones.text_tower import TextTowerSettings, TextTransformer, caption_fingerprints
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoESettings, update_routers
from moecore.nn.layers.patch_embed import Interpolation
from moecore.tasks.image_text import NONE, ImageText

ImageTower = Annotated[Vit | Swin | SwinMoe | SwinV2, Field(discriminator="kind")]
HIGHEST = math.log(100.0)  # of the logit scale (CLIP)
TEXTS = 1024  # captions a forward pass where none learns


class TwoTowers(base_model.Backbone):
    """Settings of a model of images and captions."""

    captions: ClassVar[bool] = True

    kind: Literal["two_towers"] = "two_towers"
    image: ImageTower = Field(description="the image tower; its head is the projection")
    text: TextTowerSettings = TextTowerSettings()
    joint: int = Field(64, ge=1, le=2**16, description="numbers of an embedding")
    pairs: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="the loss: CLIP's cross-entropy, or SigLIP's sigmoid of pairs"
    )

    def surround(self, around: Surroundings) -> Surroundings:
        """Return the surroundings of the image tower, which looks at no captions."""
        return around._replace(source=None, preview=None)

    @property
    def depth(self) -> int:
        """Blocks of the image tower, which the methods' ``blocks`` mean."""
        return self.image.depth

    @property
    def width(self) -> int:
        """Width of the image tower's tokens."""
        return self.image.width

    @property
    def stages(self) -> tuple[int, ...]:
        """The image tower's."""
        return self.image.stages

    def trained_on(self, image: base_model.ImageSpec) -> "TwoTowers":
        """Return the settings after the image tower's training on such images."""
        return self.model_copy(update={"image": self.image.trained_on(image)})

    def grid(self, image: base_model.ImageSpec) -> tuple[int, ...]:
        """Patches of the image tower along each axis."""
        return self.image.grid(image)

    def build(self, image: base_model.ImageSpec, moe: MoESettings | None = None) -> "TwoTowerModel":
        """The model for images with captions; UserError for other data or sizes."""
        if not isinstance(image.task, ImageText):
            allowed = "data with captions (captioned_mosaic), or another model"
            raise UserError(f"model.kind: found two_towers, but the data have none; {allowed}")
        task = image.task.model_copy(update={"width": self.joint, "pairs": self.pairs})
        return TwoTowerModel(self, image.model_copy(update={"task": task}), moe)


class TwoTowerModel(base_model.BackboneModel):
    """``model(images)`` gives ModelOutput(prediction (B, w + 1): the image side, routing of the
    image tower); with captions (B, M), in training, also their text side and routing.

    See moecore/tasks/image_text.py for what the sides are.
    """

    moves = True

    def __init__(
        self, config: TwoTowers, image: base_model.ImageSpec, moe: MoESettings | None = None
    ) -> None:
        super().__init__(config, image, moe)
        assert isinstance(image.task, ImageText)
        self.visual = config.image.build(image, moe)
        self.text = TextTransformer(config.text, image.task)
        sigmoid = config.pairs == "sigmoid"
        first = math.log(10.0 if sigmoid else 1 / 0.07)
        self.logit_scale = nn.Parameter(torch.tensor([first]))  # (1,): no scalar can be sharded
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if sigmoid else None
        self.freeze_text(config.text.frozen == "always")

    @property
    # a module of its own would be saved twice  # pyrefly: ignore[bad-override]
    def head(self) -> nn.Module:
        """The image tower's projection."""
        return self.visual.head

    @property
    def layout(self) -> TokenLayout:
        """The image tower's."""
        return self.visual.layout

    @property
    def layouts(self) -> tuple[TokenLayout, ...]:
        """The image tower's."""
        return self.visual.layouts

    def layout_of(self, block: int) -> TokenLayout:
        """The image tower's."""
        return self.visual.layout_of(block)

    def width_of(self, block: int) -> int:
        """The image tower's."""
        return self.visual.width_of(block)

    def freeze_text(self, frozen: bool) -> None:
        """Set whether the text tower stays as it is: no gradient, and always in evaluation mode."""
        self.text.requires_grad_(not frozen)
        self.text_frozen = frozen
        self.train(self.training)

    @torch.no_grad()
    def end_step(self, output: ModelOutput, progress: float) -> None:
        """Update both towers' routers, and clip the logit scale: in the forward pass its gradient
        would be 0 beyond (open_clip).
        """
        update_routers(self.visual, output.routing, progress)
        update_routers(self.text, output.text_routing, progress)
        self.logit_scale.clamp_(max=HIGHEST)

    def begin_finetuning(self) -> None:
        """The text tower stays where its settings say so."""
        self.freeze_text(self.config.text.frozen != "never")

    def train(self, mode: bool = True) -> "TwoTowerModel":
        """A frozen text tower stays in evaluation mode."""
        super().train(mode)
        if getattr(self, "text_frozen", False):
            self.text.eval()
        return self

    def adapt_weights(
        self,
        weights: dict[str, Tensor],
        config: Any,
        image: base_model.ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> dict[str, Tensor]:
        """The image tower's weights for other images; those of the text tower as they are."""
        if image.answers != self.image.answers:
            problem = f"found other words: {image.answers[0]}"
            raise ValueError(f"{problem}; allowed: {self.image.answers[0]}, the new data's")
        start = "visual."
        own = {name[len(start) :]: one for name, one in weights.items() if name.startswith(start)}
        other = {name: one for name, one in weights.items() if not name.startswith(start)}
        visual_weights = self.visual.adapt_weights(own, config.image, image, mode)
        return other | {start + name: one for name, one in visual_weights.items()}

    def renormalise_weights(
        self, weights: dict[str, Tensor], image: base_model.ImageSpec
    ) -> dict[str, Tensor]:
        """The image tower's."""
        own = {name: one for name, one in weights.items() if name.startswith("visual.")}
        bare = {name.removeprefix("visual."): one for name, one in own.items()}
        visual_weights = self.visual.renormalise_weights(bare, image)
        return {f"visual.{name}": one for name, one in visual_weights.items()}

    def forward(
        self,
        images: Tensor,
        guidance: Guidance | None = None,
        progress: float = 1.0,
        captions: Tensor | None = None,
    ) -> ModelOutput:
        """captions: one of each image, (B, M); None where only images are looked at."""
        output = super().forward(images, guidance, progress)
        if captions is None:
            return output
        target, spoken = self.text_side(captions, progress)
        # stacked, not viewed: a sharded model hangs its hooks on what it returns
        target = torch.stack([target], dim=1)
        return output._replace(target=target, text_routing=spoken)

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        """Return what the image tower's does."""
        return self.visual.encode(images, options)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens of the image tower to image sides (B, w + 1)."""
        return (self.image_side(self.visual.predict(tokens)),)

    def image_side(self, embedding: Tensor) -> Tensor:
        """Embeddings (B, w) to (B, w + 1): scale · unit vector, and the bias; fp32."""
        with torch.autocast(embedding.device.type, enabled=False):
            scale = self.logit_scale.float().exp()
            unit = normalize(embedding.float(), dim=1)
            bias = unit.new_zeros(1) if self.logit_bias is None else self.logit_bias.float()
            return torch.cat([scale * unit, bias.expand(len(unit), 1)], dim=1)

    def text_side(
        self, captions: Tensor, progress: float = 1.0
    ) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
        """Captions (B, M) to (B, w + 3), fp32, and the routing of their tokens."""
        there = (captions[:, :1] != NONE).float()
        embedding, records = self.text(captions.clamp_min(0), progress)
        with torch.autocast(embedding.device.type, enabled=False):
            unit = normalize(embedding.float(), dim=1) * there
        return torch.cat([unit, there, caption_fingerprints(captions)], dim=1), records

    @torch.no_grad()
    def targets(self, labels: Tensor) -> Tensor:
        """The text side (N, C, w + 3), on the CPU, of captions (N, C, M) or (N, M)."""
        if labels.ndim == 2:
            labels = labels[:, None]
        mode = self.text.training
        self.text.eval()
        device = self.logit_scale.device
        with torch.autocast(device.type, enabled=False):
            parts = [
                self.text_side(part.to(device))[0].cpu()
                for part in labels.flatten(0, -2).split(TEXTS)
            ]
        self.text.train(mode and not self.text_frozen)
        return torch.cat(parts).unflatten(0, labels.shape[:-1])

    def beside(self, labels: Tensor) -> tuple[Tensor, ...]:
        """The captions, which a training step reads too."""
        return (labels,)

    def moe_settings_of(self, name: str) -> MoESettings | None:
        """Return the settings of its own tower."""
        return self.config.text.moe if name.startswith("text.") else self.moe
