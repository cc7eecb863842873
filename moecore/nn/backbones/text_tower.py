"""The text tower of a two-tower model: a transformer over a caption's tokens (CLIP, 2021).

Dense or with experts. B captions of M tokens, width d, w numbers of an embedding.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.core.config import Config
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.layers.block import Attention, Block, DenseMlp, FeedForward, HiddenRatio
from moecore.nn.layers.moe import MoESettings, build_feed_forwards
from moecore.tasks.image_text import ImageText

PRIMES = (2_654_435_761, 40_503_001)  # hash a caption's token ids
FINGERPRINT_RANGE = 2**23  # integers below are exact in fp32


class TextTowerSettings(Config):
    """Settings of a transformer over captions."""

    free_settings: ClassVar[frozenset[str]] = frozenset(
        {"mlp_ratio", "activation", "frozen", "moe"}
    )

    width: int = Field(64, ge=8, le=2**16, description="width of a token")
    depth: int = Field(2, ge=1, le=1000, description="number of blocks")
    heads: int = Field(4, ge=1, description="number of attention heads; divides the width")
    mlp_ratio: HiddenRatio = Field(
        4.0, gt=0, le=1000, description="hidden width of the dense MLP / width"
    )
    mask: Literal["causal", "full"] = Field(
        "causal", description="a token attends to itself and earlier ones, or to all (SigLIP)"
    )
    pooling: Literal["end", "class"] = Field(
        "end", description="embed the caption's end token, or a learned token"
    )
    activation: Literal["gelu", "quick_gelu"] = Field(
        "gelu", description="quick_gelu: x·σ(1.702 x), for OpenAI's weights"
    )
    frozen: Literal["never", "finetune", "always"] = Field(
        "never", description="when the tower neither learns nor drops values (LiT)"
    )
    moe: MoESettings | None = Field(
        None, description="experts of this tower; set by a method's `text`"
    )

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


class TextTransformer(nn.Module):
    """``tower(tokens)`` with token ids (B, M) returns unnormalised embeddings (B, w) and records.

    Each MoE layer has one record with fields (1, n, E), n all tokens except padding.
    """

    def __init__(self, config: TextTowerSettings, task: ImageText) -> None:
        super().__init__()
        moe, width = config.moe, config.width
        if moe is not None:
            moe.check_text("text.router", config.mask == "causal")
        self.config = config
        self.task = task
        self.positions = nn.Parameter(torch.empty(task.context, width))
        self.embedding = nn.Embedding(task.words, width)
        self.last = nn.Parameter(torch.empty(1, 1, width)) if config.pooling == "class" else None
        self.blocks = nn.ModuleList(
            Block(width, TextAttention(config), mlp, eps=1e-5) for mlp in self._feed_forwards()
        )
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, task.width, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        nn.init.normal_(self.projection.weight, std=width**-0.5)
        if self.last is not None:
            nn.init.normal_(self.last, std=0.02)

    def forward(
        self, tokens: Tensor, progress: float = 1.0
    ) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
        tokens = tokens.long()
        ends = (tokens == self.task.end).int().argmax(dim=1)
        hidden = self.embedding(tokens) + self.positions
        if self.last is not None:
            hidden = torch.cat([hidden, self.last.expand(len(hidden), -1, -1)], dim=1)
        mask = self.caption_mask(tokens)
        learned = (0, hidden.shape[1] - tokens.shape[1])  # the learned token is no word, no padding
        context, wants = RoutingContext(padding=pad(~mask, learned)), frozenset()
        moe = self.config.moe
        if moe is not None:
            wants = moe.router.wants
        if "words" in wants:
            context = context._replace(words=pad(tokens, learned))
        records: tuple[RoutingRecord, ...] = ()
        for block in self.blocks:
            if moe is not None:
                context = context._replace(progress=moe.router.phase(progress))
            hidden, _, record = block(hidden, context.with_previous(wants, records))
            records += record
        hidden = self.norm(hidden)
        rows = torch.arange(len(hidden), device=hidden.device)
        pooled = hidden[rows, ends] if self.last is None else hidden[:, -1]
        length = tokens.shape[1]
        spoken = (
            record.map_tensors(lambda field: field[:, :length][mask][None]) for record in records
        )
        return self.projection(pooled), tuple(spoken)

    def caption_mask(self, tokens: Tensor) -> Tensor:
        """Return which tokens (B, M) belong to the caption, up to its end token, bool."""
        ends = (tokens == self.task.end).int().argmax(dim=1, keepdim=True)
        return torch.arange(tokens.shape[1], device=tokens.device)[None] <= ends

    def _feed_forwards(self) -> list[FeedForward]:
        config = self.config
        width = config.width

        def build_mlp() -> DenseMlp:
            mlp = DenseMlp(width, round(width * config.mlp_ratio), config.activation)
            nn.init.normal_(mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(mlp.fc2.weight, std=width**-0.5 * (2 * config.depth) ** -0.5)
            return mlp

        return build_feed_forwards(config.moe, width, config.depth, build_mlp)


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
