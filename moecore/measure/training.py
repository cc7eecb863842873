"""Metrics that a finished training has stored: test scores, losses, routing, costs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moecore.measure import base, calibration
from moecore.measure.values import SCORE, Found, Metric, OnPage, Value
from moecore.training.outcome import Outcome

TISSUES = {"wm": "White matter", "gm": "Grey matter", "csf": "CSF"}  # names of region experts
RANDOM_MASK_PREFIX = "random_"  # prefix of a tissue's name: random masks of the same size
TASKS_WITH_OWN_LOSS = ("classification", "cells", "multi_label")  # others: equal to the score
AGREEMENT_ITEM_KEYS = {  # metric → key of its values per item in ``Outcome.agreement_items``
    "agreement_with_final": "with_final_half",
    "saturation": "saturation_half",
    "agreement_consecutive": "consecutive_last",
    "agreement_consecutive_early": "consecutive_quarter",
    "agreement_consecutive_mean": "consecutive_mean",
    "agreement_before_after": "before_after",
}
OUTCOME_METRIC_FIELDS = (  # fields of an outcome that are metrics
    "ppl",
    "ppl_all",
    "parameters",
    "active_parameters",
    "images_per_second",
    "seconds",
    "training_step_ms",
    "training_memory_mb",
)


def training_overhead(trained: Found, baseline: Sequence[Found], _: Found | None) -> float | None:
    outcomes = [get_outcome(result) for result in baseline]
    mean = mean_without_none([outcome.seconds for outcome in outcomes if outcome.epochs])
    return get_outcome(trained).seconds / mean if mean else None


def steps_to_baseline_loss(ours: Found, _: Sequence[Found], same_seed: Found | None) -> int | None:
    """Return our steps to the final loss of the same seed's baseline; None without a baseline."""
    if same_seed is None:
        return None
    return steps_until_baseline_loss(get_outcome(ours), get_outcome(same_seed))


def hits_reader(fact: str) -> Callable[[Mapping[type, Any]], np.ndarray | None]:
    """Return a function that reads from results which test images are correct, (N,) bool."""
    # fact: "scores" or "top5". The function returns None if the results do not say it.

    def read(results: Mapping[type, Any]) -> np.ndarray | None:
        trained, calibrated = results.get(Trained), results.get(calibration.ClassCalibration)
        if trained is None or calibrated is None or (scores := calibrated.facts[fact]) is None:
            return None
        task = get_outcome(trained).task
        if task.score.form != "share":
            return None
        return task.decode_scores(scores, calibrated.facts["test_images"]).numpy()

    return read


def declare_epoch_agreement_metric(label: str, note: str, **changes: Any) -> Metric:
    return Metric(label, "higher", "share", note, "tgr", needs="settling")._replace(**changes)


METRICS = {
    "test_score": Metric(
        "{tested}{unit}", SCORE, SCORE, "{meaning}", name="test_{score}", hits=hits_reader("scores")
    ),
    "test_loss": Metric(
        "Test loss",
        "lower",
        note="mean cross-entropy in nats: over images, of mosaics over cells; of several labels "
        "the sum over classes",
    ),
    "ppl": Metric(
        "Perplexity",
        "lower",
        note="as papers count it: whole blocks of the training's number of streams, from an empty "
        "cache (MoGE, table 3)",
        needs="text",
    ),
    "ppl_all": Metric("Perplexity, all", "lower", note="every word, in one stream", needs="text"),
    "parameters": Metric("Parameters", form="count", is_fixed=True),
    "active_parameters": Metric("Active parameters", form="count", note="per token", is_fixed=True),
    "images_per_second": Metric("{items} / s", form="count", note="while training"),
    "seconds": Metric("Training time", form="seconds"),
    "training_overhead": Metric(
        "Training time / {baseline}",
        note="training time / mean training time of {baseline}",
        of_baseline=training_overhead,
    ),
    "steps_to_baseline_loss": Metric(
        "Steps to {baseline}'s loss",
        "lower",
        "count",
        "until the training loss, averaged over an epoch, reaches the final loss of {baseline} "
        "with the same seed (TGR, figure S5); if it never does, one epoch after the end: a lower "
        "bound, without interval and test",
        of_baseline=steps_to_baseline_loss,
        # A step that was not logged is after the end: the loss was not reached in training.
        is_bound=lambda ours, step: step not in {row["step"] for row in get_outcome(ours).curve},
    ),
    "agreement_with_final": declare_epoch_agreement_metric(
        "Agreement with final model", "tokens, halfway"
    ),
    "saturation": declare_epoch_agreement_metric(
        "Saturation",
        "share of a token's final experts that it has halfway through training; k/E by chance",
        paper="",
    ),
    "agreement_consecutive": declare_epoch_agreement_metric(
        "Agreement of epochs", "tokens, between the last two epochs"
    ),
    "agreement_consecutive_early": declare_epoch_agreement_metric(
        "Agreement of early epochs",
        "tokens, between an epoch and the next, after a quarter of training",
        detail=True,
    ),
    "agreement_consecutive_mean": declare_epoch_agreement_metric(
        "Agreement of epochs, mean",
        "tokens, between an epoch and the next, mean over training",
        detail=True,
    ),
    "agreement_before_after": declare_epoch_agreement_metric(
        "Agreement before / after",
        "tokens whose first expert survives fine-tuning",
        needs="finetuned",
    ),
    "training_step_ms": Metric(
        "Training step, ms", note="views, losses, update; from the median images / s", paper="cost"
    ),
    "training_memory_mb": Metric(
        "Training memory, MB",
        note="peak of a step: weights, gradients, the optimizer's state, activations",
        paper="cost",
        is_fixed=True,
    ),
    "test_accuracy_top5": Metric(
        "Top-5 accuracy",
        "higher",
        "share",
        "Acc@5: the class is among the five largest; not given for five classes or fewer",
        hits=hits_reader("top5"),
        limits="wilson",
    ),
    "own_expert": Metric(
        "Own expert",
        "higher",
        "share",
        "tokens of a region that choose the expert of that region, mean over wm, gm, csf",
        "ages",
    ),
    "own_expert_random": Metric(
        "Own expert, random masks", "", "share", "the same under random masks of that size", "ages"
    ),
    "own_expert_gain": Metric(
        "Own expert − random", "higher", note="above 0: experts know their tissue", paper="ages"
    ),
}


