"""Pictures of experts and routing: load, patches, roles, worth, noise, truth, Lipschitz terms."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moecore.measure import cost, expert_worth, routing, stability, training, truth
from moecore.measure.routing_metrics import expert_roles
from moecore.measure.routing_metrics.expert_profiles import (
    OverlappingCrops,
    Overlays,
    parse_expert_grid,
)
from moecore.measure.values import Chart, Found
from moecore.report.column import CEILING, DENSE, MetricColumns, build_column_context
from moecore.report.figures import charts, drawing, model_figures
from moecore.report.page.page_objects import PageBlock, Picture, method_rows_table
from moecore.report.result_types import PhaseResults, list_without_none
from moecore.report.results_and_displays import (
    Figures,
    Pictures,
    draw_method_curves,
    draw_metric_chart,
    draw_pictures_by_name,
    first_seed_pictures,
)
from moecore.report.tables.cells import cell_over_seeds
from moecore.statistics.comparisons import Difference, headroom_recovered

AXES = ("teacher_agreement_layer", "layer", "Agreement with the teacher", "MoE layer", "Tokens")
TEACHER_CAPTION = "Tokens whose first expert is the teacher's (TGR, table 7)."
TEACHER_CHART = Chart(*AXES, words=TEACHER_CAPTION, share=True, top=1.02, height=3.2)


def draw_load_and_patch_experts(result: Found) -> Figures:
    if result.facts["load"]:
        yield "expert_load", model_figures.draw_expert_load(result.facts["load"])
    overlays = Overlays.model_validate(result.facts["overlays"])
    if overlays.shape[0] and overlays.grids:
        layers = {
            f"MoE {number}": (map(parse_expert_grid, layer), overlays.experts)
            for number, layer in enumerate(overlays.grids, 1)
        }
        figure = model_figures.draw_experts_of_patches(overlays.images(), layers, "Experts")
        yield "expert_overlays", figure


def routing_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    """Yield four blocks: load, experts of patches, matched crops, agreement with the teacher."""
    by_name = draw_pictures_by_name(phase, routing.Routing, draw_load_and_patch_experts)
    yield PageBlock("Load of the experts", pictures=by_name["expert_load"], about="load_cv2")
    measured = phase.first(routing.Routing)
    finding = describe_adjacent_patches(measured)
    patches = by_name["expert_overlays"]
    yield PageBlock("Which expert sees which patch", pictures=patches, finding=finding)
    crops = []
    first = next(iter(measured.values()), None)  # the crops are the same for every method
    if first is not None and first.facts["corresponding"]:
        pair = OverlappingCrops.model_validate(first.facts["corresponding"])
        figure = model_figures.draw_patch_correspondence(pair)
        label = f"{phase.name}: corresponding patches"
        crops.append(Picture(figure, label, getattr(figure, "caption", "")))
    yield PageBlock("Corresponding patches", pictures=crops, about="match_top1")
    pictures = draw_metric_chart(phase, routing.Routing, TEACHER_CHART)
    title = "Agreement with the teacher by layer"
    yield PageBlock(title, pictures=pictures, about="teacher_agreement")


def describe_adjacent_patches(first: Mapping[str, Found]) -> str:
    """Return a phrase: the share of adjacent patches with the same expert; "" if unknown."""
    shares = {}
    for method, result in first.items():
        grids = result.facts["overlays"]["grids"][-1:]
        rows = [parse_expert_grid(image) for layer in grids for image in layer]
        same = [(row[:, 1:] == row[:, :-1]).mean() for row in rows if row.shape[1] > 1]
        if same:
            shares[method] = float(np.mean(same))
    if not shares:
        return ""
    lowest = min(shares, key=shares.__getitem__)
    highest = max(shares, key=shares.__getitem__)
    ends = [f"{100 * shares[name]:.0f} % ({name})" for name in dict.fromkeys((lowest, highest))]
    return f"patches side by side share their expert in {' to '.join(ends)} of the pairs"


def step_time_over_k_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    label = "Time of a batch / that of k = 1"
    spec = charts.ChartSpec("Step time over k", "Experts per token k", label, height=3.2)
    caption = "Forward passes on this machine (ERMoE, figure S5)."

    def relative_to_top_1(result: Found) -> dict[float, float]:
        times = result.curve("batch_ms", "k")
        if 1 in times:
            return {k: time / times[1] for k, time in times.items()}
        return {}

    pictures = draw_method_curves(phase, cost.Cost, relative_to_top_1, spec, caption)
    yield PageBlock("Step time over k", pictures=pictures)


Pairs = Sequence[Sequence[float | None]]  # (E, E′): experts of a layer × of it or another layer
SIGNIFICANT_P = 0.05  # p-value below which a figure marks the information
SEED_MATCHING_NOTE = (
    "The experts of two seeds are matched one to one on half of the images and compared on the "
    "others."
)


def draw_expert_roles(result: Found) -> Figures:
    layers = expert_roles.read_layer_roles(result)
    if any(layer.labels for layer in layers):
        yield "expert_information", draw_expert_information(layers)
    for number, layer in enumerate(layers, 1):
        if np.any(layer.together):
            axes = "Also chose expert", "Chose expert"
            caption = "Percent of the tokens that chose the row's expert."
            figure = draw_expert_pair_heatmap(layer.together, f"MoE {number}", axes, caption, 0.005)
            yield f"coactivation_{number}", figure
        if layer.after:  # experts of this layer that tokens chose after each of the previous one
            axes = f"Chose expert in MoE {number}", f"Chose expert in MoE {number - 1}"
            caption = "Percent of the tokens that chose the row's expert a layer earlier."
            title = f"MoE {number - 1} to {number}"
            figure = draw_expert_pair_heatmap(layer.after, title, axes, caption, 0.005)
            yield f"coactivation_{number - 1}_{number}", figure
        if layer.cka:
            caption = "Linear CKA of two experts' outputs for the same tokens, in percent."
            title = f"Similarity, MoE {number}"
            figure = draw_expert_pair_heatmap(layer.cka, title, ("Expert", "Expert"), caption)
            yield f"expert_similarity_{number}", figure


def draw_expert_information(layers: Sequence[expert_roles.LayerRoles]) -> drawing.Figure:
    """Draw a heatmap of mutual information of expert and token label (class …), a row per layer."""
    names = [name for name in expert_roles.LABELS if any(name in layer.labels for layer in layers)]
    shares = np.full((len(layers), len(names)), np.nan)
    texts = np.full(shares.shape, "", dtype=object)
    for (row, column), _ in np.ndenumerate(shares):
        label = layers[row].labels.get(names[column])
        if label is not None:
            shares[row, column] = max(0, label.normalised)
            mark = "*" if label.p < SIGNIFICANT_P else ""
            texts[row, column] = f"{100 * shares[row, column]:.0f}{mark}"
    rows = [f"MoE {number}" for number in range(1, len(layers) + 1)]
    heads = [expert_roles.LABELS[name] for name in names]
    labels = charts.HeatmapLabels("What an expert tells", rows, heads, "of a token's")
    caption = f"Percent of the label's entropy, above chance. *: p < {SIGNIFICANT_P}."
    return charts.draw_heatmap(shares, texts, labels, (4.8, 1.3 + 0.35 * len(rows)), caption)


def draw_expert_pair_heatmap(
    pairs: Pairs, title: str, axes: tuple[str, str], caption: str, minimum: float = 0.0
) -> drawing.Figure:
    """Draw a heatmap of one share per pair of experts; shares below ``minimum`` have no number."""
    values = np.array(pairs, dtype=float)
    texts = charts.percent_annotations(values, minimum, charts.MAX_ANNOTATED_COLUMNS)
    rows, columns = ([str(expert) for expert in range(number)] for number in values.shape)
    labels = charts.HeatmapLabels(title, rows, columns, *axes)
    return charts.draw_heatmap(values, texts, labels, (4.8, 4.7), caption)


def seed_stability_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    context = build_column_context(phase, expert_roles.ExpertRoles)
    columns = MetricColumns("routing", expert_roles.ExpertRoles, "roles").columns(context)
    columns = [column for column in columns if column.of_pairs]
    cells = {
        method: {metric.name: cell_over_seeds(metric, list(seeds.values())) for metric in columns}
        for method, seeds in phase.models.items()
    }
    having = {method: row for method, row in cells.items() if all(row.values())}
    if having:
        table = method_rows_table(columns, having)
        title = "Do seeds find the same experts?"
        yield PageBlock(title, [SEED_MATCHING_NOTE], [table], about="seed_stability")


def draw_expert_worth(result: Found) -> Figures:
    """Yield charts of lost score: over removed experts, and over the rank of a dropped choice."""
    label = "Loss, 95 % intervals over images"
    spec = charts.ChartSpec("Removing experts", "Experts removed from every layer", label)
    curves = collect_loss_curves(result, expert_worth.ORDERS, "lost_without", "removed")
    yield "expert_removal", charts.curves_chart(curves, spec)
    ways = expert_worth.WAYS_TO_DROP_CHOICE
    curves = collect_loss_curves(result, ways, "lost_without_choice", "rank")
    if len(next(iter(curves.values()))) > 1:
        spec = charts.ChartSpec("Without one choice", "Rank", label)
        yield "dropped_choices", charts.curves_chart(curves, spec)


def collect_loss_curves(
    result: Found, names: Mapping[Any, str], metric: str, over: str
) -> charts.Curves:
    """Return label → curve of metric_suffix along ``over`` ("removed" …); names: suffix → label."""
    # names: suffix of ``metric`` → label of its curve; over: name of the place.
    return {
        label: [
            charts.point_from_interval(float(value.at[over]), value.interval)
            for value in result.all(f"{metric}_{name}")
            if over in value.at
        ]
        for name, label in names.items()
    }


def draw_mean_routing_by_class(result: Found) -> Figures:
    by_layer = enumerate(zip(*result.facts["class_maps"], strict=True), 1)
    if rows := {f"MoE {layer}": maps for layer, maps in by_layer}:
        yield (
            "class_maps",
            model_figures.draw_expert_grids_by_class(rows, result.facts["classes"]),
        )


def draw_noise_effects(result: Found) -> Figures:
    if result.facts["ramp"]["shown"]:
        yield "noise_ramp", draw_class_probability_over_noise(result.facts["ramp"])
    rows = {
        row["sigma"]: Overlays.model_validate(row["overlays"])
        for row in result.facts.get("overlays", ())
    }
    if rows:
        yield "noise_overlays", draw_experts_under_noise(rows)


def noise_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    pictures = first_seed_pictures(phase, stability.Stability, draw_noise_effects)
    title = "Predictions along a ramp, and patches under noise"
    yield PageBlock(title, pictures=pictures, about="jumps")


@drawing.styled_drawing
def draw_class_probability_over_noise(ramp: Mapping[str, Any]) -> drawing.Figure:
    """Draw the true class's probability over σ of image noise; crosses mark changed predictions."""
    figure = drawing.create_figure(4.8, 3.5, "Example images. Cross: the predicted class changes.")
    axes = figure.subplots()
    for number, curve in enumerate(ramp["shown"]):
        style = drawing.line_style(number) | {"marker": ""}
        axes.plot(ramp["sigmas"], curve["probability"], label=f"image {curve['index']}", **style)
        predicted = np.array(curve["predicted"])
        changed = 1 + (predicted[1:] != predicted[:-1]).nonzero()[0]
        points = (np.array(values)[changed] for values in (ramp["sigmas"], curve["probability"]))
        axes.plot(*points, linestyle="", marker="x", color=style["color"])
    axes.set(xlabel="σ of the noise", title="Prediction along a noise ramp", ylim=(-0.02, 1.02))
    drawing.set_percent_axis(axes, "Probability of the true class")
    drawing.add_legend_below(figure, axes)
    return figure


