"""Lemma 1 at real tokens, for models with layers that it applies to."""

from moecore.measure.values import Found
from moecore.report.figures import drawing
from moecore.report.results import Figures, Pictures


def figures(result: Found) -> Figures:
    if layers := result.facts.get("lemma_terms"):
        yield "lemma1", draw_lemma_terms(layers)


@drawing.styled_drawing
def draw_lemma_terms(layers: list[dict[str, list[float]]]) -> drawing.Figure:
    """Plot ‖∇f(x)‖₂ and the router's term against lemma 1's bound, a point per token and layer."""
    # If the lemma holds, all points of the upper panel lie on or below the diagonal.
    figure = drawing.empty_figure(4.8, 5.6, "One point per token.")
    panels = figure.subplots(2, 1, sharex=True)
    highest = max(max(layer["bound"]) for layer in layers)
    for axes, name in zip(panels, ("‖∇f(x)‖₂", "router term of the bound"), strict=True):
        ends = [0, highest]
        axes.plot(ends, ends, color=drawing.INK, linewidth=0.9, linestyle=":", label="the bound")
        axes.set_ylabel(name)
    for index, layer in enumerate(layers):
        colour = drawing.PALETTE[index % 7]
        style = {"s": 9, "alpha": 0.6, "color": colour, "label": f"MoE {index + 1}"}
        panels[0].scatter(layer["bound"], layer["jacobian"], **style)
        panels[1].scatter(layer["bound"], layer["router"], **style)
    for axes in panels:
        axes.set(xlim=(0, None), ylim=(0, None))
    panels[0].set_title("Lemma 1 at real tokens")
    panels[1].set_xlabel("Lemma 1's bound")
    drawing.add_legend_below(figure, panels[0])
    return figure


PICTURES = Pictures("lipschitz", figures)
