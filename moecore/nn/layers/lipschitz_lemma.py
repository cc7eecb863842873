"""Evaluate Lemma 1 of Puigcerver et al. (2022), a Lipschitz bound of an MoE layer, at n tokens."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows, SparsePlan
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.token_choice import router_logits

# routers whose logits are a linear map of the token
ROUTERS_WITH_LEMMA = ("noisy_top_k", "top_k_softmax", "frozen_copy", "competition")
_REASONS_WITHOUT_LEMMA = {
    "eigenbasis": (
        "its scores are cosines with the attended token in the experts' bases, not a linear map "
        "of the token"
    ),
    "hash": "a fixed hash decides, so there are no probabilities that depend on the token",
    "soft_slots": "its experts see mixtures of tokens: outputs are not functions of one token",
    "merged": "its experts' parameters are mixed, not their outputs",
    "expert_choice": "its experts choose among tokens: outputs are not functions of one token",
    "teacher_routed": "the teacher's features decide, not a linear map of the token",
}
_MAX_JACOBIAN_ENTRIES = 2**24  # entries of the experts' Jacobians at a time
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class LemmaTerms(NamedTuple):
    """Terms (n,) fp64, per token, of Puigcerver et al.'s Lemma 1: jacobian ≤ experts + router."""

    jacobian: Tensor  # ‖∇f(x)‖₂ of f = Σ_e p_e f_e, by autograd through softmax and experts
    # Σ_e p_e ‖∇f_e(x)‖₂, with each expert's slope at x instead of the paper's global constant L_fe,
    # which is never smaller
    experts: Tensor
    # ‖Σ_e p_e f_e(x) (s_e − s̄)ᵀ‖₂ with s̄ = Σ_e p_e s_e; (d, d), as f has d outputs
    router: Tensor

    @property
    def bound(self) -> Tensor:
        """Return the right-hand side of the lemma, ``experts`` + ``router``, (n,)."""
        return self.experts + self.router

    @property
    def violated(self) -> Tensor:
        """Return where ``jacobian`` exceeds (1 + 1e-6) · bound, (n,) bool; that would be a bug."""
        return self.jacobian > self.bound * (1 + 1e-6)


def why_lemma_fails(router: str) -> str | None:
    if router in ROUTERS_WITH_LEMMA:
        return None
    reason = _REASONS_WITHOUT_LEMMA.get(router, "its weights are not a softmax of linear logits")
    return f"router {router}: {reason}"