def draw_experts_under_noise(rows: Mapping[float, Overlays]) -> drawing.Figure:
    clean = next(iter(rows.values()))
    tiles = []
    for row in rows.values():
        line = []
        for number, image in enumerate(row.images()):
            grid = parse_expert_grid(row.grids[-1][number])
            changed = grid != parse_expert_grid(clean.grids[-1][number])
            texts = np.where(grid < 0, "–", grid.astype(str))
            tint = drawing.patch_expert_colours(np.where(changed, 0, -1), (drawing.PALETTE[1],))
            line.append(drawing.ImageTile(drawing.displayable_image(image), tint, texts))
        tiles.append(line)
    names = [f"σ = {sigma:g}" if sigma else "clean" for sigma in rows]
    caption = "Last MoE layer. Tinted: another expert."
    title = "Experts under noise: changed ones are tinted"
    labels = drawing.SheetLabels(title, names, caption=caption)
    return drawing.draw_picture_sheet(tiles, labels, 1.5, 1.5)


AXIS_LABEL_BY_CHANGE = {"noise": "σ", "attack": f"ε in 1/{truth.EPSILON_DENOMINATOR}"}
LIMITS = (0.0, 1.0)


def draw_true_kinds_by_expert(result: Found) -> Figures:
    """Yield a heatmap per MoE layer: each expert's tokens by known kind (generated data), in %."""
    for index, counts in enumerate(result.facts["counts"], 1):
        shares = model_figures.normalise_rows(counts)
        texts = charts.percent_annotations(shares, 0.005, charts.MAX_ANNOTATED_COLUMNS)
        columns = [str(kind + 1) for kind in range(shares.shape[1])]
        axes = ("Kind of token", "Expert, by its matched kind")
        labels = charts.HeatmapLabels(f"MoE {index}", (), columns, *axes)
        caption = "Percent of each expert's tokens."
        if (unmatched := len(shares) - shares.shape[1]) > 0:
            caption += f" More experts than kinds: the last {unmatched} are matched to none."
        yield f"truth_{index}", charts.draw_heatmap(shares, texts, labels, (4.8, 4.7), caption)


