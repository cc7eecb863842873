"""The metrics of the tables: where each one is read from, how it is shown, and whose paper brought it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.evaluation.intervals import Interval, wilson
from moecore.report.results import Measured

Reader = Callable[[Measured], Any]


class Metric(NamedTuple):
    """A column of numbers: where it is read from, and how it is shown.

    read: the value of one model, an ``Interval`` where one model gives limits, or None where the model has no such thing.
    """

    name: str
    label: str
    read: Reader
    better: str  # "higher", "lower" or "" where neither is better
    form: str = "number"  # or "share", "count", "seconds"
    note: str = ""
    paper: str = ""  # a key of paper_figures.PAPERS, or "" for what every paper reports


def metrics_of(measured: Sequence[Measured]) -> list[Metric]:
    """All metrics in order, first those of every paper, then paper by paper; attacks and transforms come from the results."""
    return [*_general(), *_prc(), *_ermoe(), *_tgr(), *_moge(measured), *_adversarial(measured)]


def _general() -> list[Metric]:
    return [
        Metric("test_accuracy", "Test accuracy", lambda m: wilson(m.trained["test_correct"], m.trained["test_count"]), "higher", "share"),
        Metric("test_loss", "Test loss", lambda m: m.trained["test_loss"], "lower", "number", "mean cross-entropy in nats"),
        Metric("ece_before", "ECE", _calibration("before", "ece"), "lower", "number", "expected calibration error, 15 bins"),
        Metric("ece_after", "ECE, calibrated", _calibration("after", "ece"), "lower", "number", "with the temperature of the validation split"),
        Metric("nll_after", "NLL, calibrated", _calibration("after", "nll"), "lower"),
        Metric("brier_after", "Brier, calibrated", _calibration("after", "brier"), "lower"),
        Metric("parameters", "Parameters", lambda m: m.trained["parameters"], "", "count"),
        Metric("active_parameters", "Active parameters", lambda m: m.trained["active_parameters"], "", "count", "used for one token"),
        Metric("images_per_second", "Images / s", lambda m: m.trained["images_per_second"], "", "count", "while training"),
        Metric("seconds", "Training time", lambda m: m.trained["seconds"], "", "seconds"),
    ]


def _prc() -> list[Metric]:
    first, order, sets = (f"{what} in two augmented views" for what in ("same first expert", "same first and second", "same two experts"))
    return [
        Metric("match_top1", "Match, first expert", _routed("match_top1"), "higher", "share", first, "prc"),
        Metric("match_top2_ordered", "Match, top 2 in order", _routed("match_top2_ordered"), "higher", "share", order, "prc"),
        Metric("match_top2_sets", "Match, top 2 as sets", _routed("match_top2_sets"), "higher", "share", sets, "prc"),
        Metric("confidence_highest", "Highest probability", _sure("highest"), "higher", "number", "of a token, mean over tokens and layers", "prc"),
        Metric("confidence_second", "Second probability", _sure("second"), "", "number", "", "prc"),
        Metric("confidence_others", "Sum of the others", _sure("others"), "lower", "number", "probability outside the best two", "prc"),
    ]


def _ermoe() -> list[Metric]:
    note = "variance / mean² of the tokens per expert, mean over layers"
    return [
        Metric("load_cv2", "Load CV²", _routed("load_cv2"), "lower", "number", note, "ermoe"),
        Metric("fallback", "Fallback", _routed("fallback"), "lower", "share", "tokens with no expert above the threshold", "ermoe"),
        Metric("below_k", "Fewer than k", _routed("below_k"), "", "share", "tokens with fewer than k experts above the threshold", "ermoe"),
        Metric("tail_mass", "Tail mass", _routed("tail_mass"), "lower", "number", "weight above the threshold but outside the best k", "ermoe"),
    ]


def _tgr() -> list[Metric]:
    half, last = "tokens, once half of training is done", "tokens, between the last two epochs"
    teacher, kept = "tokens that agree on the first expert", "tokens whose first expert survives fine-tuning"
    return [
        Metric("agreement_with_final", "Agreement with final model", _half, "higher", "share", half, "tgr"),
        Metric("agreement_consecutive", "Agreement of epochs", _last, "higher", "share", last, "tgr"),
        Metric("teacher_agreement", "Agreement with teacher", _routed("teacher_agreement"), "", "share", teacher, "tgr"),
        Metric("agreement_before_after", "Agreement before / after", _kept, "higher", "share", kept, "tgr"),
        Metric("entropy", "Expert entropy", _routed("entropy"), "higher", "number", "normalised entropy of expert use, mean over layers", "tgr"),
        Metric("token_entropy", "Token entropy", _routed("token_entropy"), "", "number", "nats, of a token's probabilities; mean over layers", "tgr"),
    ]


def _moge(measured: Sequence[Measured]) -> list[Metric]:
    """One column a transform of the study ``invariance``, and their mean; none where no model has them."""
    names = dict.fromkeys(found["name"] for model in measured for found in model.invariance.get("transforms", []))
    note = "image Euclidean distance of the routers' outputs, plain and transformed"
    mean = [Metric("imed", "IMED, mean", _imed_mean, "lower", "number", f"{note}; mean over transforms", "moge")] if names else []
    return mean + [Metric(f"imed_{slug(name)}", f"IMED, {name}", _imed(name), "lower", "number", note, "moge") for name in names]


def _adversarial(measured: Sequence[Measured]) -> list[Metric]:
    """Accuracy and routing change of each attack, at the largest epsilon that was used."""
    attacks = {name: _eps(rows[-1]["epsilon"]) for name, rows in measured[0].robustness.get("attacks", {}).items()}
    note = "1 − IoU of the chosen experts at ε = {}, mean over layers"
    under, moved = "accuracy under attack", "Routing change, {}"
    return [
        *(Metric(f"accuracy_{n}", f"{_title(n)}, ε = {eps}", _under(n), "higher", "share", under, "adversarial") for n, eps in attacks.items()),
        *(
            Metric(f"routing_change_{n}", moved.format(_title(n)), _moved(n), "lower", "number", note.format(eps), "adversarial")
            for n, eps in attacks.items()
        ),
    ]


def slug(name: str) -> str:
    """A transform's name inside the name of a metric: "translation (0, 0.1)" → translation_0_0_1."""
    return re.sub(r"\W+", "_", name).strip("_")


