"""Image–text models with an image and a text tower (CLIP; LiT, 2022; SigLIP).

The image tower is any backbone of images with any method; the text tower is a transformer over a
caption's tokens, dense or with experts. C captions per image, M tokens each, embedding width w.
"""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from moecore.core import files, routing_records
from moecore.core.config import Config, Surroundings
from moecore.nn.backbones import base_model, swin_v2, vit
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.swin_moe import SwinMoe
from moecore.nn.layers.block import Attention, Block, DenseMlp, HiddenRatio
from moecore.nn.layers.moe import OptionalMoE, build_feed_forwards, update_routers
from moecore.nn.layers.patch_embed import Interpolation
from moecore.tasks.image_text import NO_CAPTION, ImageText

ImageTower = Annotated[vit.Vit | Swin | SwinMoe | swin_v2.SwinV2, Field(discriminator="kind")]
MAX_LOGIT_SCALE = math.log(100.0)  # as in CLIP
IMAGE_PREFIX = "visual."  # the prefix of the image tower's weights
CAPTIONS_PER_PASS = 1024  # captions per forward pass without gradients
PRIMES = (2_654_435_761, 40_503_001)  # hash a caption's token ids
FINGERPRINT_RANGE = 2**23  # integers below are exact in fp32


class TextTowerSettings(Config):
    """Settings of a transformer over captions."""

    free_settings: ClassVar[frozenset[str]] = frozenset("mlp_ratio activation frozen moe".split())

    width: int = Field(64, ge=8, le=2**16, description="width of a token")
    depth: int = Field(2, ge=1, le=1000, description="number of blocks")
    heads: int = Field(4, ge=1, description="number of attention heads; divides the width")
    mlp_ratio: HiddenRatio = Field(4.0, description="hidden width of the dense MLP / width")
    mask: Literal["causal", "full"] = Field(
        "causal", description="a token attends to itself and earlier ones, or to all (SigLIP)"
    )
    pooling: Literal["end", "class"] = Field("end", description="embed the end or a learned token")
    activation: Literal["gelu", "quick_gelu"] = Field(
        "gelu", description="quick_gelu: x·σ(1.702 x), for OpenAI's weights"
    )
    frozen: Literal["never", "finetune", "always"] = Field(
        "never", description="when the tower neither learns nor drops values (LiT)"
    )
    moe: OptionalMoE = Field(None, description="experts of this tower, by a method's `text`")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            allowed = f"a divisor of the text tower's width {self.width}"
            raise ValueError(f"heads is {self.heads}; allowed: {allowed}")
        return self


class TextAttention(Attention):
    """Causal or full attention over tokens (B, M, d), initialised as in CLIP."""

    def __init__(self, config: TextTowerSettings) -> None:
        width = config.width
        super().__init__(width, config.heads, causal=config.mask == "causal", linear=nn.Linear)
        nn.init.normal_(self.qkv.weight, std=width**-0.5)
        nn.init.normal_(self.proj.weight, std=width**-0.5 * (2 * config.depth) ** -0.5)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)