def routing_gain_share(phase: PhaseResults, method: str) -> Difference | None:
    """Return a method's test score, scaled so that dense is 0 and true routing (told) is 1."""
    # None unless every seed of the three methods has a score per test item.
    trained = phase.of(training.Trained)
    sign = -1 if phase.task.score.better == "lower" else 1
    sides = []
    for name in (method, DENSE, CEILING):
        scores = [result.find("test_score") for result in trained.get(name, [])]
        items = list_without_none(score.item_values for score in scores if score)
        if len(items) < phase.seeds:
            return None
        sides.append(sign * np.stack(items))
    return headroom_recovered(*sides)


def describe_routing_gain(phase: PhaseResults, method: str) -> str | None:
    """Return a sentence on ``routing_gain_share``; None if it is None or has no interval."""
    share = routing_gain_share(phase, method)
    if share is None or (half := share.half_width()) is None:
        return None
    value, low, high = (f"{100 * (share.value + off):.0f}" for off in (0, -half, half))
    return (
        f"{method} finds {value} % [{low} – {high}] of what routing is worth: "
        f"{CEILING}, which routes by the truth, is 100 %; {DENSE}, which has no experts, is 0 %."
    )


def draw_purity_curves(phase: PhaseResults) -> list[Picture]:
    caption = "Mean over MoE layers."
    spec = charts.ChartSpec("Purity of validation images", "Epoch", "Purity", share=True)
    read: Any = lambda result: dict(enumerate(training.get_outcome(result).purity, 1))
    pictures = draw_method_curves(phase, training.Trained, read, spec, caption, limits=LIMITS)
    for kind, unit in AXIS_LABEL_BY_CHANGE.items():
        spec = charts.ChartSpec(f"Purity under {kind}", unit, "Purity", share=True)
        changed = lambda result, kind=kind: result.curve("changed_purity", kind)
        pictures += draw_method_curves(phase, truth.Truth, changed, spec, caption, limits=LIMITS)
    return pictures


