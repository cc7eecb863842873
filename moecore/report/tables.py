"""The tables: one value with its interval for every method and metric, and where the best one is beyond doubt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.evaluation.intervals import Interval, over_seeds, wilson
from moecore.report.results import Measured, Results

Reader = Callable[[Measured], Any]


class Metric(NamedTuple):
    """A row of numbers: where it is read from, and how it is shown.

    read: the value of one model, an ``Interval`` where one model gives limits, or None where the model has no such thing.
    """

    name: str
    label: str
    read: Reader
    better: str  # "higher", "lower" or "" where neither is better
    form: str = "number"  # or "share", "count", "seconds"
    note: str = ""


class Cell(NamedTuple):
    """One entry of the table; ``kind`` says what its limits are: t, wilson, bootstrap or "" for none."""

    interval: Interval
    kind: str
    seeds: int


def metrics_of(measured: Sequence[Measured]) -> list[Metric]:
    """The metrics of the headline table, in order; one column for each attack, at the largest epsilon that was used."""
    attacks = {name: _eps(rows[-1]["epsilon"]) for name, rows in measured[0].robustness["attacks"].items()}
    note = "accuracy under attack"
    under = [Metric(f"accuracy_{n}", f"{_title(n)}, ε = {eps}", _under(n), "higher", "share", note) for n, eps in attacks.items()]
    note = "1 − IoU of the chosen experts at ε = {}, mean over layers"
    moved = [
        Metric(f"routing_change_{n}", f"Routing change, {_title(n)}", _moved(n), "lower", "number", note.format(eps)) for n, eps in attacks.items()
    ]
    return [
        Metric("test_accuracy", "Test accuracy", lambda m: wilson(m.trained["test_correct"], m.trained["test_count"]), "higher", "share"),
        Metric("test_loss", "Test loss", lambda m: m.trained["test_loss"], "lower", "number", "mean cross-entropy in nats"),
        Metric("ece_before", "ECE", _calibration("before", "ece"), "lower", "number", "expected calibration error, 15 bins"),
        Metric("ece_after", "ECE, calibrated", _calibration("after", "ece"), "lower", "number", "with the temperature of the validation split"),
        Metric("nll_after", "NLL, calibrated", _calibration("after", "nll"), "lower"),
        Metric("brier_after", "Brier, calibrated", _calibration("after", "brier"), "lower"),
        *under,
        *moved,
        Metric("load_cv2", "Load CV²", _routed("load_cv2"), "lower", "number", "variance / mean² of the tokens per expert, mean over layers"),
        Metric("entropy", "Expert entropy", _routed("entropy"), "higher", "number", "normalised entropy of expert use, mean over layers"),
        Metric("teacher_agreement", "Agreement with teacher", _routed("teacher_agreement"), "", "share", "tokens that agree on the first expert"),
        Metric("agreement_before_after", "Agreement before / after", _kept, "higher", "share", "tokens whose first expert survives fine-tuning"),
        Metric("parameters", "Parameters", lambda m: m.trained["parameters"], "", "count"),
        Metric("active_parameters", "Active parameters", lambda m: m.trained["active_parameters"], "", "count", "used for one token"),
        Metric("images_per_second", "Images / s", lambda m: m.trained["images_per_second"], "", "count", "while training"),
        Metric("seconds", "Training time", lambda m: m.trained["seconds"], "", "seconds"),
    ]


def table(results: Results, phase: str) -> tuple[list[Metric], dict[str, dict[str, Cell | None]]]:
    """The metrics that any method has, and the cell of every method and metric (None where a method has no such thing)."""
    methods = results.models[phase]
    metrics = metrics_of([model for seeds in methods.values() for model in seeds.values()])
    cells = {method: {metric.name: cell(metric, list(seeds.values())) for metric in metrics} for method, seeds in methods.items()}
    return [metric for metric in metrics if any(row[metric.name] for row in cells.values())], cells


def cell(metric: Metric, models: Sequence[Measured]) -> Cell | None:
    """Mean over seeds with Student's interval; for a single seed the metric's own interval, where it has one."""
    read = [metric.read(model) for model in models]
    if any(value is None for value in read):
        return None
    if len(read) == 1 and isinstance(read[0], Interval):
        own = "wilson" if metric.name.startswith(("test_accuracy", "accuracy_")) else "bootstrap"
        return Cell(read[0], own, 1)
    values = [value.value if isinstance(value, Interval) else float(value) for value in read]
    found = over_seeds(values)
    if metric.form == "share" and found.low is not None:
        found = Interval(found.value, max(0.0, found.low), min(1.0, found.high))
    return Cell(found, "t" if len(values) > 1 else "", len(values))


def best(metric: Metric, cells: Mapping[str, Cell | None]) -> str | None:
    """The method whose interval lies beyond every other's, or None: a difference inside the intervals is no difference."""
    known = {method: found.interval for method, found in cells.items() if found is not None}
    if not metric.better or len(known) < 2 or any(interval.low is None for interval in known.values()):
        return None
    sign = 1 if metric.better == "higher" else -1
    edges = {method: sorted((sign * interval.low, sign * interval.high)) for method, interval in known.items()}
    first = max(edges, key=lambda method: edges[method][0])
    return first if all(edges[first][0] > high for method, (_, high) in edges.items() if method != first) else None


def flat(results: Results) -> dict[str, Any]:
    """The content of compare.json: method → phase → metric → mean, low, high, interval, seeds."""
    tables = {phase: table(results, phase)[1] for phase in results.models}
    methods = next(iter(results.models.values()))

    def known(cells: Mapping[str, Cell | None]) -> dict[str, Any]:
        return {name: _json(found) for name, found in cells.items() if found}

    return {method: {phase: known(cells[method]) for phase, cells in tables.items()} for method in methods}


def _json(found: Cell) -> dict[str, Any]:
    limits = {"low": found.interval.low, "high": found.interval.high, "interval": found.kind} if found.kind else {}
    return {"mean": found.interval.value, **limits, "seeds": found.seeds}


def _calibration(when: str, name: str) -> Reader:
    def read(m: Measured) -> Interval:
        stored: Mapping[str, float] = m.calibrate[when][name]
        return Interval(stored["value"], stored["low"], stored["high"])

    return read


def _routed(name: str) -> Reader:
    return lambda m: m.routing.get(name)


def _under(attack: str) -> Reader:
    return lambda m: wilson(m.robustness["attacks"][attack][-1]["correct"], m.robustness["images"])


def _moved(attack: str) -> Reader:
    def read(m: Measured) -> float | None:
        return _mean(m.robustness["attacks"][attack][-1]["routing_change"])

    return read


def _kept(m: Measured) -> float | None:
    """Lists are one value a layer; null, [] and a missing key mean that there is no routing to compare."""
    found = m.trained.get("routing_agreement_before_after")
    return _mean(found) if isinstance(found, list) else found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _title(name: str) -> str:
    return " ".join(word.upper() if word in ("fgsm", "pgd", "apgd") else word for word in name.split("-"))


def _eps(epsilon: float) -> str:
    return f"{epsilon * 255:.3g}/255"
