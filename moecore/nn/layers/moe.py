"""The mixture-of-experts layer: as a block's feed-forward, or alone in any module."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from moecore.core.config import Config, check_instance_of_family
from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.core.torch_internals import active_transform_names, is_in_backward_pass
from moecore.nn.dispatch import Rows, SparsePlan, TokensAndPlan, single_expert_rows
from moecore.nn.experts.base import Experts, ExpertsModule, ZeroComputationExperts
from moecore.nn.kernels.grouped import ChosenKernels, ExportTracingFlag
from moecore.nn.layers.block import FeedForward
from moecore.nn.routers.base import CAUSAL_ROUTERS, Router

if TYPE_CHECKING:
    from moecore.nn.kernels.expert_parallel import ShardedExperts

FIELDS_MISSING_IN_TEXTS = frozenset({"patches", "teacher", "truth"})  # fields of RoutingContext
Blocks = Literal["every_2", "last_2", "all"] | tuple[int, ...]

TOKEN_ROUTERS = "noisy_top_k, top_k_softmax, expert_choice, soft_slots, or hash with by: position"


class MoESettings(Config):
    """Settings of a model's MoE layers: router, experts, and the blocks that have them."""

    router: Router
    experts: Experts
    blocks: Blocks = Field(
        default="last_2", description="blocks with experts: every_2, last_2, all, or indices from 0"
    )

    @property
    def active_share(self) -> float:
        """Share of the experts that a token uses."""
        return self.scaled_router.active(self.experts.choices) / self.experts.choices

    @property
    def scaled_router(self) -> Router:
        return scale_k_to_pieces(self.router, self.experts)

    def build(self, width: int) -> "MoEFeedForward":
        return build_moe_feed_forward(self.router, self.experts, width)

    def check_for_text(self, key: str = "router", causal: bool = True, truth: bool = False) -> None:
        """Raise UserError if the router reads what text lacks (patches) or, if causal, ahead."""
        # truth: the kinds of this text's tokens are known, as in the source ciphers.
        truth_fields = frozenset({"truth"} if truth else ())
        if lacking := sorted(self.router.wants & FIELDS_MISSING_IN_TEXTS - truth_fields):
            raise UserError.at(
                f"{key}.kind",
                found=f"{self.router.kind}, which reads {', '.join(lacking)}; this text has none",
                allowed=CAUSAL_ROUTERS,
            )
        if causal:
            self.router.check_causal(key)

    def indices(self, depth: int) -> tuple[int, ...]:
        """Return the indices of the blocks with experts in a model of ``depth`` blocks."""
        return sparse_block_indices(self.blocks, depth)


OptionalMoE = MoESettings | None  # None: a dense model


def sparse_block_indices(blocks: Blocks, depth: int) -> tuple[int, ...]:
    if blocks == "all":
        return tuple(range(depth))
    odd = tuple(range(1, depth, 2))
    # the papers' even blocks, counted from 1
    if blocks == "every_2" and odd:
        return odd
    if blocks == "last_2" and len(odd) >= 2:
        return odd[-2:]
    if isinstance(blocks, str):
        raise UserError.at(
            "blocks",
            found=f"{blocks}, but a model of {depth} blocks has only {len(odd)} odd indices",
            allowed="a list of blocks",
        )
    chosen = tuple(sorted(set(blocks)))
    if not chosen or len(chosen) != len(blocks) or chosen[0] < 0 or chosen[-1] >= depth:
        allowed = f"one or more different of {depth} blocks, from 0"
        raise UserError.at("blocks", found=list(blocks), allowed=allowed)
    return chosen