def truth_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    """Yield a block on routing against the truth: gain, purity, and the kinds of each expert."""
    first = phase.first(truth.Truth)
    sentences = list_without_none(describe_routing_gain(phase, method) for method in first)
    pictures = [
        *draw_purity_curves(phase),
        *first_seed_pictures(phase, truth.Truth, draw_true_kinds_by_expert),
    ]
    yield PageBlock("Experts and truth", sentences, pictures=pictures, about="purity")


def draw_lipschitz_lemma_terms(result: Found) -> Figures:
    if layers := result.facts.get("lemma_terms"):
        yield "lemma1", draw_lemma_terms(layers)


@drawing.styled_drawing
def draw_lemma_terms(layers: list[dict[str, list[float]]]) -> drawing.Figure:
    """Plot ‖∇f(x)‖₂ and the router term against the bound of lemma 1 (Puigcerver et al. 2022).

    f: MoE layer, x: token. layers: per layer, "bound", "jacobian", "router" → value per token.
    """
    # If the lemma holds, all points of the upper panel lie on or below the diagonal.
    figure = drawing.create_figure(4.8, 5.6, "One point per token.")
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


PICTURES = [
    Pictures(
        "routing",
        draw_load_and_patch_experts,
        is_on_page=False,
        above=routing_blocks,
        more=step_time_over_k_blocks,
    ),
    Pictures("routing.roles", draw_expert_roles, more=seed_stability_blocks),
    Pictures("expert_worth", draw_expert_worth),
    Pictures("lipschitz", draw_lipschitz_lemma_terms),
    Pictures("invariance", draw_mean_routing_by_class),
    Pictures("stability", draw_noise_effects, is_on_page=False, more=noise_blocks),
    Pictures("truth", draw_true_kinds_by_expert, is_on_page=False, more=truth_blocks),
]