class Trained(base.MeasuredPart):
    """Declares the metrics of trainings, which every stage that writes a model stores."""

    metrics = METRICS
    page = OnPage("training", place=1)


def collect_outcome_values(outcome: Outcome) -> Found:
    """Return the values of an outcome; ``facts["outcome"]`` is the outcome itself."""
    consecutive = outcome.agreement_consecutive or (None,)
    share = tissue_own_expert_share(outcome)
    control = tissue_own_expert_share(outcome, RANDOM_MASK_PREFIX)
    numbers: dict[str, float | base.Estimate | None] = {
        "test_score": outcome.test_score,
        "test_loss": outcome.test_loss if outcome.task.kind in TASKS_WITH_OWN_LOSS else None,
        "agreement_with_final": value_halfway(outcome.agreement_with_final),
        "saturation": value_halfway(outcome.saturation),
        "agreement_consecutive": consecutive[-1],
        "agreement_consecutive_early": consecutive[(len(consecutive) - 1) // 4],
        "agreement_consecutive_mean": mean_without_none(consecutive),
        "agreement_before_after": mean_without_none(outcome.routing_agreement_before_after),
        "test_accuracy_top5": outcome.test_top5,
        "own_expert": share,
        "own_expert_random": control,
        "own_expert_gain": None if share is None or control is None else share - control,
    }
    numbers |= {name: getattr(outcome, name) for name in OUTCOME_METRIC_FIELDS}
    values = []
    for metric, number in numbers.items():
        key = AGREEMENT_ITEM_KEYS.get(metric, "")
        items = outcome.test_items if metric == "test_score" else outcome.agreement_items.get(key)
        if isinstance(number, base.Estimate):
            values.append(Value(metric=metric, items=items, **number.model_dump()))
        elif number is not None:
            values.append(Value(metric=metric, items=items, value=number))
    return Found(values=values, facts={"outcome": outcome})


def get_outcome(trained: Found) -> Outcome:
    outcome: Outcome = trained.facts["outcome"]
    return outcome


def value_halfway(by_epoch: Sequence[float | None]) -> float | None:
    """Return the agreement at the middle epoch: the 5th of 10, the 3rd of 5; None for []."""
    agreements = by_epoch or (None,)
    return agreements[(len(agreements) - 1) // 2]


def tissue_own_expert_share(outcome: Outcome, prefix: str = "") -> float | None:
    """Return the mean share of a tissue's tokens that choose its expert, at the last epoch."""
    # prefix: RANDOM_MASK_PREFIX, or "". None without experts named by tissues.
    if not outcome.region_routing:
        return None
    last = max(outcome.region_routing, key=lambda probe: probe.epoch)
    shares = {row.region: row.share for row in last.rows}
    return mean_without_none([shares.get(prefix + tissue, {}).get(tissue) for tissue in TISSUES])


def epoch_running_mean_losses(result: Outcome) -> list[tuple[int, float]]:
    """Return (step, mean training loss of the preceding epoch); [] if a point lacks a value."""
    rows = [(row["step"], row["epoch"], row["train_loss"]) for row in result.curve]
    if not rows or any(None in row for row in rows):
        return []
    steps, epochs, losses = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    # a logged loss is the mean of the steps since the last point
    spans = np.diff(steps, prepend=0)
    summed = np.concatenate([[0], np.cumsum(losses * spans)])
    passed = np.concatenate([[0], np.cumsum(spans)])
    # The first point that belongs to the epoch before each; epochs are quotients, hence 1e-9.
    first = np.searchsorted(epochs, epochs - 1 + 1e-9, side="right")
    last = np.arange(1, len(rows) + 1)
    means = (summed[last] - summed[first]) / (passed[last] - passed[first])
    return [(int(step), float(mean)) for step, mean in zip(steps, means, strict=True)]


def steps_until_baseline_loss(result: Outcome, baseline: Outcome) -> int | None:
    """Return the first logged step at which the training loss reaches the baseline's final one."""
    # Both are means over an epoch (TGR, figure S5). If it is never reached: the step one epoch
    # after the end. None without a log.
    baseline_losses = epoch_running_mean_losses(baseline)
    losses = epoch_running_mean_losses(result)
    if not baseline_losses or not losses:
        return None
    final = baseline_losses[-1][1]
    steps, epochs = result.curve[-1]["step"], result.curve[-1]["epoch"]
    after = round(steps * (1 + 1 / epochs)) if steps and epochs else None
    return next((step for step, loss in losses if loss <= final), after)


def mean_without_none(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
