"""Every logged point and every attack as CSV, for plots of one's own."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moecore.brain.measured_ages import Result as Ages
from moecore.measure.robustness import Result as Robustness
from moecore.measure.under_attack.curves import run_of
from moecore.report.measured import Measured, Phase, Results
from moecore.training.outcome import Outcome

Row = dict[str, Any]
ITEM = ("phase", "method", "seed")
PREDICTIONS = ("raw", "pooled", "sex_specific")
ENDS = {"": "value", "_low": "low", "_high": "high"}
NUMBERS = ("mae", "corr", "slope", "intercept")


def training_csv(results: Results) -> str:
    """Every logged point of every training: phase, method, seed, step, epoch, losses and scores."""
    words = dict.fromkeys(phase.task.logged for phase in results.phases.values())
    scores = [f"{split}_{word}" for word in words for split in ("train", "validation")]

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        trained = model.of(Outcome)
        yield from () if trained is None else trained.curve

    return _csv(results, ("step", "epoch", "train_loss", *scores), rows)


def robustness_csv(results: Results) -> str:
    """Every attack of every model: phase, method, seed, attack, epsilon, score with its limits."""
    scores = dict.fromkeys(phase.task.logged for phase in results.phases.values())

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        found = model.of(Robustness)
        for name, curve in (run_of(found.attacks) if found else {}).items():
            for row in curve:
                values = row.model_dump(include={"epsilon", "low", "high"})
                yield values | {"attack": name, phase.task.logged: row.score}

    return _csv(results, ("attack", "epsilon", *scores, "low", "high"), rows)


def table_s1_csv(results: Results) -> str:
    """Every kind of prediction of every model: mae, corr, slope and intercept with their limits."""
    columns = [f"{name}{end}" for name in NUMBERS for end in ENDS]

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        found = model.of(Ages)
        for prediction in PREDICTIONS if found else ():
            errors = getattr(found, prediction)
            if errors is not None:
                values = {
                    f"{name}{end}": getattr(getattr(errors, name), part)
                    for name in NUMBERS
                    for end, part in ENDS.items()
                }
                yield {"prediction": prediction, **values}

    return _csv(results, ("prediction", *columns), rows)


def _csv(
    results: Results, columns: Sequence[str], rows: Callable[[Measured, Phase], Iterator[Row]]
) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(
        text, (*ITEM, *columns), extrasaction="ignore", restval="", lineterminator="\n"
    )
    writer.writeheader()
    for phase in results.phases.values():
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                item = {"phase": phase.name, "method": method, "seed": seed}
                writer.writerows(item | row for row in rows(model, phase))
    return text.getvalue()
