"""What every transformer over patches shares, whatever the number of axes: images (2) or volumes (3).

B images, C channels, T tokens (special tokens first, then patches, the last axis fastest), K outputs: classes, or one for a target.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.correspondence import match_tokens
from moecore.files import StageError
from moecore.layers.block import Block
from moecore.layers.linear import linear
from moecore.layers.mlp import Mlp
from moecore.layers.moe import MoE
from moecore.layers.patch_embed import cut
from moecore.records import Feature, Guidance, Layout, ModelOutput, RoutingContext


def check_sizes(image: ImageSpec, patch: int, width: int, heads: int) -> None:
    """Raise StageError where patches do not tile the images or heads do not divide the width."""
    if any(size % patch for size in image.shape):
        size = image.size if isinstance(image.size, int) else list(image.size)
        raise StageError(f"model.patch: found {patch}; allowed: a divisor of the image size {size}")
    if width % heads:
        raise StageError(f"model.heads: found {heads}; allowed: a divisor of model.width = {width}")


class Transformer(nn.Module):
    """``model(images)`` with images (B, C, *pixels) in [0, 1] gives ModelOutput(prediction (B, K), routing).

    A prediction of a target is (B, 1) in the target's unit: the head's output · target_std + target_mean.
    """

    def __init__(self, config: Config, image: ImageSpec, patch_embed: nn.Module, moe: MoE | None = None) -> None:
        """config: a backbone's, with patch, width, depth, heads, mlp_ratio, pooling, position_on_class, layer_scale and qkv_bias."""
        super().__init__()
        self.config, self.image, self.moe = config, image, moe
        width, special = config.width, {"class": 1, "class+distillation": 2, "mean": 0}[config.pooling]
        self.special, patches = special, torch.Size(config.grid(image)).numel()
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if special >= 1 else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, width)) if special == 2 else None
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + self.positioned, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, mlp, config.qkv_bias, config.layer_scale) for mlp in self._feed_forwards())
        self.norm = nn.LayerNorm(width, eps=1e-6) if special else nn.Identity()
        self.fc_norm = nn.Identity() if special else nn.LayerNorm(width, eps=1e-6)
        self.head = linear(width, image.outputs)
        self.head_dist = linear(width, image.outputs) if special == 2 else None
        for name, values in (("pixel_mean", image.mean), ("pixel_std", image.std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, *[1] * len(image.shape)), persistent=False)
        for token in (self.cls_token, self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    @property
    def positioned(self) -> int:
        """How many special tokens have a position embedding."""
        return self.special if self.config.position_on_class else 0

    @property
    def layout(self) -> Layout:
        """Where the tokens lie in the image."""
        return Layout(self.special, self.config.grid(self.image), self.image.shape)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def forward(self, images: Tensor, guidance: Guidance | None = None, progress: float = 1.0) -> ModelOutput:
        """``guidance``: a teacher's, for routers that want it. ``progress``: share of the training that is done."""
        tokens, records, _ = self.encode(images, guidance=guidance, progress=progress)
        heads = self.heads(tokens)
        return ModelOutput(torch.stack(heads).mean(dim=0) if len(heads) > 1 else heads[0], records, heads)

    def encode(
        self, images: Tensor, at: Feature | None = None, blocks: tuple[int, ...] = (), guidance: Guidance | None = None, progress: float = 1.0
    ) -> tuple[Tensor, tuple, tuple[Tensor, ...]]:
        """Images to (final tokens (B, T, width), routing records, features (B, T, width) of each of ``blocks``).

        ``at``: "mlp_input" the input of the block's feed-forward, "block_out" its output, "final" the normalised last tokens.
        """
        tokens = self.embed((images - self.pixel_mean) / self.pixel_std)
        contexts = self._contexts(images, tokens.shape, guidance, progress)
        records, found = (), {}
        for index, block in enumerate(self.blocks):
            tokens, entering, record = block(tokens, contexts.get(index, RoutingContext()))
            records += record
            if index in blocks:
                found[index] = entering if at == "mlp_input" else tokens
        tokens = self.norm(tokens)
        return tokens, records, tuple(tokens if at == "final" else found[index] for index in blocks)

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images to (B, T, width) tokens with positions."""
        tokens = self.patch_embed(images)
        special = [token.expand(len(tokens), -1, -1) for token in (self.cls_token, self.dist_token) if token is not None]
        if self.config.position_on_class:
            return torch.cat([*special, tokens], dim=1) + self.pos_embed
        return torch.cat([*special, tokens + self.pos_embed], dim=1)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens (B, T, width) to the outputs (B, K) of every head: class, then distillation where there is one."""
        if not self.special:
            return (self._answer(self.head(self.fc_norm(tokens.mean(dim=1)))),)
        first = self._answer(self.head(tokens[:, 0]))
        return (first,) if self.head_dist is None else (first, self._answer(self.head_dist(tokens[:, 1])))

    def predict(self, tokens: Tensor) -> Tensor:
        """Final tokens to outputs (B, K), averaged over the heads (as DeiT does at inference)."""
        outputs = self.heads(tokens)
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(dim=0)

    def _answer(self, output: Tensor) -> Tensor:
        """Logits of classes as they are; a target in its unit, in fp32: bfloat16 knows an age of 70 only to half a year."""
        return output if self.image.target is None else output.float() * self.image.target_std + self.image.target_mean

    def _contexts(self, images: Tensor, tokens: torch.Size, guidance: Guidance | None, progress: float) -> dict[int, RoutingContext]:
        """What the routers may look at beside their tokens, by block: all but the attention, which the block adds."""
        if self.moe is None:
            return {}
        wants, layers = self.moe.router.wants, self.moe.indices(self.config.depth)
        patches = pad(cut(images, self.config.patch), (0, 0, self.special, 0)) if "patches" in wants else None  # zeros for the special tokens
        teachers = guidance.probs if guidance is not None and "teacher" in wants else (None,) * len(layers)
        matched = (None if probs is None else match_tokens(probs, (*tokens[:2], probs.shape[-1])) for probs in teachers)
        shared = RoutingContext(patches=patches, progress=progress)
        return {index: shared._replace(teacher=probs) for index, probs in zip(layers, matched, strict=True)}

    def _feed_forwards(self) -> list[nn.Module]:
        sparse = () if self.moe is None else self.moe.indices(self.config.depth)
        hidden = round(self.config.width * self.config.mlp_ratio)
        return [self.moe.build(self.config.width) if index in sparse else Mlp(self.config.width, hidden) for index in range(self.config.depth)]
