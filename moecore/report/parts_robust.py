"""Parts of a phase's section that show robustness: attacks with their audit, corruptions, noise."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from moecore.evaluation.intervals import over_seeds
from moecore.report.curves import Row, robustness_rows
from moecore.report.figures import robustness_curve
from moecore.report.figures_errors import error_curve
from moecore.report.figures_noise import corruption_errors, noise_overlays, noise_ramp
from moecore.report.figures_sweeps import value_curves
from moecore.report.markup import figure, table_of
from moecore.report.metrics_adversarial import WORST, attack_rows, attack_title, attacks_of
from moecore.report.parts import Models, first_of, training
from moecore.report.results import Measured

MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}


def curves(models: Models, phase: str) -> str:
    """Training, and robustness where it was measured."""
    robust = bool(first_of(models).robustness)
    drawn = training(models, phase) + (attacks(models, phase) if robust else "")
    return f"<h3>Training{' and robustness' if robust else ''}</h3><div class=grid>{drawn}</div>{audit(models)}"


def attacks(models: Models, phase: str) -> str:
    """Accuracy (error, of ages) over epsilon for each attack and for the worst of them, and the change of the routing."""
    first, drawn, movements = first_of(models), [], []
    for attack in attacks_of([model for seeds in models.values() for model in seeds.values()]):
        rows = {method: robustness_rows(list(seeds.values()), attack, value_under(first)) for method, seeds in models.items()}
        drawn.append(_accuracy(rows, attack, phase, first))
        moved = {method: _movement(list(seeds.values()), attack) for method, seeds in models.items()}
        if any(moved.values()):
            curve = robustness_curve(moved, f"Routing change under {attack}", "1 − IoU of experts", whole=False)
            caption = "Share of a token's chosen experts that changes; mean over MoE layers and seeds."
            movements.append(figure(curve, f"{phase}: routing under {attack}", caption))
    worst = {method: robustness_rows(list(seeds.values()), WORST, value_under(first)) for method, seeds in models.items()}
    return "".join([*drawn, *([_accuracy(worst, WORST, phase, first)] if all(worst.values()) else []), *movements])


def audit(models: Models) -> str:
    """Which lines of the self-audit hold, method by method; nothing where there is none."""
    lines = {
        method: [{line["name"]: line for line in model.robustness["audit"]} for model in seeds.values() if model.robustness.get("audit")]
        for method, seeds in models.items()
    }
    names = dict.fromkeys(name for seeds in lines.values() for found in seeds for name in found)
    if not names:
        return ""
    rows = [[f'<th scope="row">{escape(name)}</th>', *(_line([found[name] for found in seeds if name in found]) for seeds in lines.values())] for name in names]
    head = ["<th>Question</th>", *(f"<th>{escape(method)}</th>" for method in lines)]
    return f"<details><summary>Can the attacks be believed? {_tally(lines)}</summary>{table_of(head, rows)}</details>"


def corruptions(models: Models, phase: str) -> str:
    """Error over severity for all methods, and each method's table; nothing where it was not measured."""
    if not first_of(models).corruptions:
        return ""
    over = {method: _mean_rows(list(seeds.values()), _by_severity) for method, seeds in models.items()}
    caption = f"Mean over {len({row['name'] for row in first_of(models).corruptions['corruptions']})} corruptions. Bands: 95 % intervals over seeds."
    drawn = figure(value_curves(over, "Error under corruption", "Severity", "Error", share=True), f"{phase}: corruptions", caption)
    tables = "".join(
        figure(corruption_errors(_first(seeds).corruptions["corruptions"], f"Error: {method}"), f"{phase}: corruptions of {method}", "Percent. First seed.")
        for method, seeds in models.items()
    )
    folded = f"<details><summary>Each corruption</summary><div class=grid>{tables}</div></details>"
    return f"<h3>Common corruptions</h3><div class=grid>{drawn}</div>{folded}"


