"""What a training sees of its own routing while it goes on; it decides nothing.

The meter sums on the device and reads at a logged point; here is what is said of it. Without torch,
as imports of histories are.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from moecore.core.config import Config

COLLAPSED = 0.1  # of an even share: all but the busiest experts together have less
BARS = "▁▂▃▄▅▆▇█"
NO_TOKEN = "·"
WIDEST = 72  # characters of the strip


class Monitor(Config):
    """How often a training looks at its routing; nothing that it learns depends on it."""

    every: int = Field(
        10, ge=1, description="steps between two whose routing is counted; told at logged points"
    )
    dead_after: int = Field(
        100, ge=1, description="steps without a token after which an expert is called dead"
    )


class LayerTotals(NamedTuple):
    """What the tokens of one MoE layer did between two logged points, in the steps counted."""

    counts: tuple[float, ...]  # of the tokens that chose each expert
    tokens: float
    entropies: float  # of the tokens' probs, in nats, summed
    margins: float  # summed
    with_margin: float  # tokens that have one: they chose some experts and not all

    @classmethod
    def of(cls, numbers: list[float]) -> "LayerTotals":
        """The totals of the meter's ``sum_layer_routing``."""
        return cls(tuple(numbers[:-4]), *numbers[-4:])


class LayerRouting(Config):
    """One MoE layer between two logged points."""

    load: tuple[float, ...]  # share of the choices of each expert; zeros where nobody chose
    max_violation: float | None  # MaxVio: largest load / mean load − 1; 0: even
    token_entropy: float  # of the probs, in nats, mean over tokens
    margin: float | None  # the k-th largest prob minus the next, mean over tokens
    idle: tuple[int, ...]  # steps since each expert was seen with a token
    dead: int  # experts that are idle for ``dead_after`` steps
    # what all but the k busiest have, for k experts a token, over an even share; None where k = E
    rest: float | None


class RoutingPoint(Config):
    """The routing between two logged points; layers by their names."""

    step: int
    layers: dict[str, LayerRouting]
    agreement: float | None = None  # tokens of the same first expert at the end of the last epoch
    warnings: tuple[str, ...] = ()

    def curve_values(self) -> dict[str, float | None]:
        """Return one number for each curve: of every layer, and the agreement."""
        values: dict[str, float | None] = {"agreement with last epoch": self.agreement}
        for name, layer in self.layers.items():
            for quantity in ("max_violation", "dead", "token_entropy", "margin"):
                values[f"{quantity} of {name}"] = getattr(layer, quantity)
        return values


def build_routing_point(
    step: int,
    totals: Mapping[str, LayerTotals],
    before: RoutingPoint | None,
    settings: Monitor,
    agreement: float | None = None,
) -> RoutingPoint:
    """Return what is told after ``step`` steps; before: what was told last, None at the start.

    A function of its arguments alone, so a training that is resumed tells the same.
    """
    layers, warnings = {}, []
    for name, layer in totals.items():
        last = before.layers[name] if before is not None else None
        passed = step - (before.step if before is not None else 0)
        layers[name] = _layer_routing(layer, last, passed, settings.dead_after)
        lines = _warnings(layers[name], last, settings.dead_after)
        warnings += [f"step {step}: {name}: {line}" for line in lines]
    return RoutingPoint(step=step, layers=layers, agreement=agreement, warnings=warnings)


def _layer_routing(
    totals: LayerTotals, last: LayerRouting | None, passed: int, dead_after: int
) -> LayerRouting:
    counts, choices = totals.counts, sum(totals.counts)
    earlier = last.idle if last is not None else (0,) * len(counts)
    idle = [0 if count else steps + passed for count, steps in zip(counts, earlier, strict=True)]
    load = [count / choices if choices else 0.0 for count in counts]
    margin = totals.margins / totals.with_margin if totals.with_margin else None
    others = sorted(load)[: -max(1, round(choices / totals.tokens))]
    return LayerRouting(
        load=load,
        max_violation=max(load) * len(load) - 1 if choices else None,
        token_entropy=totals.entropies / totals.tokens,
        margin=margin,
        idle=idle,
        dead=sum(steps >= dead_after for steps in idle),
        rest=sum(others) * len(load) / len(others) if others else None,
    )


def _warnings(layer: LayerRouting, last: LayerRouting | None, dead_after: int) -> list[str]:
    """What is new since the point before: experts that died, a load that collapsed."""
    earlier = last.idle if last is not None else (0,) * len(layer.idle)
    died = [
        str(expert)
        for expert, (now, then) in enumerate(zip(layer.idle, earlier, strict=True))
        if then < dead_after <= now
    ]
    lines = []
    if died:
        listed = f"expert{'s'[: len(died) - 1]} {', '.join(died)}"
        lines.append(f"{listed} had no token for {dead_after} steps")
    if _is_collapsed(layer) and not _is_collapsed(last):
        share = f"{layer.rest:.0%} of an even share"
        lines.append(f"the load collapsed, all but the busiest experts have {share}")
    return lines


def _is_collapsed(layer: LayerRouting | None) -> bool:
    return layer is not None and layer.rest is not None and layer.rest < COLLAPSED


def describe_point(point: RoutingPoint) -> str:
    """Return a line on the most uneven layer, and a strip with a bar for every expert of each.

    A bar of half the height is an even load; a dot is an expert without a token.
    """
    name, layer = max(point.layers.items(), key=lambda one: one[1].max_violation or 0)
    words = [f"{label} {value:.3g}" for label, value in _numbers(layer) if value is not None]
    if point.agreement is not None:
        words.append(f"agreement with the last epoch {point.agreement:.3g}")
    dead = sum(one.dead for one in point.layers.values())
    strips = " ".join(_strip(one.load) for one in point.layers.values())
    return f"{name}: {', '.join(words)}; dead {dead}  {strips[:WIDEST]}"


def _numbers(layer: LayerRouting) -> list[tuple[str, float | None]]:
    entropy = ("entropy", layer.token_entropy)
    return [("MaxVio", layer.max_violation), entropy, ("margin", layer.margin)]


def _strip(load: tuple[float, ...]) -> str:
    heights = [min(len(BARS), max(1, round(4 * share * len(load)))) for share in load]
    bars = zip(load, heights, strict=True)
    return "".join(BARS[height - 1] if share else NO_TOKEN for share, height in bars)
