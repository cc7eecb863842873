"""The metrics of the tables, in their order: those of every paper, then paper by paper."""

from collections.abc import Mapping, Sequence

from moecore.evaluation.intervals import Interval, wilson
from moecore.evaluation.robust import unpacked
from moecore.report.metric import Metric, Reader, mean, slug, value_of
from moecore.report.metrics_adversarial import adversarial, changes, corruption, theory
from moecore.report.metrics_ages import age_errors, attacked_ages, of_ages, regions_and_checks, table_s1
from moecore.report.metrics_cost import cost, overhead
from moecore.report.relative import NONE, Relative
from moecore.report.results import Measured

MATCHES = {"match_top1": "first expert", "match_top2_ordered": "top 2 in order", "match_top2_sets": "top 2 as sets"}


def metrics_of(measured: Sequence[Measured], relative: Relative = NONE) -> list[Metric]:
    """All metrics in order, first those of every paper, then paper by paper; attacks, transforms and augmentations come from the results.

    relative: what the columns that compare with one method are divided by.
    """
    ages = of_ages(measured)
    return [
        *(age_errors() if ages else _general(measured)), *overhead(relative), *_prc(measured), *_ermoe(), *_tgr(), *_moge(measured),
        *([*attacked_ages(measured), *changes(measured)] if ages else adversarial(measured)), *theory(), *corruption(measured, relative), *cost(),
        *([*table_s1(), *regions_and_checks()] if ages else []),
    ]  # fmt: skip


def _general(measured: Sequence[Measured]) -> list[Metric]:
    several = any(model.trained.get("measure") == "precision_at_1" for model in measured)
    label, note = ("Precision at 1", "1 − false discovery rate") if several else ("Test accuracy", "")
    loss = "mean over images of the sigmoids' cross-entropy in nats, summed over classes" if several else "mean cross-entropy in nats"
    return [
        Metric("test_accuracy", label, _accuracy, "higher", "share", note, hits=_test_hits, limits="wilson"),
        Metric("test_loss", "Test loss", lambda m: m.trained["test_loss"], "lower", "number", loss),
        Metric("ece_before", "ECE", _calibration("before", "ece"), "lower", "number", "expected calibration error, 15 bins"),
        Metric("ece_after", "ECE, calibrated", _calibration("after", "ece"), "lower", "number", "with the temperature of the validation split"),
        Metric("nll_after", "NLL, calibrated", _calibration("after", "nll"), "lower"),
        Metric("brier_after", "Brier, calibrated", _calibration("after", "brier"), "lower"),
        Metric("parameters", "Parameters", lambda m: m.trained["parameters"], "", "count"),
        Metric("active_parameters", "Active parameters", lambda m: m.trained["active_parameters"], "", "count", "used for one token"),
        Metric("images_per_second", "Images / s", lambda m: m.trained["images_per_second"], "", "count", "while training"),
        Metric("seconds", "Training time", lambda m: m.trained["seconds"], "", "seconds"),
    ]


def _prc(measured: Sequence[Measured]) -> list[Metric]:
    words = dict(zip(MATCHES, ("same first expert", "same first and second", "same two experts"), strict=True))
    return [
        *(Metric(n, f"Match, {MATCHES[n]}", _routed(n), "higher", "share", f"{words[n]} in two augmented views", "prc") for n in MATCHES),
        Metric("confidence_highest", "Highest probability", _sure("highest"), "higher", "number", "of a token, mean over tokens and layers", "prc"),
        Metric("confidence_second", "Second probability", _sure("second"), "", "number", "", "prc"),
        Metric("confidence_others", "Sum of the others", _sure("others"), "lower", "number", "probability outside the best two", "prc"),
        *_stability(),
        *_augmented(measured),
    ]


