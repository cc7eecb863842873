"""The report's first sentence says what the tests show, and no more."""

import numpy as np
import pytest

from moecore.measure.trained import Trained, collect_outcome_values
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.first_sentence import find_guess, first_sentence
from moecore.tasks.base import Task
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.next_token import NextToken
from moecore.tasks.regression import Regression
from tests.report import generated

AGES = Regression(target="age", unit="years", mean=60.0, deviation=10.0)
CONTROL = "methods: {tgr: {}, vmoe: {}, told: {router: {kind: told}}}"


def study(task: Task = generated.TASK, settings: str = "", **scores) -> Results:
    """A phase whose methods have these test scores, one per seed, without items."""
    models = {}
    for method, values in scores.items():
        models[method] = {}
        for seed, value in enumerate(values):
            changes = {"task": task, "test_score": generated.estimate(value, value - 0.1, value)}
            if task is AGES:
                changes["median_mae"] = 9.0
            outcome = generated.trained(0, 0, False, "pretrain").model_copy(update=changes)
            models[method][seed] = Measured({Trained: collect_outcome_values(outcome)})
    phase = Phase("pretrain", generated.card("pretrain"), task, models)
    return Results({"pretrain": phase}, settings)


# Differences 0.1, 0.11, 0.09: ± 4.3027 · 0.01 / √3 = 0.0248
FIRST, SECOND, THIRD = (0.6, 0.61, 0.59), (0.5, 0.5, 0.5), (0.51, 0.6, 0.48)
LEAD = "tgr is 10.0 percentage points more accurate than vmoe (95 % interval 7.5 – 12.5)"


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (study(tgr=FIRST, vmoe=SECOND), f"Two methods on Fashion-MNIST (tgr and vmoe): {LEAD}."),
        (
            study(settings=CONTROL, vmoe=SECOND, tgr=FIRST, told=FIRST),
            f"Two methods on Fashion-MNIST (vmoe and tgr; not compared: told): {LEAD}.",
        ),
        (  # the third's differences 0.09, 0.01, 0.11 do not stand
            study(tgr=FIRST, vmoe=SECOND, prc=THIRD),
            f"Three methods on Fashion-MNIST (tgr, vmoe and prc): {LEAD}; no difference is shown "
            "between tgr and prc.",
        ),
        (
            study(tgr=FIRST, prc=THIRD),
            "Two methods on Fashion-MNIST (tgr and prc): no difference in accuracy is shown between "
            "tgr and prc.",
        ),
        (  # one seed without items: intervals 0.8 – 0.9 and 0.5 – 0.6, then 0.75 – 0.85
            study(tgr=[0.9], vmoe=[0.6]),
            "Two methods on Fashion-MNIST (tgr and vmoe): tgr is 30.0 percentage points more "
            "accurate than vmoe (their 95 % intervals do not overlap).",
        ),
        (
            study(tgr=[0.9], vmoe=[0.85]),
            "Two methods on Fashion-MNIST (tgr and vmoe): no difference in accuracy is shown "
            "between tgr and vmoe.",
        ),
        (
            study(tgr=[0.9]),
            "One method on Fashion-MNIST (tgr): the accuracy of tgr is 90.0 % (80.0 – 90.0).",
        ),
        (  # one class of six, equally frequent: 16.7 %
            study(tgr=[0.2]),
            "One method on Fashion-MNIST (tgr): the accuracy of tgr is 20.0 % (10.0 – 20.0); no "
            "method is shown to beat a guess (always T-shirt, the most frequent class: 16.7 %).",
        ),
        (
            study(AGES, tgr=SECOND, vmoe=FIRST),
            "Two methods on Fashion-MNIST (tgr and vmoe): the mean absolute error of tgr is 0.100 "
            "years lower than that of vmoe (95 % interval 0.075 – 0.125).",
        ),
        (
            study(NextToken(words=9), tgr=SECOND, vmoe=FIRST),
            "Two methods on Fashion-MNIST (tgr and vmoe): the cross-entropy of tgr is 0.100 nats "
            "per token lower than that of vmoe (95 % interval 0.075 – 0.125).",
        ),
        (Results({}), "Nothing was trained."),
    ],
)
def test_only_what_a_test_shows_is_said(results, said):
    assert first_sentence(results) == said


def test_a_guess_is_the_best_constant_answer():
    (phase,) = study(tgr=[0.9]).phases.values()
    counts = {"test": dict.fromkeys(generated.CLASSES, 100) | {"Coat": 400}}
    phase = phase._replace(card={**phase.card, "counts": counts, "images": {"test": 600}})
    assert find_guess(phase) == (400 / 900, "always Coat, the most frequent class")
    several = MultiLabel(classes=generated.CLASSES)  # an image may have several of them
    assert find_guess(phase._replace(task=several)).value == 400 / 600
    (words,) = study(NextToken(words=9), tgr=[2.0]).phases.values()
    assert find_guess(words).value == pytest.approx(np.log(9))
    (ages,) = study(AGES, tgr=[2.0]).phases.values()
    assert find_guess(ages) == (9.0, "always the median age in training")
