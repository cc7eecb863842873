"""Language models SMoE, MomentumSMoE and AdamSMoE (MoGE, §3.2, table 10), as MomentumSMoE's code.

B streams or windows, C blocks of M tokens each, L tokens of the span, d width, V words.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord, TokenLayout
from moecore.nn.backbones.base_model import (
    Backbone,
    BackboneModel,
    Encoded,
    EncodeOptions,
    ImageSpec,
)
from moecore.nn.layers.block import FeedForward, HiddenRatio
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
    """Settings of a language model with span attention and a cache of what came before."""

    free_settings: ClassVar[frozenset[str]] = frozenset({"mlp_ratio", "dropout"})

    kind: Literal["language_model"] = "language_model"
    width: int = Field(128, ge=1, le=2**16, description="width of a token, d")
    depth: int = Field(3, ge=1, le=1000, description="number of blocks")
    heads: int = Field(8, ge=1, description="attention heads; they divide the width")
    span: int = Field(
        256, ge=1, description="tokens before it that a token attends to, L, in each block"
    )
    layers: Literal["smoe", "momentum", "adam"] = Field(
        "smoe",
        description="how a feed-forward's change is added: as it is, with the momentum of the "
        "blocks before, or that after a first block of Adam",
    )
    mlp_ratio: HiddenRatio = Field(
        1.0, gt=0, le=1000, description="hidden width of a dense feed-forward over d"
    )
    dropout: float = Field(
        0.1, ge=0, lt=1, description="in training: on attention, on and inside dense feed-forwards"
    )

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        """Tokens of a block."""
        return tuple(image.shape)

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> "LanguageTransformer":
        """The model for such text; UserError for images and routers that look ahead."""
        if len(image.shape) != 1:
            problem = f"model.kind: found language_model, but the data have {len(image.shape)} axes"
            allowed = "text (docstrings, wikitext, ciphers), or another model"
            raise UserError(f"{problem}; allowed: {allowed}")
        if self.width % self.heads:
            allowed = f"a divisor of model.width = {self.width}"
            raise UserError(f"model.heads: found {self.heads}; allowed: {allowed}")
        if moe is not None:
            moe.check_text(truth=bool(image.truth))
        return LanguageTransformer(self, image, moe)


class LanguageTransformer(BackboneModel):
    """``model(tokens)`` with word numbers (B, C, M) gives ModelOutput(prediction (B, M, V) for the
    last block, routing of fields (B, M, E), heads).

    Where the truth is known, words are (B, 2C, M), the kinds of all blocks after their words. The
    blocks before the last one are read for their cache; −1 is the token before a text's first.
    Where the model remembers (``remember``), and is in training, the cache goes on from step to
    step and every stream is one block.
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
        self.blocks = nn.ModuleList(
            kind(width, config.heads, mlp, config.dropout)
            for kind, mlp in zip(kinds, self._feed_forwards(), strict=True)
        )
        self.head = nn.Linear(width, image.outputs)
        self.memory: SegmentMemory | None = None

    @property
    def layout(self) -> TokenLayout:
        """The tokens of a block, in their order."""
        return TokenLayout(0, self.config.grid(self.image), self.image.shape)

    def remember(self, streams: int, length: int | None = None) -> None:
        """Keep a cache for so many streams (0: none); UserError where one is too short."""
        config = self.config
        if length is not None and config.span > length:
            problem = f"found {config.span}, but each of {streams} streams has {length} words"
            raise UserError(f"model.span: {problem}; allowed: 1 to {length}, or a smaller batch")
        self.memory = None
        if streams:
            with self.positions.device:
                self.memory = SegmentMemory(config.depth, streams, config.span, config.width)

    def begin_streams(self) -> None:
        """All streams begin anew."""
        if self.memory is not None:
            self.memory.clear()

    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
        """Return what the blocks make of word numbers (B, C, M): of the last M of them."""
        words, kinds = self.split_kinds(images)
        if self.training and self.memory is not None:
            last, states = self.read(words[:, -1], self.memory.own(), options, 0, kinds[:, -1])
            self.memory.store_states(states)
            return last
        states = self.read_earlier(words, kinds, options)
        return self.read(words[:, -1], states, options, 0, kinds[:, -1])[0]

    def split_kinds(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return words and kinds, (B, C, M) each, of what a split has; kinds of 0: not known."""
        if not self.image.truth:
            return images, torch.zeros_like(images)
        words, kinds = images.chunk(2, dim=1)
        return words, kinds

    @torch.no_grad()
    def read_earlier(
        self, words: Tensor, kinds: Tensor, options: EncodeOptions = EncodeOptions()
    ) -> Tensor:
        """Return the cache (depth, B, L, d) after all blocks of words (B, C, M) but the last."""
        states = self.initial_states(len(words), words.device)
        for before in range(words.shape[1] - 1, 0, -1):
            earlier = options._replace(blocks=())
            place = -1 - before
            _, states = self.read(words[:, place], states, earlier, before, kinds[:, place])
        return states

    def routing_of(self, images: Tensor) -> tuple[RoutingRecord, ...]:
        return self.encode(images).routing

    @property
    def reach(self) -> int:
        """Blocks of tokens before its own that a word's prediction depends on, at most."""
        return self.config.depth * math.ceil(self.config.span / self.image.shape[0])

    def initial_states(self, streams: int, device: torch.device) -> Tensor:
        """The cache of streams that begin, (depth, B, L, d): zeros."""
        config = self.config
        return torch.zeros(config.depth, streams, config.span, config.width, device=device)

    def read(
        self,
        words: Tensor,
        states: Tensor,
        options: EncodeOptions = EncodeOptions(),
        before: int = 0,
        kinds: Tensor | None = None,
    ) -> tuple[Encoded, Tensor]:
        """One block of tokens (B, M) after the cache ``states`` (depth, B, L, d).

        Returns what ``encode`` does, and the cache after it, without gradient. before: so many
        blocks of tokens before the first that is looked at; layers that it cannot see from there
        are left out, and their cache as it was. kinds: of the tokens, (B, M); None: not known.
        """
        seen = self.config.depth - math.ceil(before * self.config.depth / self.reach)
        words = words.long()
        there = (words >= 0).unsqueeze(-1)
        state = BlockState(self.embedding(words.clamp_min(0)))
        kinds = torch.zeros_like(words) if kinds is None else kinds
        contexts = self.routing_contexts(torch.stack([words, kinds], dim=1), options)
        records: tuple[RoutingRecord, ...] = ()
        block_features: dict[int, Tensor] = {}
        after = []
        for index, block in enumerate(self.blocks):
            own = states[index]
            if index > seen:
                after.append(own)
                continue
            kept = torch.cat([own, (state.tokens * there).detach().float()], dim=1)
            after.append(kept[:, -self.config.span :])
            if index == seen:
                continue
            context = contexts.get(index, RoutingContext())
            context = context.with_previous(self.router_wants, records)
            state, entering, record = block(state, own, self.positions, context)
            records += record
            if index in options.blocks:
                block_features[index] = options.select_tokens(entering, state.tokens)
        features = options.select_features(block_features, state.tokens)
        return Encoded(state.tokens, records, features), torch.stack(after)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens (B, M, d) to the logits (B, M, V) of the only head."""
        return (self.head(tokens),)

    def _feed_forwards(self) -> list[FeedForward]:
        config = self.config
        sizes = (config.width, max(1, round(config.mlp_ratio * config.width)), config.dropout)
        return build_feed_forwards(self.moe, config.width, config.depth, lambda: ReluMlp(*sizes))
