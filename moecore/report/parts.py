"""Parts of a phase's section that show training and routing: curves, calibration, experts, confusion."""

from collections.abc import Mapping

from moecore.report.agreement import PANELS, agreement_rows, routing_agreement
from moecore.report.figures import confusion_matrix, expert_load, expert_maps, expert_overlays, reliability_diagram, training_curves
from moecore.report.markup import figure
from moecore.report.results import Measured

Models = Mapping[str, Mapping[int, Measured]]


def first_of(models: Models) -> Measured:
    """The first model; all of a study went through the same stages."""
    return next(iter(next(iter(models.values())).values()))


def training(models: Models, phase: str) -> str:
    """Loss and validation accuracy (error, of ages) over the epochs."""
    curves = {method: [model.trained["curve"] for model in seeds.values()] for method, seeds in models.items()}
    return figure(training_curves(curves), f"{phase}: training", "One line a seed.")


def agreement(models: Models, phase: str) -> str:
    """How the routing settles; nothing where no training recorded it."""
    curves = {name: {method: agreement_rows(list(seeds.values()), name) for method, seeds in models.items()} for name in PANELS}
    if not any(any(rows.values()) for rows in curves.values()):
        return ""
    caption = "Share of tokens with the same first expert, mean over MoE layers. Bands: 95 % intervals over seeds."
    return f"<h3>How the routing settles</h3><div class=wide>{figure(routing_agreement(curves), f'{phase}: agreement', caption)}</div>"


def maps(models: Models, phase: str) -> str:
    """Mean routing of each class in the last MoE layer over the epochs; nothing where no training recorded it."""
    drawn = ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).trained
        if recorded := found.get("class_maps"):
            rows = {f"epoch {epoch}": [layers[-1] for layers in classes] for epoch, classes in recorded.items()}
            heat = expert_maps(rows, found["classes"], f"Mean routing of each class: {method}")
            drawn += figure(heat, f"{phase}: classes of {method}", "Last MoE layer, first seed.", png=True)
    return f"<details><summary>Which class goes to which expert</summary>{drawn}</details>" if drawn else ""


def calibration(models: Models, phase: str) -> str:
    """Reliability before and after; nothing where it was not measured, and for ages, which have a part of their own."""
    if "before" not in first_of(models).calibrate:
        return ""
    first = {method: next(iter(seeds.values())).calibrate for method, seeds in models.items()}
    fitted = ", ".join(f"{method} {found['temperature']:.2f}{' (at its limit)' if found['at_limit'] else ''}" for method, found in first.items())
    captions = {"before": "A point is a bin of confidence; the larger, the more images. First seed.", "after": f"Temperatures: {fitted}."}
    drawn = []
    for when, caption in captions.items():
        bins = {method: found[when]["bins"] for method, found in first.items()}
        title = f"Reliability {when} calibration"
        drawn.append(figure(reliability_diagram(bins, title), f"{phase}: {title}", caption))
    return f"<h3>Calibration</h3><div class=grid>{''.join(drawn)}</div>"


def experts(models: Models, phase: str) -> str:
    """Load and patches of the methods with MoE layers; nothing where there are none."""
    loads, patches, many = "", "", len(models) > 6
    for method, seeds in models.items():
        found = next(iter(seeds.values())).routing
        if not found.get("layers"):
            continue
        load = expert_load([layer["load"] for layer in found["layers"]], f"Expert load: {method}")
        loads += figure(load, f"{phase}: load of {method}", "Share of the choices. Dotted: balance.")
        if found["overlays"]["shape"][0]:
            drawn = expert_overlays(found["overlays"], f"Experts of {method}")
            patches += figure(drawn, f"{phase}: experts of {method}", "The expert with the largest weight in each patch.", png=True)
    both = {"Experts (first seed)": loads, "Which expert sees which patch": patches}
    form = "<details><summary>{}</summary><div class=grid>{}</div></details>" if many else "<h3>{}</h3><div class=grid>{}</div>"
    return "".join(form.format(title, drawn) for title, drawn in both.items() if drawn)


def confusion(models: Models, phase: str) -> str:
    """Confusion matrices; nothing where images have several labels each, or an age."""
    drawn = ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).trained
        if found.get("confusion") is not None:
            matrix = confusion_matrix(found["confusion"], found["classes"], f"Confusion: {method}")
            drawn += figure(matrix, f"{phase}: confusion of {method}", "Percent of each true class. First seed.")
    return f"<details><summary>Confusion matrices</summary><div class=grid>{drawn}</div></details>" if drawn else ""