def noise(models: Models, phase: str) -> str:
    """The choice of experts and the accuracy under noise, and ramps and patches of each method; nothing where it was not measured."""
    if not first_of(models).stability:
        return ""
    panels = {"selection_change": ("Selection change under noise", "1 − IoU of experts"), "accuracy": ("Accuracy under noise", "Accuracy")}
    drawn = ""
    for name, (title, label) in panels.items():
        rows = {method: _mean_rows(list(seeds.values()), lambda m, name=name: _under_noise(m, name)) for method, seeds in models.items()}
        caption = "Mean over MoE layers and seeds. Bands: 95 % intervals over seeds."
        drawn += figure(value_curves(rows, title, "σ of the noise", label, share=True), f"{phase}: {title}", caption) if any(rows.values()) else ""
    shown = "".join(_shown(method, _first(seeds).stability, phase) for method, seeds in models.items())
    folded = f"<details><summary>Predictions along a ramp, and patches under noise</summary><div class=grid>{shown}</div></details>" if shown else ""
    return f"<h3>Noise</h3><div class=grid>{drawn}</div>{folded}"


def _accuracy(rows: Mapping[str, list[Row]], attack: str, phase: str, first: Measured) -> str:
    title = "the worst attack for each image" if attack == WORST else attack
    caption = f"{first.robustness['images']} test images, the same for every method. Bands: 95 % intervals."
    curve = error_curve(rows, f"Error under {title}", "MAE, years") if value_under(first) == "mae" else robustness_curve(rows, f"Accuracy under {title}")
    return figure(curve, f"{phase}: {attack_title(attack)}", caption)


def value_under(model: Measured) -> str:
    """What the rows of an attack say of the predictions: "mae" of ages, else "accuracy"."""
    return "mae" if "clean_mae" in model.robustness else "accuracy"


def _movement(models: Sequence[Measured], attack: str) -> list[Row]:
    """Rows of the routing change; none for a dense model, whose lists are empty, and for an attack on survivors only."""
    rows = attack_rows(models[0], attack)
    return robustness_rows(models, attack, "routing_change") if rows and all(row["routing_change"] for row in rows) else []


def _line(found: Sequence[Mapping[str, Any]]) -> str:
    """What all seeds say of a question: the worst verdict, with its words."""
    if not found:
        return '<td class="quiet">–</td>'
    worst = min(found, key=lambda line: {False: 0, None: 1, True: 2}[line["holds"]])
    look = {True: "verdict holds", False: "verdict contradicted", None: "verdict open"}[worst["holds"]]
    return f'<td><span class="{look}">{MARKS[worst["holds"]]}</span><span class="note">{escape(worst["text"])}</span></td>'


def _tally(lines: Mapping[str, Sequence[Mapping[str, Mapping[str, Any]]]]) -> str:
    verdicts = [line["holds"] for seeds in lines.values() for found in seeds for line in found.values()]
    broken, judged = verdicts.count(False), len(verdicts) - verdicts.count(None)
    return f"{judged - broken} of {judged} lines of the audit hold"


def _by_severity(model: Measured) -> dict[float, float]:
    errors: dict[float, list[float]] = {}
    for row in model.corruptions["corruptions"]:
        errors.setdefault(row["severity"], []).append(row["error"])
    return {severity: sum(values) / len(values) for severity, values in sorted(errors.items())}


def _under_noise(model: Measured, name: str) -> dict[float, float]:
    """sigma → value, a list as its mean; {} for a dense model, whose lists are empty."""
    known = {row["sigma"]: row[name] for row in model.stability["noise"] if row[name] != []}
    return {sigma: sum(value) / len(value) if isinstance(value, list) else value for sigma, value in known.items()}


def _mean_rows(models: Sequence[Measured], read: Callable[[Measured], Mapping[float, float]]) -> list[Row]:
    """x, value, low, high over the seeds."""
    found = [read(model) for model in models]
    rows = []
    for x in found[0]:
        value, low, high = over_seeds([values[x] for values in found])
        rows.append({"x": x, "value": value, "low": value if low is None else low, "high": value if high is None else high})
    return rows


def _shown(method: str, found: Mapping[str, Any], phase: str) -> str:
    drawn, ramp = "", found.get("ramp", {})
    if ramp.get("shown"):
        caption = "A few images, first seed. A cross: another class is predicted."
        drawn += figure(noise_ramp(ramp["sigmas"], ramp["shown"], f"Noise ramp: {method}"), f"{phase}: noise ramp of {method}", caption)
    if found.get("overlays"):
        patches = noise_overlays(found["overlays"], title=f"Experts under noise: {method}")
        drawn += figure(patches, f"{phase}: noise on experts of {method}", "Last MoE layer, first seed. Tinted: another expert.", png=True)
    return drawn


def _first(seeds: Mapping[int, Measured]) -> Measured:
    return next(iter(seeds.values()))
