"""What the pictures of routing show, in a line each."""

from collections.abc import Mapping

import numpy as np

from moecore.measure.routing import Result
from moecore.measure.routing_metrics.overlays import grid_of
from moecore.report.column import title_of
from moecore.report.words import signed
from moecore.tasks.base import Score
from moecore.training.outcome import Outcome


def neighbours(first: Mapping[str, Result]) -> str:
    """How often patches that lie side by side have the same expert in the last layer.

    first: method → the result whose patches are shown; "" where none are.
    """
    shares = {}
    for method, result in first.items():
        layers = result.overlays.grids
        same = [row[:, 1:] == row[:, :-1] for row in map(grid_of, layers[-1] if layers else ())]
        pairs = [one for one in same if one.size]
        if pairs:
            shares[method] = float(np.mean([one.mean() for one in pairs]))
    if not shares:
        return ""
    return f"patches side by side share their expert in {ends_of(shares)} of the pairs"


def ends_of(values: Mapping[str, float]) -> str:
    """40 % (prc) to 61 % (moge)."""
    least = min(values, key=values.__getitem__)
    most = max(values, key=values.__getitem__)
    return " to ".join(f"{100 * values[one]:.0f} % ({one})" for one in dict.fromkeys((least, most)))


def swept_most(scores: Mapping[str, Mapping[float, float]], score: Score) -> str:
    """How far the score moves where fewer or more experts see a token; scores: method → k → it."""
    moved = {
        method: max(found.values()) - min(found.values())
        for method, found in scores.items()
        if len(found) > 1
    }
    if not moved:
        return ""
    most = max(moved, key=moved.__getitem__)
    by = signed(moved[most], score.form).strip("+±")
    tried = list(scores[most])
    return f"{title_of(score)} moves by up to {by} ({most}) from k = {tried[0]:g} to {tried[-1]:g}"


def preferred(first: Mapping[str, Outcome]) -> str:
    """The class and the expert that belong together most, in the last MoE layer and epoch."""
    most = (0.0, "")
    for method, result in first.items():
        if not result.class_maps:
            continue
        last = list(result.class_maps.values())[-1]
        maps = np.array([layers[-1] for layers in last], dtype=float)  # (classes, experts)
        if not np.isfinite(maps).any():
            continue
        label, expert = np.unravel_index(np.nanargmax(maps), maps.shape)
        share = float(maps[label, expert])
        words = f"{result.task.classes[label]} for expert {expert} of {method}"
        most = max(most, (share, words))
    if not most[1]:
        return ""
    return (
        f"the strongest preference is that of {most[1]} ({100 * most[0]:.0f} % of its probability)"
    )