# Each MoE layer has one record with fields (1, n, E), n all tokens except padding.
class TextTransformer(nn.Module):
    """``tower(tokens)`` with ids (B, M) returns unnormalised embeddings (B, w) and records."""

    def __init__(self, config: TextTowerSettings, task: ImageText) -> None:
        super().__init__()
        moe, width = config.moe, config.width
        if moe is not None:
            moe.check_for_text("text.router", config.mask == "causal")
        self.config = config
        self.task = task
        self.positions = nn.Parameter(torch.empty(task.context, width))
        self.embedding = nn.Embedding(task.words, width)
        self.last = nn.Parameter(torch.empty(1, 1, width)) if config.pooling == "class" else None

        def build_mlp() -> DenseMlp:
            mlp = DenseMlp(width, round(width * config.mlp_ratio), config.activation)
            nn.init.normal_(mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(mlp.fc2.weight, std=width**-0.5 * (2 * config.depth) ** -0.5)
            return mlp

        mlps = build_feed_forwards(moe, width, config.depth, build_mlp)
        blocks = [Block(width, TextAttention(config), mlp, eps=1e-5) for mlp in mlps]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, task.width, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        nn.init.normal_(self.projection.weight, std=width**-0.5)
        if self.last is not None:
            nn.init.normal_(self.last, std=0.02)

    def forward(
        self, tokens: Tensor, progress: float = 1.0
    ) -> tuple[Tensor, tuple[routing_records.RoutingRecord, ...]]:
        tokens = tokens.long()
        ends = (tokens == self.task.end).int().argmax(dim=1)
        hidden = self.embedding(tokens) + self.positions
        if self.last is not None:
            hidden = torch.cat([hidden, self.last.expand(len(hidden), -1, -1)], dim=1)
        mask = self.caption_mask(tokens)
        learned = (0, hidden.shape[1] - tokens.shape[1])  # the learned token is no word, no padding
        context = routing_records.RoutingContext(padding=pad(~mask, learned))
        wants = frozenset()
        moe = self.config.moe
        if moe is not None:
            wants = moe.router.wants
        if "words" in wants:
            context = context._replace(words=pad(tokens, learned))
        records: tuple[routing_records.RoutingRecord, ...] = ()
        for block in self.blocks:
            if moe is not None:
                context = context._replace(progress=moe.router.phase(progress))
            hidden, _, record = block(hidden, context.with_previous(wants, records))
            records += record
        hidden = self.norm(hidden)
        rows = torch.arange(len(hidden), device=hidden.device)
        pooled = hidden[rows, ends] if self.last is None else hidden[:, -1]
        length = tokens.shape[1]
        spoken = (record.map_tensors(lambda row: row[:, :length][mask][None]) for record in records)
        return self.projection(pooled), tuple(spoken)

    def caption_mask(self, tokens: Tensor) -> Tensor:
        """Return whether each token belongs to its caption (up to the end token), bool (B, M)."""
        ends = (tokens == self.task.end).int().argmax(dim=1, keepdim=True)
        return torch.arange(tokens.shape[1], device=tokens.device)[None] <= ends


def caption_fingerprints(captions: Tensor) -> Tensor:
    """Return a 46-bit hash of captions (B, M) as two numbers, (B, 2) fp32."""
    # in a batch of 32,768 captions a collision has probability 1e-5
    places = torch.arange(1, captions.shape[1] + 1, device=captions.device)
    hashes = []
    for prime in PRIMES:
        mixed = (captions.long() + 2) * (places * prime % 1_000_003 + 1)
        mixed = (mixed ^ (mixed >> 7)) * prime % 2_147_483_647
        hashes.append(mixed.sum(dim=1) % FINGERPRINT_RANGE)
    return torch.stack(hashes, dim=1).float()


class TwoTowers(base_model.Backbone):
    """Settings of a model of images and captions."""

    captions: ClassVar[bool] = True

    kind: Literal["two_towers"] = "two_towers"
    image: ImageTower = Field(description="the image tower; its head is the projection")
    text: TextTowerSettings = TextTowerSettings()
    joint: int = Field(64, ge=1, le=2**16, description="width of an embedding")
    pairs: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="loss: CLIP's cross-entropy, or SigLIP's sigmoid of pairs"
    )

    def surround(self, around: Surroundings) -> Surroundings:
        return around._replace(source=None, preview=None)

    @property
    def depth(self) -> int:
        """Number of blocks of the image tower, to which a method's ``blocks`` refer."""
        return self.image.depth

    @property
    def width(self) -> int:
        return self.image.width

    @property
    def stages(self) -> tuple[int, ...]:
        return self.image.stages

    def trained_on(self, image: ImageSpec) -> "TwoTowers":
        return self.model_copy(update={"image": self.image.trained_on(image)})

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        return self.image.grid(image)

    def build(self, image: ImageSpec, moe: OptionalMoE = None) -> "TwoTowerModel":
        if not isinstance(image.task, ImageText):
            raise files.UserError.at(
                "model.kind",
                found="two_towers, but the data have no captions",
                allowed="data with captions (captioned_mosaic), or another model",
            )
        task = image.task.model_copy(update={"width": self.joint, "pairs": self.pairs})
        return TwoTowerModel(self, image.model_copy(update={"task": task}), moe)


