"""What a forward pass costs, and which part of it the routing is (ERMoE, tables S2 and S4).

Routing is all of an MoE layer but its experts: the router, and the way of the tokens to the experts
and back. Where a teacher routes (``teacher_routed``), all of the teacher belongs to it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moecore.measure.clock import Clock, time_calls
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import register_flop_formulas
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import eval_mode, model_device
from moecore.training.guide import Guide
from moecore.training.meter import measure_peak, peak_counting_method

WARM_UP = 3  # passes before those that are timed

# number of a pass → images (B, C, H, W) in [0, 1], on the model's device
Images = Callable[[int], Tensor]


class WholeAndRoutingCost(NamedTuple):
    """Of all of a computation, and of the routing within it."""

    whole: float
    routing: float


class ForwardPassSegment(NamedTuple):
    """A part of a forward pass: where it starts and ends, as ``record_spans`` was told to look."""

    part: str  # "layer", "experts" or "teacher"
    start: Any
    end: Any
    padding: float  # share of the experts' rows that no token needs


def whole_and_routing_flops(model: nn.Module, images: Tensor) -> WholeAndRoutingCost:
    """FLOPs per image in evaluation mode; a multiplication and an addition count as two.

    images: (B, C, H, W) in [0, 1], on the model's device. Counted are products of matrices,
    convolutions and attention, the grouped product of the experts among them; sums, norms and other
    work on single elements are not, as torch.utils.flop_counter has it. Rows that only pad an
    expert's rows on CPU are taken off, so that the count is the model's and not the machine's.
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
    """Seconds of ``rounds`` forward passes and of the routing in them, after ``warm_up`` others."""
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
    """Return seconds of ``rounds`` forward passes, nothing watched, after WARM_UP others."""
    with eval_mode(model), torch.no_grad():
        return time_calls(
            lambda number: model(images(number)), rounds, WARM_UP, model_device(model)
        )


def peak_memory_and_counting_method(model: nn.Module, images: Tensor) -> tuple[int, str]:
    """The most bytes held during a forward pass without gradients, and how they were counted.

    images: (B, C, H, W).  Weights are included.
    """
    held = (*model.parameters(), *model.buffers(), images)
    device = model_device(model)
    with eval_mode(model), torch.no_grad(), measure_peak(held, device) as peak:
        model(images)
    return peak.size, peak_counting_method(device)


def sum_routing_time(spans: list[ForwardPassSegment], length: Callable[[Any, Any], float]) -> float:
    """All of the MoE layers but their experts, and the teacher where there is one."""
    sign = {"layer": 1, "experts": -1, "teacher": 1}
    return sum(sign[span.part] * length(span.start, span.end) for span in spans)


@contextmanager
def record_spans(model: nn.Module, mark: Callable[[], Any]) -> Iterator[list[ForwardPassSegment]]:
    """The spans of every MoE layer, its experts, and a teacher, in forward passes within.

    ``mark`` is read at both ends of each.
    """
    spans: list[ForwardPassSegment] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Guide):
                _record_module(stack, module, "teacher", mark, spans, {})
            if isinstance(module, MoEFeedForward):
                seen: dict[str, float] = {}
                stack.callback(
                    module.router.register_forward_hook(
                        lambda _, __, output, seen=seen, layer=module: seen.update(
                            padding=padding_share(layer.plan_networks(output[0]))
                        )
                    ).remove
                )
                _record_module(stack, module, "layer", mark, spans, {})
                _record_module(stack, module.experts, "experts", mark, spans, seen)
                if module.shared is not None:
                    _record_module(stack, module.shared, "experts", mark, spans, {})
        yield spans


def _record_module(
    stack: ExitStack,
    module: nn.Module,
    part: str,
    mark: Callable[[], Any],
    spans: list[ForwardPassSegment],
    seen: dict[str, float],
) -> None:
    """``seen``: what the router's plan said of its padding, known when the experts are done."""
    starts: list[Any] = []
    stack.callback(module.register_forward_pre_hook(lambda *_: starts.append(mark())).remove)
    stack.callback(
        module.register_forward_hook(
            lambda *_: spans.append(
                ForwardPassSegment(part, starts.pop(), mark(), seen.get("padding", 0.0))
            )
        ).remove
    )


def padding_share(plan: Any) -> float:
    """Share of a plan's rows that nobody reads (see ``SparsePlan``): those that only pad.

    Other plans than a SparsePlan have none, nor has one without rows: no token takes part.
    """
    inner = getattr(plan, "plan", plan)
    if isinstance(inner, SparsePlan) and len(inner.order):
        computed = len(inner.rows) if inner.computed is None else int(inner.computed)
        return 1 - computed / len(inner.order)
    return 0.0
