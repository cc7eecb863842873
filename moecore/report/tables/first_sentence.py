"""A report's first sentence: what was compared, and which method is better by how much."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moecore.report.claims.significance import LEVEL, differences_from
from moecore.report.column import Column, score_slug
from moecore.report.study_results import Phase, Results
from moecore.report.tables.cells import Cell, NumberFormat, method_cells_over_seeds
from moecore.report.tables.metrics_by_method import best_by_disjoint_intervals, phase_result_columns
from moecore.statistics.intervals import Interval
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.next_token import NextToken

MAX_NAMES = 8  # methods that the sentence lists
COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


class Guess(NamedTuple):
    """The score that a constant answer has on the test split, and that answer in words."""

    value: float
    words: str


class ScoreTable(NamedTuple):
    """The column of a phase's score, and the cell of each method that has one."""

    phase: Phase
    column: Column
    cells: Mapping[str, Cell]

    @property
    def number_format(self) -> NumberFormat:
        return NumberFormat.of(self.column.form, [cell.interval for cell in self.cells.values()])


def first_sentence(results: Results) -> str:
    """Return the sentence on the first phase's test score; differences only where tests show them.

    Tests are paired, with Holm's correction (``significance.differences_from``); control methods
    are named and not compared.
    """
    phase = next(iter(results.phases.values()), None)
    if phase is None:
        return "Nothing was trained."
    methods = list(phase.models)
    compared = [name for name in methods if name not in results.controls] or methods
    controls = [name for name in methods if name not in compared]
    subject = f"{describe_count(len(compared), 'method')} on {phase.card['name']}"
    subject += f" ({list_names(compared)}"
    if controls:
        subject += f"; not compared: {list_names(controls)}"
    scores = read_scores(phase, compared)
    if scores is None:
        return f"{subject}): no test score was measured."
    return f"{subject}): {describe_best(scores)}{_guess_clause(scores)}."


def read_scores(phase: Phase, methods: Sequence[str]) -> ScoreTable | None:
    """Return the test score of those ``methods`` that have one; None if none has."""
    name = f"test_{score_slug(phase.task.score)}"
    column = next((one for one in phase_result_columns(phase) if one.name == name), None)
    if column is None:
        return None
    models = {method: phase.models[method] for method in methods}
    cells = method_cells_over_seeds(column, models)
    having = {method: cell for method, cell in cells.items() if cell is not None}
    return ScoreTable(phase, column, having) if having else None


def describe_best(scores: ScoreTable) -> str:
    """Return a clause on the best method, on the tests that do not tell it from others."""
    column = scores.column
    sign = -1 if column.better == "lower" else 1
    ranked = sorted(scores.cells, key=lambda name: -sign * scores.cells[name].interval.value)
    best, *rivals = ranked
    label = scores.phase.task.score.label
    if not rivals:
        measured = scores.number_format.value_with_limits(scores.cells[best].interval, "()")
        return f"the {label} of {best} is {measured} {scores.phase.task.score.unit}".rstrip()
    models = {method: scores.phase.models[method] for method in ranked}
    tests = differences_from(column, models, best)
    if tests:
        beaten = [method for method in rivals if tests[method].holm < LEVEL]
    else:
        alone = best_by_disjoint_intervals(column, scores.cells)
        beaten = rivals if alone == best else []
    equal = [method for method in rivals if method not in beaten]
    if not beaten:
        return f"no difference in {label} is shown between {best} and {list_names(equal)}"
    rival = beaten[0]
    if tests:
        value, low, high = tests[rival].difference  # rival − best
        difference = Interval(-sign * value, *sorted(-sign * limit for limit in (low, high)))
    else:
        values = (scores.cells[method].interval.value for method in (best, rival))
        difference = Interval(sign * (next(values) - next(values)))
    clause = describe_lead(scores, best, rival, difference)
    if equal:
        return f"{clause}; no difference is shown between {best} and {list_names(equal)}"
    return clause


def describe_lead(scores: ScoreTable, best: str, rival: str, difference: Interval) -> str:
    """Return ``a is 1.3 percentage points more accurate than b (95 % interval 0.4 – 2.2)``."""
    score = scores.phase.task.score
    number_format = NumberFormat.of(scores.column.form, [difference])
    size = number_format.size(difference.value).replace(" pp", " percentage points")
    limits = "their 95 % intervals do not overlap"
    if difference.limits:
        limits = f"95 % interval {number_format.interval(*difference.limits)}"
    if score.name == "accuracy":
        return f"{best} is {size} more accurate than {rival} ({limits})"
    size = f"{size} {score.unit}".rstrip()
    return f"the {score.label} of {best} is {size} {score.better} than that of {rival} ({limits})"


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
    outcomes = [model.outcome for model in phase.every]
    medians = [outcome.median_mae for outcome in outcomes if outcome and outcome.median_mae]
    if medians:
        return Guess(medians[0], f"always the median {task.answers[0]} in training")
    return None


def beats_guess(cell: Cell, guess: Guess, better: str) -> bool:
    """Return whether a score's interval lies on the better side of a guess."""
    low, high = cell.interval.limits or (cell.interval.value, cell.interval.value)
    return high < guess.value if better == "lower" else low > guess.value


def _guess_clause(scores: ScoreTable) -> str:
    guess = find_guess(scores.phase)
    better = scores.column.better
    if guess is None or any(beats_guess(cell, guess, better) for cell in scores.cells.values()):
        return ""
    value = f"{scores.number_format.value(guess.value)} {scores.phase.task.score.unit}".rstrip()
    return f"; no method is shown to beat a guess ({guess.words}: {value})"


def describe_count(count: int, word: str) -> str:
    number = COUNTS[count] if count < len(COUNTS) else str(count)
    return f"{number} {word}" if count == 1 else f"{number} {word}s"


def list_names(names: Sequence[str]) -> str:
    """Return ``a, b and c``; of many names the first ones, and how many others there are."""
    names = list(names)
    if len(names) > MAX_NAMES:
        names = [*names[: MAX_NAMES - 1], f"{len(names) - MAX_NAMES + 1} others"]
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
