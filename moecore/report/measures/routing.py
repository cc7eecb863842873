"""Which experts tokens choose: balance, agreement of views, eligibility, sureness."""

from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.routing import Result
from moecore.measure.routing_metrics.augmentations import resolved
from moecore.measure.routing_metrics.overlays import Overlays, grid_of
from moecore.report.charts import Look, bands, curves_chart, over
from moecore.report.column import Ahead, Column, Each, mean, named, opened, slug, title_of
from moecore.report.drawing import expert_colours
from moecore.report.maps import expert_load
from moecore.report.measured import Phase
from moecore.report.routing_findings import neighbours, swept_most
from moecore.report.sheets import Frame, Tile, picture, sheet, tints
from moecore.report.shown import Figures, by_name
from moecore.report.view import Block, Picture
from moecore.statistics.intervals import Interval

MATCHES = {
    "match_top1": ("first expert", "same first expert"),
    "match_top2_ordered": ("top 2 in order", "same first and second"),
    "match_top2_sets": ("top 2 as sets", "same two experts"),
}
SURE = {
    "highest": ("Highest probability", "higher", "of a token, mean over tokens and layers"),
    "second": ("Second probability", "", ""),
    "others": ("Sum of the others", "lower", "probability outside the best two"),
}


def of_routing(name: str, label: str, better: str, form: str, note: str, paper: str) -> Column:
    """A number that the result has under the column's own name."""
    found = Column(name, label, lambda result: getattr(result, name), better, form, note, paper)
    return found._replace(items=items_of(name))


def items_of(name: str) -> Callable[[Result], np.ndarray | None]:
    """The items that a result keeps under this name."""
    return lambda result: opened(result.items.get(name))


def sureness(place: str) -> Column:
    """The highest, the second or the sum of the other probabilities of a token."""
    label, better, note = SURE[place]

    def read(result: Result) -> float | None:
        return mean([getattr(layer.confidence, place) for layer in result.layers])

    name = f"confidence_{place}"
    return Column(name, label, read, better, note=note, paper="prc", items=items_of(name))


def matched_under(match: str) -> Each:
    """A match of two views under each recorded augmentation (PRC, table 4)."""

    def column(name: str, result: Result) -> Column:
        def read(result: Result) -> Interval | None:
            row = named(result.augmentations).get(name)
            if row is None:
                return None
            ends = (f"{match}_low", f"{match}_high")
            return Interval(getattr(row, match), *(getattr(row, end) for end in ends))

        def items(result: Result) -> np.ndarray | None:
            row = named(result.augmentations).get(name)
            return None if row is None else opened(row.items.get(match))

        label = f"Match, {MATCHES[match][0]}: {name}"
        key = f"{match}_{slug(name)}"
        return Column(key, label, read, "higher", "share", paper="prc", items=items, detail=True)

    def foreseen(ahead: Ahead) -> list[str]:
        volumes = ahead.score == "mae"
        asked = [resolved(one, volumes) for one in ahead.study.routing.augmentations]
        return [f"{match}_{slug(one.name)}" for one in asked]

    return Each(lambda result: [row.name for row in result.augmentations], column, foreseen)


COLUMNS = (
    *(
        of_routing(
            match, f"Match, {words}", "higher", "share", f"{same} in two augmented views", "prc"
        )
        for match, (words, same) in MATCHES.items()
    ),
    *(sureness(place) for place in SURE),
    *(matched_under(match) for match in MATCHES),
    of_routing(
        "load_cv2",
        "Load CV²",
        "lower",
        "number",
        "variance / mean² of the tokens per expert, mean over layers",
        "ermoe",
    ),
    of_routing(
        "fallback",
        "Fallback",
        "lower",
        "share",
        "tokens with no expert above the threshold",
        "ermoe",
    ),
    of_routing(
        "below_k",
        "Fewer than k",
        "",
        "share",
        "tokens with fewer than k experts above the threshold",
        "ermoe",
    ),
    of_routing(
        "tail_mass",
        "Tail mass",
        "lower",
        "number",
        "weight above the threshold but outside the best k",
        "ermoe",
    ),
    of_routing(
        "tail_of_probs",
        "Tail of the probabilities",
        "",
        "number",
        "probability outside the best k",
        "ermoe",
    ),
    of_routing(
        "teacher_agreement",
        "Agreement with teacher",
        "",
        "share",
        "tokens that agree on the first expert",
        "tgr",
    ),
    of_routing(
        "entropy",
        "Expert entropy",
        "higher",
        "number",
        "normalised entropy of expert use, mean over layers",
        "tgr",
    ),
    of_routing(
        "token_entropy",
        "Token entropy",
        "",
        "number",
        "nats, of a token's probabilities; mean over layers",
        "tgr",
    ),
)


