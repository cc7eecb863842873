"""The Lipschitz estimate of a trained model, and Lemma 1 on its layers."""

from functools import partial

from matplotlib.figure import Figure

from moecore.measure.lipschitz import LemmaPoints, Result
from moecore.report.column import Column
from moecore.report.figures.drawing import (
    INK,
    PALETTE,
    add_legend_below,
    empty_figure,
    styled_drawing,
)
from moecore.report.measures.result_display import Figures, Shown

slope_column = partial(Column, better="lower", paper="adversarial")
COLUMNS = (
    slope_column(
        "lipschitz_local_mean",
        "Local Lipschitz",
        lambda result: result.local_mean,
        note="spectral norm of the gradient image → logits, mean over images",
    ),
    slope_column(
        "lipschitz_margin_mean",
        "Slope of the margin",
        lambda result: result.margin_mean,
        note="how fast an ℓ∞ attack can change the margin between two classes, mean over images",
    ),
    slope_column(
        "lipschitz_lower_bound_mean",
        "Lipschitz, at least",
        lambda result: result.lower_bound_mean,
        note="steepest pair of images that was found around an image; mean over images",
    ),
    slope_column(
        "lipschitz_lower_bound",
        "Lipschitz, at least (largest)",
        lambda result: result.lower_bound,
        note="of all images",
    ),
    Column(
        "lemma1_router_share",
        "Lemma 1, router",
        lambda result: result.lemma1.router_share,
        form="share",
        note="share of the bound that the router's term makes up, mean over layers",
        paper="adversarial",
        detail=True,
    ),
    Column(
        "lemma1_violations",
        "Lemma 1, violated",
        lambda result: result.lemma1.violations,
        form="count",
        note="tokens; none is expected",
        paper="adversarial",
        detail=True,
    ),
)


def figures(result: Result) -> Figures:
    """Lemma 1 at real tokens, where the model has layers that it speaks of."""
    if result.lemma_terms:
        yield "lemma1", draw_lemma_terms(result.lemma_terms)


@styled_drawing
def draw_lemma_terms(layers: tuple[LemmaPoints, ...]) -> Figure:
    """One point per token and MoE layer: the bound against what it bounds, and the router's term.

    In the upper panel all points lie on or below the diagonal.
    """
    figure = empty_figure(4.8, 5.6, "One point per token.")
    panels = figure.subplots(2, 1, sharex=True)
    highest = max(max(layer.bound) for layer in layers)
    for axes, name in zip(panels, ("‖∇f(x)‖₂", "router term of the bound"), strict=True):
        ends = [0, highest]
        axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=":", label="the bound")
        axes.set_ylabel(name)
    for index, layer in enumerate(layers):
        look = {"s": 9, "alpha": 0.6, "color": PALETTE[index % 7], "label": f"MoE {index + 1}"}
        panels[0].scatter(layer.bound, layer.jacobian, **look)
        panels[1].scatter(layer.bound, layer.router, **look)
    for axes in panels:
        axes.set(xlim=(0, None), ylim=(0, None))
    panels[0].set_title("Lemma 1 at real tokens")
    panels[1].set_xlabel("Lemma 1's bound")
    add_legend_below(figure, panels[0])
    return figure


SHOWN = Shown("lipschitz", "a Lipschitz estimate", Result, COLUMNS, figures, place=13)
