"""The report's first sentence says what the tests show, and no more."""

import numpy as np
import pytest

from moecore.measure.trained import Trained, collect_outcome_values
from moecore.report.page.sections import with_guess
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.first_sentence import find_guess, first_sentence
from moecore.report.tables.metrics_by_method import build_table
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
OF_OTHERS = "of tgr is 0.100 {} lower than that of vmoe (95 % interval 0.075 – 0.125)"
NONE = "no difference in accuracy is shown between tgr and"
GUESS = "no method is shown to beat a guess (always T-shirt, the most frequent class)"
CASES = [
    (study(tgr=FIRST, vmoe=SECOND), "2 methods on Fashion-MNIST (tgr and vmoe; 3 seeds)", LEAD),
    (
        study(settings=CONTROL, vmoe=SECOND, tgr=FIRST, told=FIRST),
        "2 methods on Fashion-MNIST (vmoe and tgr; not compared: told; 3 seeds)",
        LEAD,
    ),
    (  # the third's differences 0.09, 0.01, 0.11 do not stand
        study(tgr=FIRST, vmoe=SECOND, prc=THIRD),
        "3 methods on Fashion-MNIST (tgr, vmoe and prc; 3 seeds)",
        f"{LEAD}; no difference is shown between tgr and prc",
    ),
    (study(tgr=FIRST, prc=THIRD), "tgr and prc; 3 seeds)", f"{NONE} prc"),
    # one seed without items: intervals 0.8 – 0.9 and 0.5 – 0.6, then 0.75 – 0.85
    (
        study(tgr=[0.9], vmoe=[0.6]),
        "tgr and vmoe; 1 seed)",
        "tgr is 30.0 percentage points more accurate than vmoe (their 95 % intervals do not "
        "overlap)",
    ),
    (study(tgr=[0.9], vmoe=[0.85]), "tgr and vmoe; 1 seed)", f"{NONE} vmoe"),
    (study(tgr=[0.9]), "1 method on", "the accuracy of tgr is 90.0 % (80.0 – 90.0)"),
    # one class of six, equally frequent: 16.7 %
    (study(tgr=[0.2]), "1 method on", f"the accuracy of tgr is 20.0 % (10.0 – 20.0); {GUESS}"),
    (
        study(AGES, tgr=SECOND, vmoe=FIRST),
        "2 methods on",
        f"the mean absolute error {OF_OTHERS.format('years')}",
    ),
    (
        study(NextToken(words=9), tgr=SECOND, vmoe=FIRST),
        "2 methods on",
        f"the cross-entropy {OF_OTHERS.format('nats per token')}",
    ),
]


@pytest.mark.parametrize(("results", "compared", "finding"), CASES)
def test_only_what_a_test_shows_is_said(results, compared, finding):
    said = first_sentence(results)
    assert compared in said and said.endswith(f"): {finding}.")
    assert first_sentence(Results({})) == "Nothing was trained."


def test_the_first_table_ends_with_a_guess():
    results = study(
        tgr=[0.2], vmoe=[0.9]
    )  # intervals 0.1 – 0.2 and 0.8 – 0.9, around and above 1 / 6
    (phase,) = results.phases.values()
    table = build_table(results, phase)
    column = next(column for column in table.metrics if column.name == "test_accuracy")
    grid = with_guess(phase, [column], table.cells, ())
    assert [line.items[0].note for line in grid.lines] == ["not shown to beat a guess", ""]
    assert [line.items[0].text for line in grid.foot] == ["16.7 %"]


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
    assert find_guess(ages) == (9.0, "always the median age")