def lemma_1_terms(layer: MoEFeedForward, tokens: Tensor) -> LemmaTerms:
    """Return Lemma 1's terms at tokens (n, d) of a layer that mixes all experts by softmax."""
    # In fp64, on the tokens' device. The router has a ``weight`` (E, d) and perhaps a ``bias``
    # (E,), as in ROUTERS_WITH_LEMMA.
    router = frozen_double_copy(layer.router).to(tokens.device)
    experts = frozen_double_copy(layer.experts).to(tokens.device)
    number, width = router.get_parameter("weight").shape
    parts = tokens.double().split(max(1, _MAX_JACOBIAN_ENTRIES // (number * width * width)))
    with torch.autocast(tokens.device.type, enabled=False):
        sides = [_lemma_sides(router, experts, part) for part in parts]
    return LemmaTerms(*(torch.cat(field) for field in zip(*sides, strict=True)))


def _compute_expert_outputs(experts: nn.Module, tokens: Tensor, number: int) -> Tensor:
    """Return the output (E, n, d) of each expert for each token (n, d)."""
    outputs = _apply_experts_to_their_rows(experts, tokens.repeat(number, 1), number)
    return outputs.unflatten(0, (number, -1))


def _apply_experts_to_their_rows(experts: nn.Module, rows: Tensor, number: int) -> Tensor:
    """Return outputs (E·n, d) for rows (E·n, d), sorted by expert, n per expert."""
    numbers = torch.arange(1, number + 1, dtype=torch.int32, device=rows.device)
    return experts(Rows(rows, numbers * (len(rows) // number)))


def _router_probs(router: nn.Module, tokens: Tensor) -> Tensor:
    logits = router_logits(tokens, router.get_parameter("weight"), getattr(router, "bias", None))
    return torch.softmax(logits, dim=-1)


def _lemma_sides(router: nn.Module, experts: nn.Module, tokens: Tensor) -> LemmaTerms:
    weight = router.get_parameter("weight")
    number = len(weight)

    def mixture(x: Tensor) -> Tensor:  # f(x) = Σ_e p_e(x) f_e(x), (n, d)
        outputs = _compute_expert_outputs(experts, x, number)
        return torch.einsum("ne,end->nd", _router_probs(router, x), outputs)

    jacobians = row_jacobians(mixture, tokens)
    expert_jacobians = row_jacobians(
        lambda rows: _apply_experts_to_their_rows(experts, rows, number), tokens.repeat(number, 1)
    )
    slopes = torch.linalg.matrix_norm(expert_jacobians.unflatten(0, (number, -1)), ord=2)
    with torch.no_grad():
        probs = _router_probs(router, tokens)
        outputs = _compute_expert_outputs(experts, tokens, number)
        distances = weight - (probs @ weight).unsqueeze(1)  # (n, E, d): s_e − s̄(x)
        pulls = torch.einsum("ne,eno,nei->noi", probs, outputs, distances)
    of_layer, of_router = (torch.linalg.matrix_norm(each, ord=2) for each in (jacobians, pulls))
    return LemmaTerms(of_layer, (probs.T * slopes).sum(dim=0), of_router)


def frozen_double_copy(module: AnyModule) -> AnyModule:
    return deepcopy(module).double().eval().requires_grad_(False)


def row_jacobians(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return Jacobians (B, K, P) of a row-wise function from B rows of P numbers to (B, K)."""
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_(True)
        outputs = function(leaf).sum(dim=0)
        # one backward pass per output: grouped products have no forward-mode derivatives
        rows = [torch.autograd.grad(output, leaf, retain_graph=True)[0] for output in outputs]
    return torch.stack(rows, dim=1).flatten(2)


def soften_model(model: nn.Module, temperature: float | None = None) -> nn.Module:
    """Copy a model, sharing parameters; all experts run, weighted by soft top-k (None: probs)."""
    # Weights: probs, or ``soft_top_k_weights`` at a temperature. Probs give the same model if all
    # experts are chosen with their probs as weights (noisy top-k at k = E). Soft slots and merged
    # experts do not change: every expert already contributes to every token.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, shared)
    for layer in [module for module in copy.modules() if isinstance(module, MoEFeedForward)]:
        layer.router = AllExpertsRouter(layer.router, temperature)
    return copy


class AllExpertsRouter(nn.Module):
    """A router that sends tokens to all experts, with smoothed weights of the inner router."""

    def __init__(self, router: nn.Module, temperature: float | None = None) -> None:
        super().__init__()
        self.router = router
        self.temperature = temperature

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> tuple[Any, RoutingRecord]:
        plan, record = self.router(tokens, context)
        if getattr(plan, "uses_all_experts", False):
            return plan, record
        if self.temperature is not None:
            weights = soft_top_k_weights(record, self.temperature)
            return SparsePlan.to_all(weights), record._replace(combine=weights)
        dense_plan = SparsePlan.to_all(record.probs)
        ones = torch.ones_like(record.probs)
        return dense_plan, record._replace(load=ones, chosen=ones.bool(), combine=record.probs)


def soft_top_k_weights(record: RoutingRecord, temperature: float) -> Tensor:
    """Return weights (B, T, E) of all experts; they tend to ``combine`` at low temperature."""
    # An expert's weight is its gate σ(d / temperature) times its combine weight or, if it was not
    # chosen, its prob in the scale of these weights; then rescaled to the token's total weight. d:
    # how far its logit lies above the midpoint of the k-th and the next logit. Pairs over capacity
    # keep weight 0.
    logits, chosen, combine = record.logits, record.chosen, record.combine
    processed = combine != 0
    lowest = logits.where(chosen, torch.inf).amin(dim=-1, keepdim=True)
    highest = logits.where(~chosen, -torch.inf).amax(dim=-1, keepdim=True)
    midpoint = (lowest + highest) / 2
    is_mixed = midpoint.isfinite()  # some experts are chosen, and some are not
    distance = logits - midpoint.where(is_mixed, 0)
    # If a balance or the experts decided, d gets the sign of the choice; its gradient stays.
    signed = distance.abs().where(chosen, -distance.abs())
    gate = ((distance + (signed - distance).detach()) / temperature).sigmoid()
    gate = gate.where(is_mixed, chosen.to(gate.dtype))
    tiny = torch.finfo(combine.dtype).tiny
    total = combine.sum(dim=-1, keepdim=True)
    share = total / (record.probs * processed).sum(dim=-1, keepdim=True).clamp_min(tiny)
    weights = gate * combine.where(chosen, record.probs * share)
    return weights * total / weights.sum(dim=-1, keepdim=True).clamp_min(tiny)
