"""Language models SMoE, MomentumSMoE, AdamSMoE (MoGE, §3.2, table 10), as in MomentumSMoE's code.

Their layers (Teo & Nguyen 2024) are post-norm, with a second residual around the feed-forward f,
which includes dropout. B streams (parallel parts of a text) or windows, each of C blocks of M
tokens; attention spans L tokens; width d, V words in the vocabulary.
"""

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from moecore.core import files, ranks
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.backbones.base_model import (
    Backbone,
    BackboneModel,
    Encoded,
    EncodeOptions,
    ImageSpec,
    check_axis_count,
)
from moecore.nn.layers.block import Dropout, FeedForward, HiddenRatio
from moecore.nn.layers.moe import OptionalMoE, build_feed_forwards

MOMENTUM_DECAY = 0.7  # decay of the momentum per layer
ADAM_STEP_SIZE = 1.0  # step of Adam's first layer; without effect, as a norm follows
MOMENTUM_STEP_SIZE = 1.0  # step of the momentum
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8  # under the root


class SlidingWindowAttention(nn.Module):
    """Attention of token t to the L tokens before it, excluding itself."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        maps = [nn.Linear(width, width, bias=False) for _ in range(4)]
        self.query, self.key, self.value, self.proj = maps
        self.dropout = Dropout(dropout)

    def forward(
        self, tokens: Tensor, before: Tensor, positions: Tensor, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs (B, M, d), weights or None; ``before`` (B, L, d): L tokens before them."""
        all_tokens = torch.cat([before.to(tokens.dtype), tokens], dim=1)
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(tokens), self.key(all_tokens), self.value(all_tokens))
        )
        # logit(t, j) = (q_t · k_{t−L+j} + q_t · p_j) / √e for j = 0 … L−1; p, ``positions`` (e, L),
        # is shared by all heads, and by all layers that get it
        logits = undo_relative_shift(query @ key.transpose(-2, -1))
        logits = logits + query @ positions.to(query.dtype)
        share = torch.softmax(logits.float() * query.shape[-1] ** -0.5, dim=-1).to(value.dtype)
        shifted = relative_shift(self.dropout(share))
        attended = self.proj((shifted @ value).transpose(1, 2).flatten(2))
        if not weights:
            return attended, None
        # (B, M, M), averaged over heads; without tokens before the block: rows sum to < 1
        return attended, relative_shift(share).mean(dim=1)[..., -tokens.shape[1] :]


def undo_relative_shift(values: Tensor) -> Tensor:
    """Cut (…, M, L + M) to (…, M, L): row t keeps columns t … t + L − 1."""
    *lead, block, total = values.shape
    return pad(values.flatten(-2), (0, block)).view(*lead, block, total + 1)[..., : total - block]


def relative_shift(values: Tensor) -> Tensor:
    """Pad (…, M, L) to (…, M, L + M): row t starts at column t, all else is 0."""
    *lead, block, span = values.shape
    flat = pad(values, (0, block + 1)).flatten(-2)
    return flat[..., : block * (span + block)].view(*lead, block, span + block)


class TokensAndMomentum(NamedTuple):
    tokens: Tensor  # (B, M, d)
    momentum: Tensor | None = None  # (B, M, d)


class ReluMlp(FeedForward):
    """Linear, ReLU, dropout, Linear over (B, M, d) tokens, with torch's initial weights."""

    activation = "relu"

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> tuple[Tensor, tuple]:
        return self.fc2(self.dropout(relu(self.fc1(tokens)))), ()


