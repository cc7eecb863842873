"""A report's first sentence: what was compared, and which method is better by how much."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from moecore.measure.baselines import LOGISTIC
from moecore.report.claims.sensitivity import describe_sensitivity
from moecore.report.claims.significance import LEVEL, differences_from
from moecore.report.column import Column, score_slug
from moecore.report.study_results import Phase, Results
from moecore.report.tables.cells import (
    Cell,
    NumberFormat,
    join_names,
    method_cells_over_seeds,
    pluralize,
)
from moecore.report.tables.metrics_by_method import best_by_disjoint_intervals, phase_result_columns
from moecore.statistics.intervals import Interval
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.next_token import NextToken


class Guess(NamedTuple):
    value: float  # the score of a constant answer
    words: str  # that answer


def first_sentence(results: Results) -> str:
    """Return the sentence on the first phase's test score, with differences that tests show."""
    # Tests are paired, with Holm's correction (``differences_from``); controls are not compared.
    phase = next(iter(results.phases.values()), None)
    if phase is None:
        calculated = join_names(list(results.calculations)) or "nothing"
        return f"Nothing was trained; calculated: {calculated}."
    compared = [name for name in phase.models if name not in results.controls] or results.methods
    names = join_names(compared)
    if controls := [name for name in phase.models if name not in compared]:
        names += f"; not compared: {join_names(controls)}"
    seeds = pluralize(phase.seeds, "seed")
    subject = f"{pluralize(len(compared), 'method')} on {phase.card['name']} ({names}; {seeds})"
    score = f"test_{score_slug(phase.task.score)}"
    column = next((one for one in phase_result_columns(phase) if one.name == score), None)
    cells = {}
    if column is not None:
        models = {method: phase.models[method] for method in compared}
        all_cells = method_cells_over_seeds(column, models)
        cells = {method: cell for method, cell in all_cells.items() if cell is not None}
    if column is None or not cells:
        return f"{subject}: no test score was measured."
    finding = describe_best(phase, column, cells)
    guess = find_guess(phase)
    if guess and not any(beats_guess(cell, guess, column.better) for cell in cells.values()):
        finding += f"; no method is shown to beat a guess ({guess.words})"
    if linear := phase.baselines.get(LOGISTIC):
        number_format = NumberFormat.of(column.form, [linear.interval])
        finding += f"; {LOGISTIC} on pixels reaches {number_format.value(linear.value)}"
    if shown := describe_sensitivity(results, phase):
        finding += f"; {shown}"
    return f"{subject}: {finding}."


def describe_best(phase: Phase, column: Column, cells: Mapping[str, Cell]) -> str:
    """Return a clause on the best method, and on the methods that no test tells from it."""
    score = phase.task.score
    sign = -1 if column.better == "lower" else 1
    values = {method: sign * cell.interval.value for method, cell in cells.items()}
    best, *rivals = sorted(values, key=values.__getitem__, reverse=True)
    if not rivals:
        number_format = NumberFormat.of(column.form, [cells[best].interval])
        measured = number_format.value_with_limits(cells[best].interval, "()")
        return f"the {score.label} of {best} is {measured} {score.unit}".rstrip()
    tests = differences_from(column, {method: phase.models[method] for method in cells}, best)
    beaten = [method for method in rivals if method in tests and tests[method].holm < LEVEL]
    if not tests and best_by_disjoint_intervals(column, cells) == best:
        beaten = rivals
    equal = [method for method in rivals if method not in beaten]
    if not beaten:
        return f"no difference in {score.label} is shown between {best} and {join_names(equal)}"
    rival = beaten[0]
    lead = Interval(values[best] - values[rival])
    why = "their 95 % intervals do not overlap"
    if tests:
        limits = tests[rival].difference.limits or ()
        lead = Interval(lead.value, *sorted(-sign * limit for limit in limits))
        why = f"95 % interval {NumberFormat.of(column.form, [lead]).limits(lead)}"
    size = NumberFormat.of(column.form, [lead]).size(lead.value)
    size = f"{size.replace(' pp', ' percentage points')} {score.unit}".rstrip()
    clause = f"the {score.label} of {best} is {size} {score.better} than that of {rival} ({why})"
    if score.name == "accuracy":
        clause = f"{best} is {size} more accurate than {rival} ({why})"
    if equal:
        clause += f"; no difference is shown between {best} and {join_names(equal)}"
    return clause


def find_guess(phase: Phase) -> Guess | None:
    """Return the score of a constant answer: the most frequent class, the median, or any word."""
    task = phase.task
    counts = phase.card.get("counts", {}).get("test", {})
    if task.classes and set(counts) == set(task.classes):
        frequent = max(counts, key=counts.__getitem__)
        total = sum(counts.values())
        if isinstance(task, MultiLabel):
            total = phase.card["images"]["test"]
        return Guess(counts[frequent] / total, f"always {frequent}, the most frequent class")
    if isinstance(task, NextToken):
        return Guess(math.log(task.words), "all words are equally likely")
    for model in phase.every:
        if model.outcome is not None and model.outcome.median_mae is not None:
            return Guess(model.outcome.median_mae, f"always the median {task.answers[0]}")
    return None


def beats_guess(cell: Cell, guess: Guess, better: str) -> bool:
    """Return whether a score's interval lies on the better side of a guess."""
    if cell.interval.limits is None:
        return False
    low, high = cell.interval.limits
    return high < guess.value if better == "lower" else low > guess.value
