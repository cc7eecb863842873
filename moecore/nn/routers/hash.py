"""HashMoE (Roller et al. 2021), as in TGR-MoE: a fixed hash chooses experts, nothing is learned."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.token_choice import PlanAndRecord, plan_and_record, safe_log, top_k

PRIME = 2**31 - 1  # above every word's id
# a patch with a smaller range of pixels (half a grey level) is blank: it has only rounding errors
BLANK_PATCH_RANGE = 0.5 / 255


class Hash(Router):
    """Choose k experts by a fixed hash of each word, patch or position, with weight 1/k each.

    Words have an identity to hash, patches do not: `patch` sends similar patches to the same
    experts (*our choice*). Load then follows the frequency of patches (on scikit-learn's digits, 8
    experts got 2 to 28 %), and of words with `word`; `position` is balanced.
    """

    has_expert_rows: ClassVar[bool] = False

    kind: Literal["hash"] = "hash"
    k: int = Field(1, ge=1, description="experts per token")
    by: Literal["patch", "position", "word"] = Field(
        "patch", description="hash the patch minus its mean, the position, or the text's word"
    )
    seed: int = Field(0, ge=0, description="seed of the hash")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"patch": ["patches"], "position": [], "word": ["words"]}[self.by])

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "HashRouter":
        self.check_k(experts)
        return HashRouter(self, experts)


# ``probs`` is 1/k for chosen experts and 0 elsewhere; ``logits`` is its logarithm, with the
# smallest normal number for 0. Directions and positions are drawn in the first call and saved in no
# file. The first call must not be compiled: drawing breaks a compiled graph.
class HashRouter(nn.Module):
    """``router(tokens, context)``: (B, T, d) to (SparsePlan, RoutingRecord), no gradient."""

    lines: Tensor | None  # (pixels, E)
    places: Tensor | None  # (T,)

    def __init__(self, config: Hash, experts: int) -> None:
        super().__init__()
        self.config = config
        self.experts = experts
        self.word_hash = draw_hash_factor_and_shift(config.seed)
        self.register_buffer("lines", None, persistent=False)
        self.register_buffer("places", None, persistent=False)

    @torch.no_grad()
    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        with full_precision(tokens):
            if self.config.by == "word":
                assert context.words is not None  # models without words are refused
                factor, shift = self.word_hash
                chosen = self._following_experts((context.words.long() * factor + shift) % PRIME)
            else:
                chosen = self._choose_by_position(tokens)
            if self.config.by == "patch":
                chosen = self._choose_by_patch(context.patches, chosen)
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            weights = torch.full_like(chosen, 1 / self.config.k, dtype=dtype)
            probs = weights.new_zeros(*chosen.shape[:2], self.experts).scatter(-1, chosen, weights)
            logits = safe_log(probs)
            return plan_and_record(logits=logits, probs=probs, chosen=chosen, weights=weights)

    def _choose_by_position(self, tokens: Tensor) -> Tensor:
        """Return ids (B, T, k): each position's expert and the k − 1 following ones, modulo E."""
        first = self.places
        if first is None or len(first) != tokens.shape[1] or first.device != tokens.device:
            seed = self.config.seed
            first = draw_expert_per_position(seed, tokens.shape[1], self.experts, tokens.device)
            self.places = first
        return self._following_experts(first).expand(len(tokens), -1, -1)

    def _following_experts(self, first: Tensor) -> Tensor:
        """Return expert ids (..., k): ``first`` (...) and the following ones, modulo E."""
        following = torch.arange(self.config.k, device=first.device)
        return (first.unsqueeze(-1) + following) % self.experts

    def _choose_by_patch(self, patches: Tensor | None, otherwise: Tensor) -> Tensor:
        """Return experts (B, T, k) by patches (B, T, pixels); ``otherwise`` for blank patches."""
        if patches is None:
            raise UserError.at(
                "router.by",
                found="patch, but the model has no patches to hash (context.patches)",
                allowed="position, or a model of images",
            )
        pixels = patches.to(torch.promote_types(patches.dtype, torch.float32))
        lines = self.lines
        if lines is None or len(lines) != pixels.shape[-1] or lines.device != pixels.device:
            lines = hash_directions(self.config.seed, pixels.shape[-1], self.experts, pixels.device)
            self.lines = lines
        # directions have mean 0, so this changes only the rounding errors, which get smaller
        scores = (pixels - pixels.mean(dim=-1, keepdim=True)) @ lines.to(pixels.dtype)
        # includes special tokens, whose pixels are 0
        blank = pixels.amax(dim=-1) - pixels.amin(dim=-1) < BLANK_PATCH_RANGE
        return torch.where(blank.unsqueeze(-1), otherwise, top_k(scores, self.config.k))


def hash_directions(seed: int, pixels: int, experts: int, device: torch.device) -> Tensor:
    """Return random directions (pixels, E) with mean 0 and length 1, equal on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(pixels, experts, generator=generator, device="cpu")
    return normalize(values - values.mean(dim=0), dim=0).to(device)


def draw_expert_per_position(seed: int, tokens: int, experts: int, device: torch.device) -> Tensor:
    """Return each position's expert (T,); each run of E positions has all experts, shuffled."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rounds = range(-(-tokens // experts))
    shuffles = [torch.randperm(experts, generator=generator, device="cpu") for _ in rounds]
    return torch.cat(shuffles)[:tokens].to(device)


def draw_hash_factor_and_shift(seed: int) -> tuple[int, int]:
    """Return (a, b) of the hash ((a · word + b) mod PRIME) mod E (Carter & Wegman 1979)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    factor, shift = torch.randint(1, PRIME, (2,), generator=generator, device="cpu").tolist()
    return factor, shift