def _calibration(when: str, name: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        if not m.calibrate:
            return None
        stored: Mapping[str, float] = m.calibrate[when][name]
        return Interval(stored["value"], stored["low"], stored["high"])

    return read


def _routed(name: str) -> Reader:
    return lambda m: m.routing.get(name)


def _sure(name: str) -> Reader:
    """The highest, the second or the sum of the other probabilities of a token."""
    return lambda m: _mean([layer["confidence"][name] for layer in m.routing.get("layers", [])])


def _half(m: Measured) -> float | None:
    """The epoch at whose end at least half of training is done: the 5th of 10, the 3rd of 5."""
    found = m.trained.get("agreement_with_final")
    return found[(len(found) - 1) // 2] if found else None


def _last(m: Measured) -> float | None:
    found = m.trained.get("agreement_consecutive")
    return found[-1] if found else None


def _kept(m: Measured) -> float | None:
    """Lists are one value a layer; null, [] and a missing key mean that there is no routing to compare."""
    found = m.trained.get("routing_agreement_before_after")
    return _mean(found) if isinstance(found, list) else found


def _imed(name: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        stored = {found["name"]: found for found in m.invariance.get("transforms", [])}.get(name)
        return Interval(stored["d"], stored.get("d_low"), stored.get("d_high")) if stored else None

    return read


def _imed_mean(m: Measured) -> float | None:
    return _mean([found["d"] for found in m.invariance.get("transforms", [])])


def _under(attack: str) -> Reader:
    def read(m: Measured) -> Interval:
        return wilson(m.robustness["attacks"][attack][-1]["correct"], m.robustness["images"])

    return read


def _moved(attack: str) -> Reader:
    def read(m: Measured) -> float | None:
        return _mean(m.robustness["attacks"][attack][-1]["routing_change"])

    return read


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _title(name: str) -> str:
    return " ".join(word.upper() if word in ("fgsm", "pgd", "apgd") else word for word in name.split("-"))


def _eps(epsilon: float) -> str:
    return f"{epsilon * 255:.3g}/255"