def _stability() -> list[Metric]:
    chosen, kept = "1 − IoU of the chosen experts under the largest noise, mean over layers", "tokens whose first expert stays under that noise"
    ramp = "steps along a ramp of noise in which the true class's probability jumps, mean over images"
    return [
        Metric("noise_accuracy", "Accuracy, noise", _noise_accuracy, "higher", "share", "under the largest noise", "prc", limits="wilson"),
        Metric("noise_selection_change", "Selection change, noise", _noise("selection_change"), "lower", "number", chosen, "prc"),
        Metric("noise_agreement", "Same expert, noise", _noise("agreement"), "higher", "share", kept, "prc"),
        Metric("jumps", "Prediction jumps", _jumps, "lower", "number", ramp, "prc"),
    ]


def _augmented(measured: Sequence[Measured]) -> list[Metric]:
    """PRC's table 4 under each recorded augmentation."""
    names = dict.fromkeys(row["name"] for model in measured for row in model.routing.get("augmentations", []))
    return [
        Metric(f"{n}_{slug(name)}", f"Match, {text}: {name}", _augmentation(name, n), "higher", "share", "", "prc", detail=True)
        for name in names
        for n, text in MATCHES.items()
    ]


def _ermoe() -> list[Metric]:
    note = "variance / mean² of the tokens per expert, mean over layers"
    return [
        Metric("load_cv2", "Load CV²", _routed("load_cv2"), "lower", "number", note, "ermoe"),
        Metric("fallback", "Fallback", _routed("fallback"), "lower", "share", "tokens with no expert above the threshold", "ermoe"),
        Metric("below_k", "Fewer than k", _routed("below_k"), "", "share", "tokens with fewer than k experts above the threshold", "ermoe"),
        Metric("tail_mass", "Tail mass", _routed("tail_mass"), "lower", "number", "weight above the threshold but outside the best k", "ermoe"),
        Metric("tail_of_probs", "Tail of the probabilities", _routed("tail_of_probs"), "", "number", "probability outside the best k", "ermoe"),
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
    all_moves = [Metric("imed", "IMED, mean", _imed_mean, "lower", "number", f"{note}; mean over transforms", "moge")] if names else []
    return all_moves + [Metric(f"imed_{slug(name)}", f"IMED, {name}", _imed(name), "lower", "number", note, "moge") for name in names]


def _accuracy(m: Measured) -> Interval:
    return wilson(m.trained["test_correct"], m.trained["test_count"])


def _test_hits(m: Measured):
    return unpacked(m.calibrate["hits"], m.trained["test_count"]).numpy() if m.calibrate else None


def _calibration(when: str, name: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        if not m.calibrate:
            return None
        stored: Mapping[str, float] | None = m.calibrate[when].get(name)
        return value_of(stored)

    return read


def _routed(name: str) -> Reader:
    return lambda m: m.routing.get(name)


def _sure(name: str) -> Reader:
    """The highest, the second or the sum of the other probabilities of a token."""
    return lambda m: mean([layer["confidence"][name] for layer in m.routing.get("layers", [])])


def _augmentation(augmentation: str, name: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        row = {found["name"]: found for found in m.routing.get("augmentations", [])}.get(augmentation)
        return Interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high")) if row else None

    return read


def _noise(name: str) -> Reader:
    """At the largest sigma; a list is one value a layer, [] for a dense model."""

    def read(m: Measured) -> float | None:
        rows = m.stability.get("noise", [])
        found = max(rows, key=lambda row: row["sigma"]).get(name) if rows else None
        return mean(found) if isinstance(found, list) else found

    return read


def _noise_accuracy(m: Measured) -> Interval | None:
    rows = m.stability.get("noise", [])
    found = max(rows, key=lambda row: row["sigma"]) if rows else None
    return Interval(found["accuracy"], found["low"], found["high"]) if found else None


def _jumps(m: Measured) -> Interval | None:
    return value_of(m.stability.get("ramp", {}).get("jumps_mean"))


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
    return mean(found) if isinstance(found, list) else found


def _imed(name: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        stored = {found["name"]: found for found in m.invariance.get("transforms", [])}.get(name)
        return Interval(stored["d"], stored.get("d_low"), stored.get("d_high")) if stored else None

    return read


def _imed_mean(m: Measured) -> float | None:
    return mean([found["d"] for found in m.invariance.get("transforms", [])])
