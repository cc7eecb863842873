"""Language models SMoE, MomentumSMoE, AdamSMoE (MoGE, §3.2, table 10), as in MomentumSMoE's code.

B streams or windows, C blocks of M tokens, L tokens of the span, width d, V words.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.backbones.base_model import (
    Backbone,
    BackboneModel,
    Encoded,
    EncodeOptions,
    ImageSpec,
    check_axes,
)
from moecore.nn.layers.block import HiddenRatio
from moecore.nn.layers.language_block import (
    AdamBlock,
    BlockState,
    LanguageBlock,
    MomentumBlock,
    ReluMlp,
    SegmentMemory,
)
from moecore.nn.layers.moe import MoESettings, build_feed_forwards

KINDS = {"smoe": LanguageBlock, "momentum": MomentumBlock, "adam": MomentumBlock}


class LanguageModel(Backbone):
    """Settings of a language model with span attention and a cache of previous tokens."""

    free_settings: ClassVar[frozenset[str]] = frozenset({"mlp_ratio", "dropout"})

    kind: Literal["language_model"] = "language_model"
    width: int = Field(128, ge=1, le=2**16, description="width of a token, d")
    depth: int = Field(3, ge=1, le=1000, description="number of blocks")
    heads: int = Field(8, ge=1, description="attention heads; they divide the width")
    span: int = Field(
        256, ge=1, description="previous tokens that a token attends to, L, in each block"
    )
    layers: Literal["smoe", "momentum", "adam"] = Field(
        "smoe",
        description="how a feed-forward's output is added: unchanged, with momentum over blocks, "
        "or with momentum after a first block of Adam",
    )
    mlp_ratio: HiddenRatio = Field(
        1.0, gt=0, le=1000, description="hidden width of a dense feed-forward over d"
    )
    dropout: float = Field(
        0.1, ge=0, lt=1, description="dropout of attention and of dense feed-forwards"
    )

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        return tuple(image.shape)

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> "LanguageTransformer":
        check_axes(self.kind, image, 1)
        if self.width % self.heads:
            raise UserError.at(
                "model.heads", found=self.heads, allowed=f"a divisor of model.width = {self.width}"
            )
        if moe is not None:
            moe.check_text(truth=bool(image.truth))
        return LanguageTransformer(self, image, moe)


class LanguageTransformer(BackboneModel):
    """``model(tokens)`` with word ids (B, C, M) predicts the words after the last block, (B, M, V).

    Routing fields are (B, M, E). If the truth is known, inputs are (B, 2C, M): the words of all
    blocks, then their kinds. Earlier blocks only fill the cache; −1 precedes a text's first token.
    In training with ``remember``, the cache continues from step to step, and every stream is one
    block.
    """

    def __init__(
        self, config: LanguageModel, image: ImageSpec, moe: MoESettings | None = None
    ) -> None:
        super().__init__(config, image, moe)
        width = config.width
        self.embedding = nn.Embedding(image.outputs, width)
        self.positions = nn.Parameter(torch.randn(width // config.heads, config.span))
        kinds = [KINDS[config.layers]] * config.depth
        if config.layers == "adam":
            kinds[0] = AdamBlock
        hidden = max(1, round(config.mlp_ratio * width))
        mlps = build_feed_forwards(
            moe, width, config.depth, lambda: ReluMlp(width, hidden, config.dropout)
        )
        self.blocks = nn.ModuleList(
            kind(width, config.heads, mlp, config.dropout)
            for kind, mlp in zip(kinds, mlps, strict=True)
        )
        self.head = nn.Linear(width, image.outputs)
        self.memory: SegmentMemory | None = None

    def remember(self, streams: int, length: int | None = None) -> None:
        """Keep a cache for ``streams`` streams (0: none); UserError if a stream is too short."""
        config = self.config
        if length is not None and config.span > length:
            raise UserError.at(
                "model.span",
                found=f"{config.span}, but each of {streams} streams has {length} words",
                allowed=f"1 to {length}, or a smaller batch",
            )
        self.memory = None
        if streams:
            with self.positions.device:
                self.memory = SegmentMemory(config.depth, streams, config.span, config.width)

    def begin_streams(self) -> None:
        if self.memory is not None:
            self.memory.clear()

    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
        """Return the output of the blocks for the last M of word ids (B, C, M)."""
        word_ids, kinds = self.split_kinds(images)
        if self.training and self.memory is not None:
            last, states = self.read(
                word_ids[:, -1], self.memory.local_states(), options, 0, kinds[:, -1]
            )
            self.memory.store_states(states)
            return last
        states = self.read_earlier(word_ids, kinds, options)
        return self.read(word_ids[:, -1], states, options, 0, kinds[:, -1])[0]

    def split_kinds(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return word ids and kinds, (B, C, M) each, of a split's inputs; unknown kinds are 0."""
        if not self.image.truth:
            return images, torch.zeros_like(images)
        word_ids, kinds = images.chunk(2, dim=1)
        return word_ids, kinds

    @torch.no_grad()
    def read_earlier(
        self, word_ids: Tensor, kinds: Tensor, options: EncodeOptions = EncodeOptions()
    ) -> Tensor:
        """Return the cache (depth, B, L, d) after all blocks of word ids (B, C, M) but the last."""
        states = self.initial_states(len(word_ids), word_ids.device)
        no_features = options._replace(blocks=())
        for distance in range(word_ids.shape[1] - 1, 0, -1):
            words, words_kinds = word_ids[:, -1 - distance], kinds[:, -1 - distance]
            _, states = self.read(words, states, no_features, distance, words_kinds)
        return states

    def routing_of(self, images: Tensor) -> tuple[RoutingRecord, ...]:
        return self.encode(images).routing

    @property
    def reach(self) -> int:
        """Maximum number of earlier blocks that a word's prediction depends on."""
        return self.config.depth * math.ceil(self.config.span / self.image.shape[0])

    def initial_states(self, streams: int, device: torch.device) -> Tensor:
        """Return the empty cache of new streams, (depth, B, L, d): zeros."""
        config = self.config
        return torch.zeros(config.depth, streams, config.span, config.width, device=device)

    def read(
        self,
        word_ids: Tensor,
        states: Tensor,
        options: EncodeOptions = EncodeOptions(),
        before: int = 0,
        kinds: Tensor | None = None,
    ) -> tuple[Encoded, Tensor]:
        """Read a block of words (B, M) after the cache ``states`` (depth, B, L, d).

        Returns what ``encode`` does, and the updated cache, without gradient. before: distance, in
        blocks, to the first predicted block; layers that it cannot depend on are skipped, and their
        cache is unchanged. kinds: of the words, (B, M); None: unknown.
        """
        layers = self.config.depth - math.ceil(before * self.config.depth / self.reach)
        word_ids = word_ids.long()
        is_word = (word_ids >= 0).unsqueeze(-1)
        state = BlockState(self.embedding(word_ids.clamp_min(0)))
        kinds = torch.zeros_like(word_ids) if kinds is None else kinds
        contexts = self.routing_contexts(torch.stack([word_ids, kinds], dim=1), options)
        records: tuple[RoutingRecord, ...] = ()
        block_features: dict[int, Tensor] = {}
        after = []
        for index, block in enumerate(self.blocks):
            cache = states[index]
            if index > layers:
                after.append(cache)
                continue
            inputs = torch.cat([cache, (state.tokens * is_word).detach().float()], dim=1)
            after.append(inputs[:, -self.config.span :])
            if index == layers:
                continue
            context = contexts.get(index, RoutingContext())
            context = context.with_previous(self.router_wants, records)
            state, entering, record = block(state, cache, self.positions, context)
            records += record
            if index in options.blocks:
                block_features[index] = options.select_tokens(entering, state.tokens)
        features = options.select_features(block_features, state.tokens)
        return Encoded(state.tokens, records, features), torch.stack(after)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.head(tokens),)
