"""Pictures of a trace of images: the patches of every expert, and the experts of every patch.

N items, T tokens of a layer, E experts.
"""

from collections.abc import Iterator

import torch
from matplotlib.figure import Figure

from moecore.data.prepared import evenly_spaced_indices
from moecore.lens.analyses import record_of_layer
from moecore.lens.traces import Trace
from moecore.measure.exploring.expert_gallery import ExpertUseByImage, expert_use_by_image
from moecore.measure.exploring.expert_overlay_data import patch_crop
from moecore.report.figures.drawing import expert_colours
from moecore.report.figures.expert_figures import patch_experts_tile
from moecore.report.figures.sheets import SheetLabels, Tile, displayable_image, sheet

PATCHES = 8  # of an expert
ROWS = 16  # experts of a layer, those that are used most
IMAGES = 6  # that are shown with the experts of their patches
EXAMINED = 2000  # items among which an expert's patches are looked for
SQUARE = 1.35  # inches of an image
CROP = 0.75  # inches of a patch
CAPTION = (
    "Of each of the most used experts those patches, one an image, to which the router gave the "
    "highest probability; each in the middle of what is around it."
)


def draw_trace_pictures(trace: Trace) -> Iterator[tuple[str, Figure]]:
    """Yield what a page shows of a trace with pictures, by name: a figure, then one a layer."""
    places = evenly_spaced_indices(trace.items, EXAMINED)
    pictures = trace.beside("pictures", places)
    if pictures is None:
        return
    yield "Experts of patches", draw_experts_of_patches(trace)
    for number, shape in enumerate(trace.card.layers):
        layout = shape.layout(pictures.shape[2:])
        record = record_of_layer(trace.layer(number, places))
        no_kinds = torch.zeros(*record.chosen.shape[:2], 0, dtype=torch.bool)
        use = expert_use_by_image(record, layout.special, no_kinds)
        most = use.chosen.sum(dim=0).argsort(descending=True, stable=True)[:ROWS].tolist()
        rows = {
            expert: [
                Tile(displayable_image(patch_crop(pictures[item], patch, layout).numpy()))
                for item, patch in patches
            ]
            for expert in sorted(most)
            if (patches := typical_patches(use, expert))
        }
        name = f"Patches of experts, layer {number + 1}"
        labels = SheetLabels(name, [f"Expert {expert}" for expert in rows], caption=CAPTION)
        yield name, sheet(list(rows.values()), labels, CROP, CROP)


def typical_patches(use: ExpertUseByImage, expert: int) -> list[tuple[int, int]]:
    """Return items and patches of the highest probability that chose the expert, one an item."""
    highest = use.highest[:, expert]
    order = highest.sort(descending=True, stable=True).indices[:PATCHES].tolist()
    return [(item, int(use.patch[item, expert])) for item in order if highest[item] >= 0]


def draw_experts_of_patches(trace: Trace) -> Figure:
    """Draw a few items, and below them the expert with most weight in each patch, a row a layer."""
    places = evenly_spaced_indices(trace.items, IMAGES)
    pictures = trace.beside("pictures", places)
    assert pictures is not None, "asked for where there are pictures"
    images = pictures.numpy()
    tiles = [[Tile(displayable_image(image)) for image in images]]
    for number, shape in enumerate(trace.card.layers):
        combine = trace.layer(number, places).combine[:, shape.special :]
        best = combine.argmax(dim=-1).where(combine.amax(dim=-1) > 0, -1)
        colours = expert_colours(shape.experts)
        grids = best.unflatten(1, shape.grid).numpy()
        tiles.append(
            [patch_experts_tile(*pair, colours) for pair in zip(images, grids, strict=True)]
        )
    names = ["Image", *(f"Layer {number}" for number in range(1, len(tiles)))]
    caption = "The expert with the largest weight in each patch."
    return sheet(tiles, SheetLabels("Experts of patches", names, caption=caption), SQUARE, SQUARE)