class MoEFeedForward(FeedForward):
    """``layer(tokens, context)`` with tokens (B, T, d) returns (tokens, (RoutingRecord,))."""

    def __init__(
        self,
        router: nn.Module,
        experts: ExpertsModule,
        wants: frozenset[str] = frozenset(),  # fields of RoutingContext that the router reads
        provided: frozenset[str] = frozenset(),  # fields that experts provide
        shared: ExpertsModule | None = None,  # an expert for every token, weight 1
        zero_computation: ZeroComputationExperts | None = None,  # the router's last choices
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.zero_computation = zero_computation
        self.wants = wants
        self.shares_basis = "basis" in wants & provided
        # replaces ``experts`` if they are sharded over ranks
        self.sharded_experts: ShardedExperts | None = None

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> tuple[Tensor, tuple[RoutingRecord]]:
        experts = self.experts if self.sharded_experts is None else self.sharded_experts
        if self.shares_basis:
            context = context._replace(basis=experts.lent_basis())
        if self.training and "outputs" in self.wants and not context.progress:
            # compute all experts once, for the router and for the output
            dense_plan = SparsePlan.to_all(tokens.new_ones(*tokens.shape[:2], self.number))
            rows = experts(dense_plan.dispatch(tokens))
            context = context._replace(outputs=dense_plan.outputs_by_choice(rows))
            _, record = self.router(tokens, context)
            output = dense_plan._replace(weights=record.combine).combine(rows)
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
        self, experts: Callable[[Any], Tensor], tokens: Tensor, plan: Any, record: RoutingRecord
    ) -> Tensor:
        """Return the experts' weighted outputs (B, T, d) for tokens (B, T, d), by the plan."""
        if ExportTracingFlag.is_on and getattr(plan, "is_per_token", False):
            # exported: every expert computes every token, weighted as the record says
            number = self.number
            values = tokens.flatten(0, 1)
            ends = torch.arange(1, number + 1, dtype=torch.int32, device=tokens.device)
            outputs = experts(Rows(values.repeat(number, 1), ends * len(values)))
            weights = record.combine[..., :number].movedim(-1, 0).unsqueeze(-1)
            return (outputs.view(number, *tokens.shape) * weights).sum(dim=0)
        plan = self.plan_without_zero_computation(plan)
        if can_fuse_else_print_why(experts, tokens, plan):
            return experts(TokensAndPlan(tokens, plan))
        rows = plan.dispatch(tokens)
        if rows.shares is None:
            return plan.combine(experts(rows))
        assert isinstance(experts, nn.Module)  # check_expert_parallel refuses others
        merged = {  # the one expert of each group
            name: torch.tensordot(rows.shares.to(parameter.dtype), parameter, dims=1)
            for name, parameter in experts.named_parameters()
        }
        return plan.combine(functional_call(experts, merged, (rows,)))

    def plan_without_zero_computation(self, plan: Any) -> Any:
        """Return the plan without the choices of experts that have no network (MoE++)."""
        if self.zero_computation is None:
            return plan
        return plan.keep_experts(self.number)

    @property
    def number(self) -> int:
        """Number of networks that the router chooses among."""
        return len(next(self.experts.parameters()))


def can_fuse_else_print_why(experts: Any, tokens: Tensor, plan: Any) -> bool:
    """Return whether ``ChosenKernels`` compute these experts; print once why they do not."""
    if ChosenKernels.compute is None or tokens.device.type != ChosenKernels.device:
        return False
    is_covered = (
        getattr(experts, "can_fuse", False)
        and isinstance(plan, SparsePlan)
        and tokens.dtype != torch.float64
        and not active_transform_names()
    )
    if not is_covered and not torch.compiler.is_compiling():
        print_once(
            f"MOECORE_KERNELS: torch computes {type(experts).__name__} by {type(plan).__name__}; "
            "Triton covers mlp experts (gelu, swiglu; no dropout, no fp64) that tokens choose"
        )
    return is_covered and len(plan.tokens) > 0


@cache
def print_once(line: str) -> None:
    print(line, file=sys.stderr)


@torch.no_grad()
def update_routers(
    model: nn.Module,
    records: Sequence[RoutingRecord] | Sequence[Sequence[RoutingRecord]],
    progress: float = 0.0,
) -> None:
    """End a training step: routers with a balance (bias, quantile) learn from its ``records``.

    Call it once after each optimizer step, on every rank.

    Args:
        model: the model or a module with MoE layers.
        records: the step's records, one per MoE layer, in the layers' order (for a foreign model as
            ``trace`` collects them); with gradient accumulation a list of these, one per pass.
        progress: share of the training that is done.

    Raises:
        UserError: if the numbers of records and layers differ.
    """
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    is_one = not records or isinstance(records[0], RoutingRecord)
    passes: Sequence[Any] = [records] if is_one else records
    if wrong := [len(part) for part in passes if len(part) != len(layers)]:
        raise UserError.at(
            "records",
            found=f"{wrong[0]} for {len(layers)} MoE layers",
            allowed="the records of one forward pass, or a list of these",
        )
    step = passes[0] if len(passes) == 1 else list(map(_join_records, zip(*passes, strict=True)))
    for place, layer in enumerate(layers):
        after_step = getattr(layer.router, "after_step", None)
        if after_step is not None:
            after_step(step, place, progress)


def _join_records(records: Sequence[RoutingRecord]) -> RoutingRecord:
    """Return a layer's records (B, T, E), whose B and T may differ, as one (1, all B·T, E)."""
    fields = zip(*(record[:5] for record in records), strict=True)
    return RoutingRecord(*(torch.cat([row.flatten(0, 1) for row in each])[None] for each in fields))


