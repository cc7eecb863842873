"""Mean routing of each class (MoGE, figure 2)."""

from moecore.measure.values import Found
from moecore.report.figures.model_figures import draw_expert_grids_by_class
from moecore.report.results import Figures, Pictures


def figures(result: Found) -> Figures:
    """Yield a picture of each class's mean routing on the experts' grid, a row per MoE layer."""
    by_layer = enumerate(zip(*result.facts["class_maps"], strict=True), 1)
    if rows := {f"MoE {layer}": maps for layer, maps in by_layer}:
        yield "class_maps", draw_expert_grids_by_class(rows, result.facts["classes"])


PICTURES = Pictures("invariance", figures)