class LanguageBlock(nn.Module):
    """h ← LN₁(h + attention(h)), then h ← LN₂(h + s), of tokens h, with s = LN(h + f(h))."""

    def __init__(self, width: int, heads: int, mlp: FeedForward, dropout: float) -> None:
        super().__init__()
        self.attn = SlidingWindowAttention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(
        self, state: TokensAndMomentum, before: Tensor, positions: Tensor, context: RoutingContext
    ) -> tuple[TokensAndMomentum, Tensor, tuple]:
        """Return output, feed-forward input, records; ``before`` (B, L, d): L earlier tokens."""
        tokens = state.tokens
        wants = self.mlp.wants
        attended, weights = self.attn(tokens, before, positions, weights="attention" in wants)
        inputs = self.norm1(tokens + attended)
        context = context.with_attention(wants, weights, attended)
        change, records = self.mlp(inputs, context)
        inner, momentum = self.add_with_momentum(inputs, self.dropout(change), state.momentum)
        return TokensAndMomentum(self.norm2(inputs + self.norm(inner)), momentum), inputs, records

    def add_with_momentum(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the feed-forward's output ``change`` to tokens; also return the next momentum."""
        return tokens + change, None


class MomentumBlock(LanguageBlock):
    """LanguageBlock with momentum m over blocks (first 0): m ← μ·m + γ·f(h), then s = LN(h − m)."""

    def add_with_momentum(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        step = MOMENTUM_STEP_SIZE * change
        momentum = step if momentum is None else MOMENTUM_DECAY * momentum + step
        return tokens - momentum, momentum


class AdamBlock(MomentumBlock):
    """AdamSMoE's first block: s = LN(−γ₁ (1 − β₁) f / √((1 − β₂) f² + ε)), f = f(h); no history."""

    def add_with_momentum(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        _, momentum = super().add_with_momentum(tokens, change, momentum)
        # p = (1 − β₁) f and v = (1 − β₂) f² are not accumulated over blocks, and the tokens cancel
        # (code of MoGE and MomentumSMoE; both papers' text adds them).
        first = (1 - ADAM_BETAS[0]) * change
        second = (1 - ADAM_BETAS[1]) * change.float().square()
        return -ADAM_STEP_SIZE * first / torch.sqrt(second + ADAM_EPS), momentum


class SegmentMemory(nn.Module):
    """Training's cache: each layer's last L inputs per stream, (depth, streams, L, d) fp32."""

    states: Tensor

    def __init__(self, depth: int, streams: int, span: int, width: int) -> None:
        super().__init__()
        self.register_buffer("states", torch.zeros(depth, streams, span, width))

    def clear(self) -> None:
        self.states.zero_()

    def states_of_this_rank(self) -> Tensor:
        """Return the states of the b streams of this rank, (depth, b, L, d)."""
        rows = ranks.rank_and_size().rows(self.states.shape[1])
        if rows is None:
            return self.states
        return self.states[:, rows.to(self.states.device)]

    def gather_and_store_states(self, local: Tensor) -> None:
        """Store all ranks' new states; ``local``: (depth, b, L, d) of this rank's b streams."""
        self.states = ranks.all_gather_rows(local.transpose(0, 1)).transpose(0, 1).contiguous()


BLOCK_CLASSES = {"smoe": LanguageBlock, "momentum": MomentumBlock, "adam": MomentumBlock}


class LanguageModel(Backbone):
    """Settings of a language model with span attention and a cache of previous tokens."""

    free_settings: ClassVar[frozenset[str]] = frozenset({"mlp_ratio", "dropout"})

    kind: Literal["language_model"] = "language_model"
    width: int = Field(128, ge=1, le=2**16, description="width of a token, d")
    depth: int = Field(3, ge=1, le=1000, description="number of blocks")
    heads: int = Field(8, ge=1, description="attention heads; they divide the width")
    span: int = Field(256, ge=1, description="previous tokens a token attends to, L, in each block")
    layers: Literal["smoe", "momentum", "adam"] = Field(
        "smoe",
        description="how a feed-forward's output is added: unchanged, with momentum over blocks, "
        "or with momentum after a first block of Adam",
    )
    mlp_ratio: HiddenRatio = Field(1.0, description="hidden width of a dense feed-forward over d")
    dropout: float = Field(0.1, ge=0, lt=1, description="of attention and of dense feed-forwards")

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        return tuple(image.shape)

    def build(self, image: ImageSpec, moe: OptionalMoE = None) -> "LanguageTransformer":
        check_axis_count(self.kind, image, 1)
        if self.width % self.heads:
            allowed = f"a divisor of model.width = {self.width}"
            raise files.UserError.at("model.heads", found=self.heads, allowed=allowed)
        if moe is not None:
            moe.check_for_text(truth=bool(image.truth))
        return LanguageTransformer(self, image, moe)


# Routing fields are (B, M, E). If the truth is known, inputs are (B, 2C, M): the words of all
# blocks, then their kinds. Earlier blocks only fill the cache; −1 precedes a text's first token. In
# training with ``remember``, the cache continues from step to step, and every stream is one block.
class LanguageTransformer(BackboneModel):
    """``model(ids)`` of C text blocks, (B, C, M), gives the last's next-word logits (B, M, V)."""

    def __init__(self, config: LanguageModel, image: ImageSpec, moe: OptionalMoE = None) -> None:
        super().__init__(config, image, moe)
        width = config.width
        self.embedding = nn.Embedding(image.outputs, width)
        self.positions = nn.Parameter(torch.randn(width // config.heads, config.span))
        kinds = [BLOCK_CLASSES[config.layers]] * config.depth
        if config.layers == "adam":
            kinds[0] = AdamBlock
        hidden = max(1, round(config.mlp_ratio * width))
        build_dense = lambda: ReluMlp(width, hidden, config.dropout)
        mlps = build_feed_forwards(moe, width, config.depth, build_dense)
        self.blocks = nn.ModuleList(
            kind(width, config.heads, mlp, config.dropout)
            for kind, mlp in zip(kinds, mlps, strict=True)
        )
        self.head = nn.Linear(width, image.outputs)
        self.memory: SegmentMemory | None = None

    def remember(self, streams: int, length: int | None = None) -> None:
        """Create a cache of ``streams`` streams (0: none); UserError if their ``length`` < span."""
        config = self.config
        if length is not None and config.span > length:
            raise files.UserError.at(
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
        """Return the output for the last of C text blocks of M words, word ids (B, C, M)."""
        word_ids, kinds = self.split_words_and_kinds(images)
        if self.training and self.memory is not None:
            states = self.memory.states_of_this_rank()
            last, states = self.read(word_ids[:, -1], states, options, 0, kinds[:, -1])
            self.memory.gather_and_store_states(states)
            return last
        states = self.read_earlier(word_ids, kinds, options)
        return self.read(word_ids[:, -1], states, options, 0, kinds[:, -1])[0]

    def split_words_and_kinds(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Split inputs into word ids and the words' true kinds, (B, C, M) each; 0 if unknown."""
        if not self.image.truth:
            return images, torch.zeros_like(images)
        word_ids, kinds = images.chunk(2, dim=1)
        return word_ids, kinds

    @torch.no_grad()
    def read_earlier(
        self, word_ids: Tensor, kinds: Tensor, options: EncodeOptions = EncodeOptions()
    ) -> Tensor:
        """Read the text blocks (B, C, M) but the last; return the cache then, (depth, B, L, d)."""
        states = self.initial_states(len(word_ids), word_ids.device)
        no_features = options._replace(blocks=())
        for distance in range(word_ids.shape[1] - 1, 0, -1):
            step_ids, step_kinds = word_ids[:, -1 - distance], kinds[:, -1 - distance]
            _, states = self.read(step_ids, states, no_features, distance, step_kinds)
        return states

    def routing_of(self, images: Tensor) -> tuple[RoutingRecord, ...]:
        return self.encode(images).routing

    @property
    def reach(self) -> int:
        """Maximum number of earlier text blocks on which a word's prediction depends."""
        return self.config.depth * math.ceil(self.config.span / self.image.shape[0])

    def initial_states(self, streams: int, device: torch.device) -> Tensor:
        """Return the cache of new streams, zeros (depth, B, L, d)."""
        config = self.config
        return torch.zeros(config.depth, streams, config.span, config.width, device=device)

    def read(
        self,
        word_ids: Tensor,
        states: Tensor,  # the cache before, (depth, B, L, d)
        options: EncodeOptions = EncodeOptions(),
        before: int = 0,  # distance, in blocks, to the first predicted block
        kinds: Tensor | None = None,  # true kinds of the words, (B, M)
    ) -> tuple[Encoded, Tensor]:
        """Return a text block's (B, M) output and new cache, detached: layers' last L inputs."""
        # Layers on which no predicted word depends are skipped; their cache does not change.
        layers = self.config.depth - math.ceil(before * self.config.depth / self.reach)
        word_ids = word_ids.long()
        is_word = (word_ids >= 0).unsqueeze(-1)
        state = TokensAndMomentum(self.embedding(word_ids.clamp_min(0)))
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