def scale_k_to_pieces(router: Router, experts: Experts) -> Router:
    """Convert k to pieces if ``fine`` splits experts; UserError without a k, or for a k below 1."""
    fine = getattr(experts, "fine", None)
    if fine is None:
        return router
    k = getattr(router, "k", None)
    if k is None:
        raise UserError.at(
            "experts.fine",
            found=f"{fine}, but the router {router.kind} has no k to scale",
            allowed="null",
        )
    if (chosen := experts.scale_k(k)) < 1:
        raise UserError.at(
            "router.k",
            found=f"{k}, so {k * fine} pieces, {k * fine - chosen} of them shared",
            allowed="more, or fewer experts.shared",
        )
    return router.with_k(chosen)


def build_moe_feed_forward(router: Router, experts: Experts, width: int) -> MoEFeedForward:
    for name, none in (("dropout", "0"), ("zero_computation", "null")):
        if (value := getattr(experts, name, None)) and not router.chooses_per_token:
            raise UserError.at(
                f"experts.{name}",
                found=f"{value}, but with the router {router.kind} tokens do not choose experts",
                allowed=none,
            )
    if experts.choices > experts.networks and "outputs" in router.wants:
        raise UserError.at(
            "experts.zero_computation",
            found=f"some, with the router {router.kind}, which compares outputs of networks",
            allowed="null",
        )
    module = experts.build(width)
    routing = scale_k_to_pieces(router, experts).build(width, experts.choices, module.lent_basis())
    additional = experts.build_shared(width), experts.build_zero_computation(width)
    return MoEFeedForward(routing, module, router.wants, experts.provides, *additional)


def build_feed_forwards(
    moe: MoESettings | None, width: int, depth: int, build_dense: Callable[[], FeedForward]
) -> list[FeedForward]:
    if moe is None:
        return [build_dense() for _ in range(depth)]
    sparse = moe.indices(depth)
    return [moe.build(width) if index in sparse else build_dense() for index in range(depth)]


class MoELayer(nn.Module):
    """A mixture-of-experts layer for any module: ``layer(tokens)`` returns tokens of equal shape.

    tokens: (N, d), (B, T, d) or (B, H, W, d), floating point. ``trace`` collects its records, with
    fields (B, T, E); T = H·W for a grid and B = 1 for (N, d). Of torch.func, ``functional_call``,
    ``grad``, ``vjp`` and ``jacrev`` work.
    """

    def __init__(self, width: int, router: Router, experts: Experts) -> None:
        """Build a layer.

        Args:
            width: d of the tokens.
            router: settings of a router that reads only tokens.
            experts: settings of the experts.

        Raises:
            UserError: for a router that reads more than tokens, or whose loss does, and for
                arguments of other types.
        """
        super().__init__()
        if not isinstance(width, Integral) or width < 1:
            raise UserError.at("width", found=repr(width), allowed="a whole number of 1 or more")
        check_instance_of_family("router", router, Router, "moecore.routers.NoisyTopK(k=2)")
        check_instance_of_family("experts", experts, Experts, "moecore.experts.Mlp(number=8)")
        lacking = sorted(router.wants - experts.provides)
        if router.phase(0.0) != router.phase(1.0):
            lacking.append("the training's progress")
        reads = None
        if lacking:
            reads = f"which reads {', '.join(lacking)}; a single layer has none"
        elif router.own_loss is not None:
            reads = f"whose loss {router.own_loss} reads more than records"
        if reads is not None:
            raise UserError.at("router", found=f"{router.kind}, {reads}", allowed=TOKEN_ROUTERS)
        self.width = width
        self.feed_forward = build_moe_feed_forward(router, experts, width)
        k = getattr(scale_k_to_pieces(router, experts), "k", None)
        choice = "" if k is None else f", k={k}"
        self.description = f"width={width}, router={router.kind}{choice}, experts={experts.choices}"
        self.records: list[RoutingRecord] | None = None  # a list inside ``trace`` only

    if TYPE_CHECKING:

        def __call__(self, tokens: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        return self.description

    def forward(self, tokens: Tensor) -> Tensor:
        if not isinstance(tokens, Tensor):
            raise UserError.at("tokens", found=type(tokens).__name__, allowed="torch.Tensor")
        if tokens.ndim < 2 or tokens.shape[-1] != self.width or not tokens.is_floating_point():
            shapes = f"(N, {self.width}), (B, T, {self.width}) or (B, H, W, {self.width})"
            raise UserError.at(
                "tokens",
                found=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
                allowed=f"floating point of shape {shapes}",
            )
        if refused := [name for name in active_transform_names() if name != "Grad"]:
            allowed = "functional_call, grad, vjp, jacrev, and a loop over items"
            raise UserError.at("MoELayer", found=f"{refused[0]} of torch.func", allowed=allowed)
        batch = 1 if tokens.ndim == 2 else len(tokens)
        output, (record,) = self.feed_forward(tokens.reshape(batch, -1, self.width))
        if self.records is not None and not is_in_backward_pass():
            self.records.append(record)
        return output.view(tokens.shape)
