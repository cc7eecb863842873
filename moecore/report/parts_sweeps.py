"""The part of a phase's section that shows the trained weights under other router settings (ERMoE, figures S3 and S5)."""

from collections.abc import Sequence

from moecore.evaluation.intervals import over_seeds
from moecore.report.curves import Row
from moecore.report.figures_sweeps import value_curves
from moecore.report.markup import figure
from moecore.report.parts import Models
from moecore.report.results import Measured

SETTINGS = {"threshold": "Threshold T", "k": "Experts per token k"}
PANELS = {
    "threshold": {"fallback": ("Fallback", True), "tail_mass": ("Tail mass", False), "accuracy": ("Accuracy", True), "load_cv2": ("Load CV²", False)},
    "k": {"accuracy": ("Accuracy", True), "load_cv2": ("Load CV²", False), "tail_mass": ("Tail mass", False)},
}


def sweeps(models: Models, phase: str) -> str:
    """Small curves over the threshold and over k at test time; nothing where no model was swept."""
    drawn = ""
    for setting, panels in PANELS.items():
        for name, (label, share) in panels.items():
            rows = {method: sweep_rows(list(seeds.values()), setting, name) for method, seeds in models.items()}
            if any(rows.values()):
                title = f"{label} over {SETTINGS[setting].lower() if setting == 'k' else 'the threshold'}"
                curve = value_curves(rows, title, SETTINGS[setting], label, share)
                drawn += figure(curve, f"{phase}: {title}", "Trained weights, another setting at test time. Bands: 95 % intervals over seeds.")
    return f"<details><summary>Other thresholds and other k at test time</summary><div class=grid>{drawn}</div></details>" if drawn else ""


def sweep_rows(models: Sequence[Measured], setting: str, name: str) -> list[Row]:
    """x, value, low, high over the seeds of one method, by the setting; a point that a seed has no value for is left out."""
    lists = [model.routing.get("sweeps", {}).get(setting, []) for model in models]
    rows = []
    for points in zip(*(sorted(found, key=lambda row: row[setting]) for found in lists), strict=True):
        values = [point.get(name) for point in points]
        if None not in values:
            value, low, high = over_seeds(values)
            rows.append({"x": points[0][setting], "value": value, "low": value if low is None else low, "high": value if high is None else high})
    return rows
