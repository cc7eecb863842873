"""Cost of a forward pass, and the part of the routing (ERMoE, tables S2 and S4).

Routing is an MoE layer without its experts: router, dispatch and combination. Where a teacher
routes (``teacher_routed``), the whole teacher counts as routing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moecore.measure.forward_cost import Clock, time_calls
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import register_flop_formulas
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import eval_mode, model_device
from moecore.training.guide import Guide
from moecore.training.meter import measure_peak

WARM_UP = 3  # passes that are not timed, before the others

# number of a pass → images (B, C, H, W) in [0, 1], on the model's device
Images = Callable[[int], Tensor]


class WholeAndRoutingCost(NamedTuple):
    """Cost of a computation, and of the routing within it."""

    whole: float
    routing: float


class ForwardPassSegment(NamedTuple):
    """A part of a forward pass, with the marks at its start and end."""

    part: str  # "layer", "experts" or "teacher"
    start: Any
    end: Any
    padding: float  # share of the experts' rows that only pad


def whole_and_routing_flops(model: nn.Module, images: Tensor) -> WholeAndRoutingCost:
    """Return FLOPs per image in evaluation mode; a multiplication and an addition count as two.

    Matrix products (also grouped ones), convolutions and attention are counted; element-wise work
    is not (torch.utils.flop_counter). Padding rows of experts on CPU are subtracted: the count
    does not depend on the machine. images: (B, C, H, W) in [0, 1], on the model's device.
    """
    register_flop_formulas()
    counter = FlopCounterMode(display=False)
    with (
        eval_mode(model),
        torch.no_grad(),
        counter,
        record_spans(model, counter.get_total_flops) as spans,
    ):
        model(images)
    padding = sum(
        (span.end - span.start) * span.padding for span in spans if span.part == "experts"
    )
    routing = sum_routing_time(spans, lambda start, end: end - start)
    return WholeAndRoutingCost(
        (counter.get_total_flops() - padding) / len(images), routing / len(images)
    )


def pass_and_routing_times(
    model: nn.Module, images: Images, rounds: int, warm_up: int = 3
) -> list[WholeAndRoutingCost]:
    """Return seconds of ``rounds`` passes and their routing, after ``warm_up`` passes."""
    device = model_device(model)
    times = []
    clock = Clock(device)
    with eval_mode(model), torch.no_grad():
        for number in range(warm_up + rounds):
            pixels = images(number)
            clock.wait()
            with record_spans(model, clock.mark) as spans:
                start = clock.mark()
                model(pixels)
                end = clock.mark()
            clock.wait()
            times.append(
                WholeAndRoutingCost(
                    clock.seconds(start, end), sum_routing_time(spans, clock.seconds)
                )
            )
    return times[warm_up:]


def unwatched_times(model: nn.Module, images: Images, rounds: int) -> list[float]:
    """Return seconds of ``rounds`` passes without hooks, after WARM_UP passes."""
    with eval_mode(model), torch.no_grad():
        return time_calls(
            lambda number: model(images(number)), rounds, WARM_UP, model_device(model)
        )


def peak_memory_and_counting_method(model: nn.Module, images: Tensor) -> tuple[int, str]:
    """Return the peak bytes of a pass without gradients, weights included, and how counted."""
    tensors = (*model.parameters(), *model.buffers(), images)
    device = model_device(model)
    with eval_mode(model), torch.no_grad(), measure_peak(tensors, device) as peak:
        model(images)
    return peak.size, "CUDA allocator" if device.type == "cuda" else "live tensors"


def sum_routing_time(spans: list[ForwardPassSegment], length: Callable[[Any, Any], float]) -> float:
    """Return the sum of MoE layers − their experts + teacher."""
    sign = {"layer": 1, "experts": -1, "teacher": 1}
    return sum(sign[span.part] * length(span.start, span.end) for span in spans)


@contextmanager
def record_spans(model: nn.Module, mark: Callable[[], Any]) -> Iterator[list[ForwardPassSegment]]:
    """Record the spans of MoE layers, experts and a teacher in passes inside the ``with``."""
    spans: list[ForwardPassSegment] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Guide):
                _record_module(stack, module, "teacher", mark, spans, {})
            if isinstance(module, MoEFeedForward):
                _record_layer(stack, module, mark, spans)
        yield spans


def _record_layer(
    stack: ExitStack,
    layer: MoEFeedForward,
    mark: Callable[[], Any],
    spans: list[ForwardPassSegment],
) -> None:
    padding: dict[str, float] = {}

    def store_padding(router: nn.Module, inputs: tuple, output: tuple) -> None:
        padding["share"] = padding_share(layer.plan_networks(output[0]))

    stack.callback(layer.router.register_forward_hook(store_padding).remove)
    _record_module(stack, layer, "layer", mark, spans, {})
    _record_module(stack, layer.experts, "experts", mark, spans, padding)
    if layer.shared is not None:
        _record_module(stack, layer.shared, "experts", mark, spans, {})


def _record_module(
    stack: ExitStack,
    module: nn.Module,
    part: str,
    mark: Callable[[], Any],
    spans: list[ForwardPassSegment],
    padding: dict[str, float],
) -> None:
    """Record a module's spans; padding: its share, which the router's plan sets before the end."""
    starts: list[Any] = []
    stack.callback(module.register_forward_pre_hook(lambda *_: starts.append(mark())).remove)
    stack.callback(
        module.register_forward_hook(
            lambda *_: spans.append(
                ForwardPassSegment(part, starts.pop(), mark(), padding.get("share", 0.0))
            )
        ).remove
    )


def padding_share(plan: Any) -> float:
    """Return the share of a ``SparsePlan``'s rows that only pad; 0 for other or empty plans."""
    inner = getattr(plan, "plan", plan)
    if isinstance(inner, SparsePlan) and len(inner.order):
        computed = len(inner.rows) if inner.computed is None else int(inner.computed)
        return 1 - computed / len(inner.order)
    return 0.0
