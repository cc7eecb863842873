"""The metrics of robustness: attacks and their worst case, the Lipschitz estimate, common corruptions."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from moecore.evaluation.corruption_error import errors_of, mean_corruption_error
from moecore.evaluation.intervals import Interval, wilson
from moecore.evaluation.robust import unpacked
from moecore.report.metric import Metric, Reader, mean, slug, value_of
from moecore.report.relative import Relative
from moecore.report.results import Measured

WORST = "worst_case"
KNOWN = ("fgsm", "pgd", "apgd", "ce", "dlr")


def adversarial(measured: Sequence[Measured]) -> list[Metric]:
    """Accuracy and change of the routing under each attack, and under the worst of them for each image, at the largest epsilon."""
    attacks = {name: strongest(measured, name) for name in attacks_of(measured)}
    accuracies = (_accuracy_under(name, f"{attack_title(name)}, ε = {eps}", "accuracy under attack") for name, eps in attacks.items())
    return [*accuracies, *_worst(measured), *changes(measured)]


def changes(measured: Sequence[Measured]) -> list[Metric]:
    """Change of the chosen and of the processing experts under each attack at the largest epsilon."""
    attacks = {name: strongest(measured, name) for name in attacks_of(measured)}
    chosen, used = (f"1 − IoU of the experts that {what} a token at ε = {{}}, mean over layers" for what in ("are chosen for", "process"))
    return [
        *(_change(n, "routing_change", f"Routing change, {attack_title(n)}", chosen.format(eps)) for n, eps in attacks.items()),
        *(_change(n, "processing_change", f"Processing change, {attack_title(n)}", used.format(eps)) for n, eps in attacks.items()),
    ]


def theory() -> list[Metric]:
    """The Lipschitz estimate of a trained model and Lemma 1 on its layers; no column where they were not measured."""
    local = "spectral norm of the gradient image → logits, mean over images"
    slope = "how fast an ℓ∞ attack can change the margin between two classes, mean over images"
    bound = "steepest pair of images that was found around an image; mean over images"
    names = {"local_mean": ("Local Lipschitz", local), "margin_mean": ("Slope of the margin", slope), "lower_bound_mean": ("Lipschitz, at least", bound)}
    largest = Metric("lipschitz_lower_bound", "Lipschitz, at least (largest)", _lipschitz("lower_bound"), "lower", "number", "of all images", "adversarial")
    share = "share of the bound that the router's term makes up, mean over layers"
    return [
        *(Metric(f"lipschitz_{n}", label, _lipschitz(n), "lower", "number", note, "adversarial") for n, (label, note) in names.items()),
        largest,
        Metric("lemma1_router_share", "Lemma 1, router", _lemma("router_share"), "", "share", share, "adversarial", detail=True),
        Metric("lemma1_violations", "Lemma 1, violated", _lemma("violations"), "", "count", "tokens; none is expected", "adversarial", detail=True),
    ]


def corruption(measured: Sequence[Measured], relative: Relative) -> list[Metric]:
    """Mean error, mCE relative to the dense model, and the error of each corruption."""
    names = dict.fromkeys(row["name"] for model in measured for row in model.corruptions.get("corruptions", []))
    ratio = "mean over corruptions of error / error of dense, each summed over severities; 1 is as good as dense"
    return [
        Metric("corruption_error", "Error, mean", _mean_error, "lower", "share", "over corruptions and severities", "corruptions"),
        Metric("mce", "mCE", _mce(relative), "lower", "number", ratio, "corruptions"),
        *(Metric(f"error_{slug(n)}", f"Error, {n}", _error(n), "lower", "share", "mean over severities", "corruptions", detail=True) for n in names),
    ]


def attacks_of(measured: Sequence[Measured]) -> list[str]:
    """The attacks that any of the models met; one that a model has nothing for (a routing attack on a dense one) is null there."""
    return list(dict.fromkeys(name for model in measured for name, rows in model.robustness.get("attacks", {}).items() if rows))


def attack_title(name: str) -> str:
    """An attack's name for readers: pgd-10 → PGD 10, apgd_ce → APGD CE."""
    return " ".join(word.upper() if word in KNOWN else word for word in name.replace("_", "-").split("-"))


def attack_rows(model: Measured, attack: str) -> list[dict[str, Any]]:
    """The rows of an attack, or of the worst case over all, by epsilon; [] where the model did not meet it."""
    return (model.robustness.get(WORST) if attack == WORST else model.robustness.get("attacks", {}).get(attack)) or []


def hits_under(model: Measured, attack: str) -> np.ndarray | None:
    """Which images (N,) the model gets right at the largest epsilon of an attack, or whatever the attack; None where it is not stored."""
    names = attacks_of([model]) if attack == WORST else [attack]
    stored = [rows[-1].get("hits") if (rows := attack_rows(model, name)) else None for name in names]
    if None in stored:
        return None
    return reduce(np.logical_and, (unpacked(hits, model.robustness["images"]).numpy() for hits in stored))


def strongest(measured: Sequence[Measured], attack: str) -> str:
    """The largest epsilon of an attack in pixel steps: 8/255."""
    return f"{next(rows[-1]['epsilon'] for rows in (attack_rows(model, attack) for model in measured) if rows) * 255:.3g}/255"


def _worst(measured: Sequence[Measured]) -> list[Metric]:
    note = "accuracy where an image counts only if no attack broke it"
    there = any(attack_rows(model, WORST) for model in measured)
    return [_accuracy_under(WORST, f"Worst case, ε = {strongest(measured, WORST)}", note)] if there else []


def _accuracy_under(attack: str, label: str, note: str) -> Metric:
    def read(m: Measured) -> Interval | None:
        rows = attack_rows(m, attack)
        return wilson(rows[-1]["correct"], m.robustness["images"]) if rows else None

    def hits(m: Measured) -> np.ndarray | None:
        return hits_under(m, attack)

    return Metric(f"accuracy_{attack}", label, read, "higher", "share", note, "adversarial", hits=hits, limits="wilson")


def _change(attack: str, name: str, label: str, note: str) -> Metric:
    def read(m: Measured) -> float | None:
        rows = attack_rows(m, attack)
        return mean(rows[-1][name]) if rows else None

    return Metric(f"{name}_{attack}", label, read, "lower", "number", note, "adversarial")


def _lipschitz(name: str) -> Reader:
    return lambda m: value_of(m.lipschitz.get(name))


def _lemma(name: str) -> Reader:
    return lambda m: m.lipschitz.get("lemma1", {}).get(name)


def _mean_error(m: Measured) -> Interval | None:
    found = m.corruptions
    return Interval(found["mean_error"], found.get("mean_low"), found.get("mean_high")) if found else None


def _mce(relative: Relative) -> Reader:
    def read(m: Measured) -> float | None:
        if relative.errors is None or not m.corruptions:
            return None
        return mean_corruption_error(errors_of(m.corruptions["corruptions"]), relative.errors)

    return read


def _error(name: str) -> Reader:
    return lambda m: mean([row["error"] for row in m.corruptions.get("corruptions", []) if row["name"] == name])
