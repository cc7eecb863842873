"""The report's first sentence says what the tests show, and no more."""

import numpy as np
import pytest

from moecore.measure.baselines import LOGISTIC, Baselines
from moecore.measure.trained import Trained, collect_outcome_values
from moecore.measure.values import Found, Value
from moecore.report.page.sections import with_reference_rows
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.metrics_by_method import build_table, compare_methods
from moecore.report.tables.terminal_summary import find_guess, first_sentence, headline_rows
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
            changes["median_mae"] = 9.0 if task is AGES else None
            outcome = generated.trained(0, 0, False, "pretrain").model_copy(update=changes)
            models[method][seed] = Measured({Trained: collect_outcome_values(outcome)})
    return Results({"pretrain": Phase("pretrain", CARD, task, models)}, settings)


CARD = generated.card("pretrain")
# Differences 0.1, 0.11, 0.09: ± 4.3027 · 0.01 / √3 = 0.0248; of the third 0.09, 0.01, 0.11
FIRST, SECOND, THIRD = (0.6, 0.61, 0.59), (0.5, 0.5, 0.5), (0.51, 0.6, 0.48)
RISING = (0.465, 0.5, 0.535)
LEAD = "tgr is 10.0 percentage points more accurate than vmoe (95 % interval 7.5 – 12.5)"
LOWER = "of tgr is 0.100 {} lower than that of vmoe (95 % interval 0.075 – 0.125)"
NONE = "no difference in accuracy is shown between tgr and"
GUESS = "no method is shown to beat a guess (always T-shirt, the most frequent class)"  # 1 / 6
APART = (
    "tgr is 30.0 percentage points more accurate than vmoe (their 95 % intervals do not overlap)"
)
CASES = (
    (
        study(tgr=FIRST, vmoe=SECOND, prc=THIRD),
        f"{LEAD}; no difference is shown between tgr and prc",
    ),
    (study(tgr=FIRST, prc=THIRD), f"{NONE} prc"),
    # t = 0.1 · √3 / 0.035 = 4.95, p = 0.038, after Holm's correction 0.077
    (study(tgr=[0.6] * 3, vmoe=RISING, prc=RISING[::-1]), f"{NONE} vmoe and prc"),
    (study(tgr=[0.9], vmoe=[0.6]), APART),  # one seed: 0.8 – 0.9 and 0.5 – 0.6, then 0.75 – 0.85
    (study(tgr=[0.9], vmoe=[0.85]), f"{NONE} vmoe"),
    (study(tgr=[0.9]), "the accuracy of tgr is 90.0 % (80.0 – 90.0)"),
    (study(tgr=[0.2]), f"the accuracy of tgr is 20.0 % (10.0 – 20.0); {GUESS}"),
    (study(AGES, tgr=SECOND, vmoe=FIRST), f"the mean absolute error {LOWER.format('years')}"),
    (
        study(NextToken(words=9), tgr=SECOND, vmoe=FIRST),
        f"the cross-entropy {LOWER.format('nats per token')}",
    ),
)


@pytest.mark.parametrize(("results", "finding"), CASES)
def test_only_what_a_test_shows_is_said(results, finding):
    assert first_sentence(results).partition("): ")[2] == f"{finding}."


def test_controls_are_named_and_not_compared():
    found = study(settings=CONTROL, vmoe=SECOND, tgr=FIRST, told=FIRST)
    start = "2 methods on Fashion-MNIST (vmoe and tgr; not compared: told; 3 seeds): "
    assert first_sentence(found) == f"{start}{LEAD}."
    assert first_sentence(Results({})) == "Nothing was trained; calculated: nothing."


def test_a_guess_is_the_best_constant_answer_and_ends_the_table():
    results = study(tgr=[0.2], vmoe=[0.9])  # intervals 0.1 – 0.2, around 1 / 6, and 0.8 – 0.9
    (phase,) = results.phases.values()
    table = build_table(results, phase)
    column = next(column for column in table.metrics if column.name == "test_accuracy")
    linear = Value(metric="baseline", at={"classifier": LOGISTIC}, value=0.25, low=0.2, high=0.3)
    fitted = Found(values=(linear,), facts={"images": 4000})
    phase = phase._replace(together={Baselines: fitted})
    grid = with_reference_rows(phase, [column], table.cells, ())
    assert [line.items[0].note for line in grid.lines] == ["not shown to beat a guess", ""]
    assert [line.items[0].text for line in grid.foot] == ["16.7 %", "25.0 %"]
    assert grid.foot[1].items[0].small == "20.0 – 30.0"
    assert grid.foot[1].head.note == "on the pixels of 4,000 training images"
    results = results._replace(phases={"pretrain": phase})
    assert first_sentence(results).endswith("; logistic regression on pixels reaches 25.0 %.")
    compared = compare_methods(results)
    assert compared["baselines"]["pretrain"][LOGISTIC]["mean"] == 0.25
    assert [row["method"] for row in headline_rows(compared)] == ["tgr", "vmoe"]
    counts = {"test": dict.fromkeys(generated.CLASSES, 100) | {"Coat": 400}}
    phase = phase._replace(card={**CARD, "counts": counts, "images": {"test": 600}})
    assert find_guess(phase) == (400 / 900, "always Coat, the most frequent class")
    several = MultiLabel(classes=generated.CLASSES)  # an image may have several of them
    assert find_guess(phase._replace(task=several)).value == 400 / 600
    assert find_guess(phase._replace(task=NextToken(words=9))).value == pytest.approx(np.log(9))
    (ages,) = study(AGES, tgr=[2.0]).phases.values()
    assert find_guess(ages) == (9.0, "always the median age")
