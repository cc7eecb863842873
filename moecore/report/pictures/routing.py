"""Load of experts, experts of patches, and step time over the number of experts per token."""

from collections.abc import Iterator, Mapping

import numpy as np

from moecore.measure.cost import Cost
from moecore.measure.exploring import expert_gallery
from moecore.measure.routing import Routing
from moecore.measure.values import Chart, Found
from moecore.report import results
from moecore.report.figures import model_figures
from moecore.report.figures.charts import ChartSpec
from moecore.report.page.page_objects import Block, Picture
from moecore.report.study_results import Phase

AXES = ("teacher_agreement_layer", "layer", "Agreement with the teacher", "MoE layer", "Tokens")
TEACHER = Chart(*AXES, share=True, top=1.02, height=3.2)
TEACHER = TEACHER._replace(words="Tokens whose first expert is the teacher's (TGR, table 7).")


def figures(result: Found) -> results.Figures:
    if result.facts["load"]:
        yield "expert_load", model_figures.expert_load(result.facts["load"])
    overlays = expert_gallery.Overlays.model_validate(result.facts["overlays"])
    if overlays.shape[0] and overlays.grids:
        layers = {
            f"MoE {number}": (map(expert_gallery.parse_expert_grid, layer), overlays.experts)
            for number, layer in enumerate(overlays.grids, 1)
        }
        figure = model_figures.draw_experts_of_patches(overlays.images(), layers, "Experts")
        yield "expert_overlays", figure


def top_blocks(phase: Phase) -> Iterator[Block]:
    """Yield blocks: experts' load, experts of patches, matched crops, agreement with a teacher."""
    by_name = results.pictures_by_name(phase, Routing, figures)
    yield Block("Load of the experts", pictures=by_name["expert_load"], about="load_cv2")
    measured = phase.first(Routing)
    finding = describe_adjacent_patches(measured)
    patches = by_name["expert_overlays"]
    yield Block("Which expert sees which patch", pictures=patches, finding=finding)
    crops = []
    first = next(iter(measured.values()), None)  # the crops are the same for every method
    if first is not None and first.facts["corresponding"]:
        pair = expert_gallery.MatchedCrops.model_validate(first.facts["corresponding"])
        figure = model_figures.draw_patch_correspondence(pair)
        label = f"{phase.name}: corresponding patches"
        crops.append(Picture(figure, label, getattr(figure, "caption", "")))
    yield Block("Corresponding patches", pictures=crops, about="match_top1")
    pictures = results.draw_chart(phase, Routing, TEACHER)
    yield Block("Agreement with the teacher by layer", pictures=pictures, about="teacher_agreement")


def describe_adjacent_patches(first: Mapping[str, Found]) -> str:
    """Return a phrase: how often adjacent patches share an expert of the last layer; or ""."""
    shares = {}
    for method, result in first.items():
        grids = result.facts["overlays"]["grids"][-1:]
        rows = [expert_gallery.parse_expert_grid(image) for layer in grids for image in layer]
        same = [(row[:, 1:] == row[:, :-1]).mean() for row in rows if row.shape[1] > 1]
        if same:
            shares[method] = float(np.mean(same))
    if not shares:
        return ""
    lowest = min(shares, key=shares.__getitem__)
    highest = max(shares, key=shares.__getitem__)
    ends = [f"{100 * shares[name]:.0f} % ({name})" for name in dict.fromkeys((lowest, highest))]
    return f"patches side by side share their expert in {' to '.join(ends)} of the pairs"


def step_times(phase: Phase) -> Iterator[Block]:
    label = "Time of a batch / that of k = 1"
    spec = ChartSpec("Step time over k", "Experts per token k", label, height=3.2)
    caption = "Forward passes on this machine (ERMoE, figure S5)."

    def relative_to_top_1(result: Found) -> dict[float, float]:
        times = result.curve("batch_ms", "k")
        if 1 in times:
            return {k: time / times[1] for k, time in times.items()}
        return {}

    pictures = results.draw_method_curves(phase, Cost, relative_to_top_1, spec, caption)
    yield Block("Step time over k", pictures=pictures)


PICTURES = results.Pictures("routing", figures, is_on_page=False, above=top_blocks, more=step_times)