def figures(result: Result) -> Figures:
    """Load of the experts, and which expert sees which patch."""
    if result.layers:
        yield "expert_load", expert_load([layer.load for layer in result.layers])
    if result.overlays.shape[0] and result.overlays.grids:
        yield "expert_overlays", expert_overlays(result.overlays)


def part(phase: Phase) -> Iterator[Block]:
    """Load and patches of the methods with MoE layers, then other settings of their routers."""
    drawn = by_name(phase, Result, figures)
    loads = drawn["expert_load"]
    yield Block("Load of the experts", pictures=loads, folded=True, about="load_cv2")
    patches = drawn["expert_overlays"]
    yield Block(
        "Which expert sees which patch",
        pictures=patches,
        folded=True,
        finding=neighbours(phase.first(Result)),
    )
    yield Block(
        "Other thresholds and other k at test time",
        pictures=sweeps(phase),
        folded=True,
        finding=swept_most(
            {method: swept(result, "k", "score") for method, result in phase.first(Result).items()},
            phase.task.score,
        ),
    )


def expert_overlays(stored: Overlays) -> Figure:
    """Images with the expert of each patch in colour and number; the first row bare."""
    images = stored.images()
    colours = expert_colours(stored.experts)
    tiles = [[Tile(picture(image)) for image in images]]
    for layer in stored.grids:
        grids = [grid_of(rows) for rows in layer]
        tiles.append(
            [
                Tile(
                    picture(image),
                    tints(grid, colours),
                    np.where(grid < 0, "", grid.astype(str)),
                )
                for image, grid in zip(images, grids, strict=True)
            ]
        )
    names = ["Image", *(f"MoE {number + 1}" for number in range(len(stored.grids)))]
    caption = "The expert with the largest weight in each patch."
    return sheet(tiles, Frame("Experts", names, caption=caption), 1.35, 1.35)


def sweeps(phase: Phase) -> list[Picture]:
    """Small curves over the threshold and over k at test time (ERMoE, figures S3 and S5)."""
    score = phase.task.score
    share = score.form == "share"
    panels = (
        ("threshold", "fallback", "Fallback", True),
        ("threshold", "tail_mass", "Tail mass", False),
        ("threshold", "score", title_of(score), share),
        ("threshold", "load_cv2", "Load CV²", False),
        ("k", "score", title_of(score), share),
        ("k", "load_cv2", "Load CV²", False),
        ("k", "tail_mass", "Tail mass", False),
    )
    drawn = [sweep(phase, *panel) for panel in panels]
    return [one for one in drawn if one is not None]


def sweep(phase: Phase, setting: str, name: str, label: str, share: bool) -> Picture | None:
    """One value over one setting, a line a method; None where no model was swept."""
    words = {"threshold": ("the threshold", "Threshold T"), "k": ("k", "Experts per token k")}
    over_what, axis = words[setting]
    curves = {
        method: over([swept(result, setting, name) for result in seeds])
        for method, seeds in phase.of(Result).items()
    }
    if not any(curves.values()):
        return None
    look = Look(f"{label} over {over_what}", axis, label, share)
    what = "Trained weights, another setting at test time."
    caption = f"{what} {bands(phase.of(Result))}"
    return Picture(curves_chart(curves, look, 3.2), f"{phase.name}: {look.title}", caption)


def swept(result: Result, setting: str, name: str) -> dict[float, float]:
    """The setting → a value; without the points that have none."""
    rows = sorted(getattr(result.sweeps, setting), key=lambda row: getattr(row, setting))
    found = {getattr(row, setting): getattr(row, name) for row in rows}
    return {x: value for x, value in found.items() if value is not None}
