"""Routing statistics at the logged points of a training, and warnings; imports no torch."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from moecore.core.config import Config

MAX_COLLAPSED_LOAD = 0.1  # below this ``LayerStatistics.rest`` a layer has collapsed
BARS = "▁▂▃▄▅▆▇█"
NO_TOKEN = "·"
MAX_STRIP_WIDTH = 72  # characters


class MonitorSettings(Config):
    """How often the routing is counted in training; it does not change what is learned."""

    every: int = Field(10, ge=1, description="count routing each n-th step; shown at logged points")
    dead_after: int = Field(100, ge=1, description="steps without a token until an expert is dead")


class LayerTotals(NamedTuple):
    """Sums over the tokens of one MoE layer, in the counted steps since the last logged point."""

    counts: tuple[float, ...]  # per expert, tokens that chose it
    tokens: float
    entropies: float  # of the tokens' probs, in nats
    margins: float  # see ``LayerStatistics.margin``
    with_margin: float  # number of tokens that chose some experts but not all, so have a margin

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "LayerTotals":
        """Build the totals from the numbers (E + 4,) that ``sum_layer_routing`` returns."""
        return cls(tuple(numbers[:-4]), *numbers[-4:])


class LayerStatistics(Config):
    """Load, entropy, margin and idle experts of one MoE layer between two logged points."""

    load: tuple[float, ...]  # share of the choices per expert; zeros if no token chose
    max_violation: float | None  # MaxVio: largest load / mean load − 1; 0: even
    token_entropy: float  # of the probs, in nats, mean over tokens
    margin: float | None  # the k-th largest prob minus the next, mean over tokens
    idle: tuple[int, ...]  # per expert, steps since it last had a token
    dead: int  # number of experts that are idle for ``dead_after`` steps
    # mean load of all experts but the k busiest, over an even share; None for k = E
    rest: float | None


class RoutingPoint(Config):
    """Statistics of the routing between two logged points, by name of the MoE layer."""

    step: int
    layers: dict[str, LayerStatistics]
    agreement: float | None = None  # share of tokens with the same first expert one epoch ago
    warnings: tuple[str, ...] = ()

    def curve_values(self) -> dict[str, float | None]:
        """Return curve → value: max_violation, dead, token_entropy, margin by layer; agreement."""
        values: dict[str, float | None] = {"agreement with last epoch": self.agreement}
        for name, layer in self.layers.items():
            for quantity in ("max_violation", "dead", "token_entropy", "margin"):
                values[f"{quantity} of {name}"] = getattr(layer, quantity)
        return values


def build_routing_point(
    step: int,
    totals: Mapping[str, LayerTotals],
    before: RoutingPoint | None,
    settings: MonitorSettings,
    agreement: float | None = None,
) -> RoutingPoint:
    """Compute the statistics and warnings since ``before``, the previous point, if any."""
    layers = {}
    warnings = []
    steps = step if before is None else step - before.step
    for name, layer in totals.items():
        last = None if before is None else before.layers[name]
        layers[name] = _layer_statistics(layer, last, steps, settings.dead_after)
        lines = _find_warnings(layers[name], last, settings.dead_after)
        warnings += [f"step {step}: {name}: {line}" for line in lines]
    return RoutingPoint(step=step, layers=layers, agreement=agreement, warnings=warnings)


def _layer_statistics(
    totals: LayerTotals, last: LayerStatistics | None, steps: int, dead_after: int
) -> LayerStatistics:
    counts = totals.counts
    choices = sum(totals.counts)
    idle_before = [0] * len(counts) if last is None else last.idle
    idle = [0 if count else idle_before[expert] + steps for expert, count in enumerate(counts)]
    load = [count / choices if choices else 0.0 for count in counts]
    margin = totals.margins / totals.with_margin if totals.with_margin else None
    less_busy = sorted(load)[: -max(1, round(choices / totals.tokens))]
    return LayerStatistics(
        load=load,
        max_violation=max(load) * len(load) - 1 if choices else None,
        token_entropy=totals.entropies / totals.tokens,
        margin=margin,
        idle=idle,
        dead=sum(idle_steps >= dead_after for idle_steps in idle),
        rest=sum(less_busy) * len(load) / len(less_busy) if less_busy else None,
    )


def _find_warnings(
    layer: LayerStatistics, last: LayerStatistics | None, dead_after: int
) -> list[str]:
    """Return warnings new since ``last``: experts idle for ``dead_after`` steps, collapsed load."""
    idle_before = [0] * len(layer.idle) if last is None else last.idle
    died = [str(e) for e, steps in enumerate(layer.idle) if idle_before[e] < dead_after <= steps]
    lines = []
    if died:
        noun = "expert" if len(died) == 1 else "experts"
        lines.append(f"{noun} {', '.join(died)} had no token for {dead_after} steps")
    if _is_collapsed(layer) and not _is_collapsed(last):
        share = f"{layer.rest:.0%} of an even share"
        lines.append(f"the load collapsed, all but the busiest experts have {share}")
    return lines


def _is_collapsed(layer: LayerStatistics | None) -> bool:
    return layer is not None and layer.rest is not None and layer.rest < MAX_COLLAPSED_LOAD


def format_routing_point(point: RoutingPoint) -> str:
    """Format the most uneven layer as one line, with a bar per expert (half height: even load)."""
    name = max(point.layers, key=lambda name: point.layers[name].max_violation or 0)
    uneven = point.layers[name]
    values = {
        "MaxVio": uneven.max_violation,
        "entropy": uneven.token_entropy,
        "margin": uneven.margin,
        "agreement with the last epoch": point.agreement,
    }
    texts = [f"{label} {value:.3g}" for label, value in values.items() if value is not None]
    dead = sum(layer.dead for layer in point.layers.values())
    strips = []
    for load in (layer.load for layer in point.layers.values()):
        heights = [min(len(BARS), max(1, round(4 * share * len(load)))) for share in load]
        bars = zip(load, heights, strict=True)
        strips.append("".join(BARS[height - 1] if share else NO_TOKEN for share, height in bars))
    return f"{name}: {', '.join(texts)}; dead {dead}  {' '.join(strips)[:MAX_STRIP_WIDTH]}"