# In training, with captions (B, M), the output also has their text side and routing. See
# moecore/tasks/image_text.py for the two sides.
class TwoTowerModel(base_model.BackboneModel):
    """``model(images)`` returns scaled embeddings and a bias (B, w + 1), and image routing."""

    moves = True

    def __init__(self, config: TwoTowers, image: ImageSpec, moe: OptionalMoE = None) -> None:
        super().__init__(config, image, moe)
        assert isinstance(image.task, ImageText)
        self.visual = config.image.build(image, moe)
        self.text = TextTransformer(config.text, image.task)
        sigmoid = config.pairs == "sigmoid"
        first = math.log(10.0 if sigmoid else 1 / 0.07)
        self.logit_scale = nn.Parameter(torch.tensor([first]))  # (1,): scalars cannot be sharded
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if sigmoid else None
        self.set_text_frozen(config.text.frozen == "always")

    @property
    # registered here too, it would be saved twice  # pyrefly: ignore[bad-override]
    def head(self) -> nn.Module:
        return self.visual.head

    @property
    def layout(self) -> routing_records.TokenLayout:
        return self.visual.layout

    def layout_of(self, block: int) -> routing_records.TokenLayout:
        return self.visual.layout_of(block)

    def width_of(self, block: int) -> int:
        return self.visual.width_of(block)

    def set_text_frozen(self, frozen: bool) -> None:
        """Freeze the text tower (no gradient, evaluation mode), or release it."""
        self.text.requires_grad_(not frozen)
        self.text_frozen = frozen
        self.train(self.training)

    @torch.no_grad()
    def end_step(self, output: routing_records.ModelOutput, progress: float) -> None:
        """Update both towers' routers and clip the logit scale."""
        update_routers(self.visual, output.routing, progress)
        update_routers(self.text, output.text_routing, progress)
        # here, as in open_clip: clipped in the forward pass, its gradient would be 0 beyond
        self.logit_scale.clamp_(max=MAX_LOGIT_SCALE)

    def begin_finetuning(self) -> None:
        self.set_text_frozen(self.config.text.frozen != "never")

    def train(self, mode: bool = True) -> "TwoTowerModel":
        super().train(mode)
        if getattr(self, "text_frozen", False):
            self.text.eval()
        return self

    def adapt_weights(
        self,
        weights: base_model.Weights,
        config: Any,
        image: ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> base_model.Weights:
        """Return weights in which the image tower's weights fit this model's images."""
        if image.answers != self.image.answers:
            raise ValueError(
                files.format_found_and_allowed(
                    found=f"other words: {image.answers[0]}",
                    allowed=f"{self.image.answers[0]}, the new data's",
                )
            )
        visual = self.visual.adapt_weights(_image_tower_weights(weights), config.image, image, mode)
        text = {key: value for key, value in weights.items() if not key.startswith(IMAGE_PREFIX)}
        return text | {IMAGE_PREFIX + name: value for name, value in visual.items()}

    def renormalise_weights(
        self, weights: base_model.Weights, image: ImageSpec
    ) -> base_model.Weights:
        visual = self.visual.renormalise_weights(_image_tower_weights(weights), image)
        return {IMAGE_PREFIX + name: value for name, value in visual.items()}

    def forward(
        self,
        images: Tensor,
        guidance: routing_records.Guidance | None = None,
        progress: float = 1.0,
        captions: Tensor | None = None,
    ) -> routing_records.ModelOutput:
        """Return the output for images and, if given, one caption per image, (B, M)."""
        output = super().forward(images, guidance, progress)
        if captions is None:
            return output
        target, text_routing = self.encode_captions(captions, progress)
        # stacked, not a view: a sharded model registers hooks on its outputs
        target = torch.stack([target], dim=1)
        return output._replace(target=target, text_routing=text_routing)

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        return self.visual.encode(images, options)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return image embeddings with bias (B, w + 1) from final tokens of the image tower."""
        return (self.scale_embeddings_and_append_bias(self.visual.predict(tokens)),)

    def scale_embeddings_and_append_bias(self, embedding: Tensor) -> Tensor:
        """Normalise (B, w), multiply by exp(``logit_scale``), append the bias: (B, w + 1) fp32."""
        with torch.autocast(embedding.device.type, enabled=False):
            scale = self.logit_scale.float().exp()
            unit = normalize(embedding.float(), dim=1)
            bias = unit.new_zeros(1) if self.logit_bias is None else self.logit_bias.float()
            return torch.cat([scale * unit, bias.expand(len(unit), 1)], dim=1)

    def encode_captions(
        self, captions: Tensor, progress: float = 1.0
    ) -> tuple[Tensor, tuple[routing_records.RoutingRecord, ...]]:
        """Return captions (B, M) as (B, w + 3): embedding, 1 (missing: 0), hash; and records."""
        # A row: unit embedding, 1, hash of the tokens. A missing caption has 0 for the first two.
        exists = (captions[:, :1] != NO_CAPTION).float()
        embedding, records = self.text(captions.clamp_min(0), progress)
        with torch.autocast(embedding.device.type, enabled=False):
            unit = normalize(embedding.float(), dim=1) * exists
        return torch.cat([unit, exists, caption_fingerprints(captions)], dim=1), records

    @torch.no_grad()
    def targets(self, labels: Tensor) -> Tensor:
        """Encode captions (N, C, M) or (N, M), C per image, for the loss: (N, C, w + 3), CPU."""
        if labels.ndim == 2:
            labels = labels[:, None]
        mode = self.text.training
        self.text.eval()
        device = self.logit_scale.device
        with torch.autocast(device.type, enabled=False):
            texts = labels.flatten(0, -2).split(CAPTIONS_PER_PASS)
            parts = [self.encode_captions(part.to(device))[0].cpu() for part in texts]
        self.text.train(mode and not self.text_frozen)
        return torch.cat(parts).unflatten(0, labels.shape[:-1])

    def beside(self, labels: Tensor) -> tuple[Tensor, ...]:
        return (labels,)

    def moe_settings_of(self, name: str) -> OptionalMoE:
        if name.startswith("text."):
            return self.config.text.moe
        return self.moe


def _image_tower_weights(weights: base_model.Weights) -> base_model.Weights:
    visual = (name for name in weights if name.startswith(IMAGE_PREFIX))
    return {name.removeprefix(IMAGE_PREFIX): weights[name] for name in visual}
