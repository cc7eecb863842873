"""The mixture-of-experts layer: in the place of a block's feed-forward, or in anybody's module."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.core.torch_internals import is_in_backward_pass
from moecore.nn.dispatch import Rows, SparsePlan, single_expert_rows
from moecore.nn.experts.base import Experts, ExpertsModule, ZeroComputationExperts
from moecore.nn.layers.block import FeedForward
from moecore.nn.routers.base import CAUSAL, Router

if TYPE_CHECKING:
    from moecore.nn.kernels.expert_parallel import ShardedExperts

NOT_IN_TEXTS = frozenset({"patches", "teacher", "truth"})  # fields of RoutingContext
Blocks = Literal["every_2", "last_2", "all"] | tuple[int, ...]

TOKENS_ALONE = "noisy_top_k, top_k_softmax, expert_choice, soft_slots, or hash with by: position"


class MoESettings(Config):
    """Who routes, to which experts, and in which blocks."""

    router: Router
    experts: Experts
    blocks: Blocks = Field(
        "last_2", description="with experts: every_2, last_2, all, or indices from 0"
    )

    @property
    def active_share(self) -> float:
        """Share of the experts that one token uses."""
        return self.scaled_router.active(self.experts.choices) / self.experts.choices

    @property
    def scaled_router(self) -> Router:
        """Return ``scale_router_k`` of its router and experts."""
        return scale_router_k(self.router, self.experts)

    def build(self, width: int) -> "MoEFeedForward":
        """Return ``build_moe_feed_forward`` of its router and experts."""
        return build_moe_feed_forward(self.router, self.experts, width)

    def check_text(self, key: str = "router", causal: bool = True, truth: bool = False) -> None:
        """Raise UserError for a router that reads what no text has or, if causal, looks ahead.

        truth: whether this text says the kinds of its tokens, as that of the source ciphers.
        """
        there = frozenset({"truth"} if truth else ())
        if lacking := sorted(self.router.wants & NOT_IN_TEXTS - there):
            problem = f"found {self.router.kind}, which reads {', '.join(lacking)}"
            raise UserError(f"{key}.kind: {problem}; this text has none; allowed: {CAUSAL}")
        if causal:
            self.router.check_causal(key)

    def indices(self, depth: int) -> tuple[int, ...]:
        """Return ``sparse_block_indices`` of its blocks."""
        return sparse_block_indices(self.blocks, depth)


def sparse_block_indices(blocks: Blocks, depth: int) -> tuple[int, ...]:
    """The blocks (from 0, ascending) of a model of ``depth`` blocks that hold experts.

    all: every one.  every_2: the odd ones (the papers' even blocks, which count from 1).
    last_2: the last two odd ones.
    Raises UserError where ``depth`` has no such blocks.
    """
    if blocks == "all":
        return tuple(range(depth))
    odd = tuple(range(1, depth, 2))
    if blocks == "every_2" and odd:
        return odd
    if blocks == "last_2" and len(odd) >= 2:
        return odd[-2:]
    if isinstance(blocks, str) and blocks not in ("every_2", "last_2"):
        raise UserError(f"blocks: found {blocks}; allowed: every_2, last_2, all, or indices from 0")
    if isinstance(blocks, str):
        raise UserError(
            f"blocks: {blocks}, but a model of {depth} blocks has only {len(odd)} with "
            "an odd index; allowed: a list of blocks"
        )
    chosen = tuple(sorted(set(blocks)))
    if not chosen or len(chosen) != len(blocks) or chosen[0] < 0 or chosen[-1] >= depth:
        raise UserError(
            f"blocks: {list(blocks)}; give at least one index, each once, from 0 to "
            f"{depth - 1} (a model of {depth} blocks)"
        )
    return chosen


class MoEFeedForward(FeedForward):
    """``layer(tokens, context)`` with tokens (B, T, d) returns (tokens, (RoutingRecord,))."""

    def __init__(
        self,
        router: nn.Module,
        experts: ExpertsModule,
        wants: frozenset[str] = frozenset(),
        lends: frozenset[str] = frozenset(),
        shared: ExpertsModule | None = None,
        zero_computation: ZeroComputationExperts | None = None,
    ) -> None:
        """``wants``: what of the context the router reads; ``lends``: what experts provide;
        ``shared``: an expert that every token uses with weight 1; ``zero_computation``: experts
        without a network, the last that the router chooses among.
        """
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.zero_computation = zero_computation
        self.wants = wants
        self.shares_basis = "basis" in wants & lends
        # in place of ``experts``, which other ranks share
        self.sharded_experts: ShardedExperts | None = None

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, tuple[RoutingRecord]]:
        experts = self.experts if self.sharded_experts is None else self.sharded_experts
        if self.shares_basis:
            context = context._replace(basis=experts.lent_basis())
        if self.training and "outputs" in self.wants and not context.progress:
            # all experts once, for the router to look at and for the tokens
            every = SparsePlan.to_all(tokens.new_ones(*tokens.shape[:2], self.number))
            rows = experts(every.dispatch(tokens))
            context = context._replace(outputs=every.outputs_by_choice(rows))
            _, record = self.router(tokens, context)
            output = every._replace(weights=record.combine).combine(rows)
        else:
            plan, record = self.router(tokens, context)
            output = self.compute_networks(experts, tokens, plan, record)
        if self.zero_computation is not None:
            weights = record.combine[..., self.number :]
            output = output + self.zero_computation(tokens, weights).to(output.dtype)
        if self.shared is not None:
            output = output + self.shared(single_expert_rows(tokens)).view_as(output)
        return output, (record,)

    def compute_networks(
        self,
        experts: "ExpertsModule | ShardedExperts",
        tokens: Tensor,
        plan: Any,
        record: RoutingRecord,
    ) -> Tensor:
        """Return the networks' outputs for tokens (B, T, d), by the plan alone.

        A layer that is exported computes them by the ``record`` alone (exportable_moe.py).
        """
        plan = self.plan_networks(plan)
        return plan.combine(apply_experts_to_rows(experts, plan.dispatch(tokens)))

    def plan_networks(self, plan: Any) -> Any:
        """Return the part of a router's plan that networks compute."""
        if self.zero_computation is None:
            return plan
        return plan.keep_experts(self.number)

    @property
    def number(self) -> int:
        """Return how many networks the router chooses among."""
        return len(next(self.experts.parameters()))


def apply_experts_to_rows(experts: "ExpertsModule | ShardedExperts", rows: Rows) -> Tensor:
    """Rows (R, d) to the experts' outputs (R, d); with ``shares`` to those of one expert a group,
    whose parameters are the experts' in these shares.
    """
    if rows.shares is None:
        return experts(rows)
    assert isinstance(experts, nn.Module)  # check_expert_parallel refuses others
    merged = {
        name: torch.tensordot(rows.shares.to(one.dtype), one, dims=1)
        for name, one in experts.named_parameters()
    }
    return functional_call(experts, merged, (rows,))


@torch.no_grad()
def update_routers(
    model: nn.Module, records: Sequence[RoutingRecord], progress: float = 0.0
) -> None:
    """End a training step: routers with a balance (bias, quantile) learn from its ``records``.

    Once after each step of the optimizer, and on every rank, with the records of that step's
    forward pass: one of each MoE layer of ``model``, in their order (of a foreign model as
    ``trace`` collects them). progress: share of the training that is done. Raises UserError where
    there are not as many records as layers.
    """
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    if len(layers) != len(records):
        problem = f"found {len(records)} for {len(layers)} MoE layers"
        raise UserError(f"records: {problem}; allowed: those of one forward pass")
    for place, layer in enumerate(layers):
        after_step = getattr(layer.router, "after_step", None)
        if after_step is not None:
            after_step(records, place, progress)


def scale_router_k(router: Router, experts: Experts) -> Router:
    """Return the router with k in pieces where experts are split (``fine``), else as it is.

    Raises UserError where it has no k, or where shared pieces leave a token none to choose.
    """
    fine = getattr(experts, "fine", None)
    if fine is None:
        return router
    k = getattr(router, "k", None)
    if k is None:
        problem = f"found {fine}, but the router {router.kind} has no k, which is to grow alike"
        raise UserError(f"experts.fine: {problem}; allowed: null")
    if (chosen := experts.scale_k(k)) < 1:
        problem = f"found {k}, so {k * fine} pieces, of which {k * fine - chosen} are shared"
        raise UserError(f"router.k: {problem}; allowed: more, or fewer experts.shared")
    return router.with_k(chosen)


def build_moe_feed_forward(router: Router, experts: Experts, width: int) -> MoEFeedForward:
    """One layer over ``width``-wide tokens; UserError where router and experts do not fit."""
    for name, none in (("dropout", "0"), ("zero_computation", "null")):
        if (asked := getattr(experts, name, None)) and not router.chooses_per_token:
            whole = f"the router {router.kind} gives experts no single choices of tokens"
            raise UserError(f"experts.{name}: found {asked}, but {whole}; allowed: {none}")
    if experts.choices > experts.networks and "outputs" in router.wants:
        problem = f"found some beside the router {router.kind}, which compares what networks say"
        raise UserError(f"experts.zero_computation: {problem}; allowed: null")
    module = experts.build(width)
    scaled = scale_router_k(router, experts)
    routing = scaled.build(width, experts.choices, module.lent_basis())
    further = experts.build_shared(width), experts.build_zero_computation(width)
    return MoEFeedForward(routing, module, router.wants, experts.provides, *further)


def build_feed_forwards(
    moe: MoESettings | None, width: int, depth: int, build_dense: Callable[[], FeedForward]
) -> list[FeedForward]:
    """Return those of ``depth`` blocks: with experts where ``moe`` has them, else dense."""
    if moe is None:
        return [build_dense() for _ in range(depth)]
    sparse = moe.indices(depth)
    return [moe.build(width) if index in sparse else build_dense() for index in range(depth)]


class MoELayer(nn.Module):
    """A layer by itself: ``layer(tokens)`` returns tokens of the shape that it was given.

    tokens: (N, d), (B, T, d) or (B, H, W, d), floating point; ``trace`` gives its record, of fields
    (B, T, E), with T = H·W for a grid and B = 1 for (N, d).
    """

    def __init__(self, width: int, router: Router, experts: Experts) -> None:
        """``width`` is d. Raises UserError for a router that reads more than tokens, or whose own
        loss reads more than records.
        """
        super().__init__()
        check_reads_tokens_alone(router, experts)
        self.width = width
        self.feed_forward = build_moe_feed_forward(router, experts, width)
        self.records: list[RoutingRecord] | None = None  # a list inside ``trace`` only

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim < 2 or tokens.shape[-1] != self.width or not tokens.is_floating_point():
            problem = f"found {tokens.dtype} of shape {tuple(tokens.shape)}"
            allowed = f"(N, {self.width}), (B, T, {self.width}) or (B, H, W, {self.width})"
            raise UserError(f"tokens: {problem}; allowed: floating point of shape {allowed}")
        batch = 1 if tokens.ndim == 2 else len(tokens)
        output, (record,) = self.feed_forward(tokens.reshape(batch, -1, self.width))
        if self.records is not None and not is_in_backward_pass():
            self.records.append(record)
        return output.view(tokens.shape)


def check_reads_tokens_alone(router: Router, experts: Experts) -> None:
    """Raise UserError for a router that reads, or whose own loss reads, what only a whole model or
    a training knows.
    """
    lacking = sorted(router.wants - experts.provides)
    if router.phase(0.0) != router.phase(1.0):
        lacking.append("the training's progress")
    if lacking:
        problem = f"found {router.kind}, which reads {', '.join(lacking)}"
        raise UserError(f"router: {problem}; a layer by itself has none; allowed: {TOKENS_ALONE}")
    if router.own_loss is not None:
        problem = f"found {router.kind}, whose loss {router.own_loss} reads a whole model"
        raise UserError(f"router: {problem}, not its records; allowed: {TOKENS_ALONE}")
