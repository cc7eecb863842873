"""The summary that a run prints on the terminal, and the report's first sentence.

python -m moecore.report.tables.terminal_summary [reports/compare.json]
"""

import math
import re
import sys
from collections.abc import Mapping
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError
from moecore.measure.pixel_baselines import LOGISTIC
from moecore.report.claims import claims_table, evaluation
from moecore.report.claims.significance import LEVEL, compare_with_reference
from moecore.report.column import Column, score_slug
from moecore.report.headline_quantities import HEADLINES
from moecore.report.result_types import PhaseResults, StudyResults
from moecore.report.tables import metrics_by_method
from moecore.report.tables.cells import (
    Cell,
    NumberFormat,
    interval_from_json,
    join_names,
    method_cells_over_seeds,
    pluralize,
)
from moecore.report.tables.metrics_by_method import NO_METHODS, read_compare_json
from moecore.statistics.intervals import Interval
from moecore.tasks import multi_label, next_token

MAX_LINES = 25  # of the end of a run
LOWER_IS_BETTER = ("test_mae", "ppl")
# Columns of scores under attack begin so; those of each epsilon and of their mean are for claims.
ATTACKED_COLUMN_PATTERN = re.compile(r"(accuracy|attacked_mae)_(?!.*(_at_|_mean$))")
Rows = list[dict[str, str]]  # per phase and method: headline metric → value as text


def headline_rows(compared: Mapping[str, Any]) -> Rows:
    methods = {name: phases for name, phases in compared.items() if name not in NO_METHODS}
    measured = [cells for by_phase in methods.values() for cells in by_phase.values()]
    if not measured:
        return []
    names = [headline.name for headline in HEADLINES if headline.terminal]
    place = names.index("ece_after")
    names[place:place] = [name for name in measured[0] if ATTACKED_COLUMN_PATTERN.match(name)]
    names = [name for name in names if any(name in cells for cells in measured)]
    all_rows = []
    for phase in next(iter(methods.values())):
        rows = {method: {"phase": phase, "method": method} for method in methods}
        for name in names:
            cells = {
                method: phases[phase][name]
                for method, phases in methods.items()
                if name in phases[phase]
            }
            form = next((cell["form"] for cell in cells.values()), "number")
            number_format = NumberFormat.of(form, map(interval_from_json, cells.values()))
            for method, row in rows.items():
                row[name] = "–"
                if method in cells:
                    row[name] = number_format.value_with_limits(interval_from_json(cells[method]))
        all_rows += rows.values()
    return all_rows


def best_rows_by_phase(compared: Mapping[str, Any], rows: Rows, limit: int) -> Rows:
    """Return all rows if at most ``limit``, else equally many per phase: those with best score."""
    if len(rows) <= limit:
        return rows
    score = next((name for name in rows[0] if name not in ("phase", "method")), "")
    sign = 1 if score in LOWER_IS_BETTER else -1

    def rank(row: Mapping[str, str]) -> float:
        cell = compared[row["method"]][row["phase"]].get(score)
        return math.inf if cell is None else sign * cell["mean"]

    by_phase = [list(group) for _, group in groupby(rows, lambda row: row["phase"])]
    rows_per_phase = max(1, limit // len(by_phase))
    return [row for group in by_phase for row in sorted(group, key=rank)[:rows_per_phase]]


def claim_lines(claims: Mapping[str, Any], texts: Mapping[str, str] = {}) -> list[str]:
    """Return one line per claim of compare.json; texts: verdict → printed text."""
    lines = []
    for name, entry in claims.items():
        row = claims_table.build_claim_row(entry)
        limits = "(no interval)"
        notes = [row.holm_note(texts), row.detectable, row.excludes]
        if row.difference_limits:
            limits = f"[{row.difference_limits}]"
            notes.insert(0, f"over {row.over}")
        verdict = texts.get(row.verdict, row.verdict)
        line = f"{verdict:<13} {name.partition(': ')[2]}: {row.difference} {limits}"
        if any(notes):
            line += f" ({'; '.join(filter(None, notes))})"
        lines.append(line)
    return lines


def main(path: str = "reports/compare.json") -> None:
    """Print the headline numbers and all claims of a compare.json."""
    print_run_summary(Path(path), has_claims=True)


def print_run_summary(path: Path, has_claims: bool = False) -> None:
    """Print the headline numbers of a compare.json in MAX_LINES lines, or with all claims."""
    # has_claims: all rows, and the claims' verdicts instead of the page. Columns that do not fit
    # into the terminal are left out. UserError for a damaged or old file.
    compared = read_compare_json(path)
    try:
        _print_summary(compared, "" if has_claims else f"Page: {path.with_name('index.html')}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        older = f"was written by an older version of moecore ({type(error).__name__}: {error})"
        raise UserError(f"{path}: {older}; run `dvc repro compare` again") from error


def _print_summary(compared: Mapping[str, Any], page: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)
    after = [
        f"{phase}: {facts['name']} is SIMULATED data"
        for phase, facts in compared.get("data", {}).items()
        if facts["simulated"]
    ]
    if "first_sentence" in compared:
        after.append(compared["first_sentence"]["text"])
    for name, values in compared.get("calculations", {}).items():
        after.append(f"{name}: {len(values)} values, on reports/index.html")
    all_rows = rows = headline_rows(compared)
    if page:  # two lines are the table's head, and the number of rows left out
        after.append(page)
        lines = sum(len(Text(line).wrap(console, console.width)) for line in after)
        rows = best_rows_by_phase(compared, all_rows, MAX_LINES - 2 - lines)
    else:
        after += claim_lines(compared.get("claims", {}))
        after += claim_lines(compared.get("questions", {}), claims_table.ANSWERS)
    heads = [name.replace("_", " ") for name in next(iter(rows), [])]
    cells = [list(row.values()) for row in rows]
    widths = accumulate(2 + max(map(len, column)) for column in zip(heads, *cells, strict=True))
    count = sum(width <= console.width for width in widths)
    table = Table(*heads[:count], box=None, header_style="bold", padding=(0, 1))
    for row in cells:
        table.add_row(*row[:count])
    if len(rows) < len(all_rows):
        after.insert(0, f"and {len(all_rows) - len(rows)} rows of other methods, on the page")
    console.print(table)
    for line in after:
        console.print(line, markup=False, highlight=False, soft_wrap=not page)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))


class ConstantGuess(NamedTuple):
    value: float  # the score of a constant answer
    words: str  # that answer


def main_result_sentence(results: StudyResults) -> str:
    """Return the report's first sentence: the best test score, and differences that tests show."""
    # ``compare_with_reference`` has the tests; controls are not compared.
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
    columns = metrics_by_method.phase_result_columns(phase)
    column = next((column for column in columns if column.name == score), None)
    cells = {}
    if column is not None:
        models = {method: phase.models[method] for method in compared}
        all_cells = method_cells_over_seeds(column, models)
        cells = {method: cell for method, cell in all_cells.items() if cell is not None}
    if column is None or not cells:
        return f"{subject}: no test score was measured."
    finding = describe_best_method(phase, column, cells)
    guess = best_guess(phase)
    if guess and not any(beats_guess(cell, guess, column.better) for cell in cells.values()):
        finding += f"; no method is shown to beat a guess ({guess.words})"
    if linear := phase.baselines.get(LOGISTIC):
        number_format = NumberFormat.of(column.form, [linear.interval])
        finding += f"; {LOGISTIC} on pixels reaches {number_format.value(linear.value)}"
    if shown := evaluation.describe_whether_routers_differ(results, phase):
        finding += f"; {shown}"
    return f"{subject}: {finding}."


def describe_best_method(phase: PhaseResults, column: Column, cells: Mapping[str, Cell]) -> str:
    """Return a clause: the best method, and the methods that no test tells apart from it."""
    score = phase.task.score
    sign = -1 if column.better == "lower" else 1
    values = {method: sign * cell.interval.value for method, cell in cells.items()}
    best, *rivals = sorted(values, key=values.__getitem__, reverse=True)
    if not rivals:
        number_format = NumberFormat.of(column.form, [cells[best].interval])
        measured = number_format.value_with_limits(cells[best].interval, "()")
        return f"the {score.label} of {best} is {measured} {score.unit}".rstrip()
    tests = compare_with_reference(column, {method: phase.models[method] for method in cells}, best)
    beaten = [method for method in rivals if method in tests and tests[method].holm < LEVEL]
    if not tests and metrics_by_method.best_by_disjoint_intervals(column, cells) == best:
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
    size = NumberFormat.of(column.form, [lead]).magnitude(lead.value)
    size = f"{size.replace(' pp', ' percentage points')} {score.unit}".rstrip()
    clause = f"the {score.label} of {best} is {size} {score.better} than that of {rival} ({why})"
    if score.name == "accuracy":
        clause = f"{best} is {size} more accurate than {rival} ({why})"
    if equal:
        clause += f"; no difference is shown between {best} and {join_names(equal)}"
    return clause


def best_guess(phase: PhaseResults) -> ConstantGuess | None:
    """Return the score of always giving the best constant answer; None if unknown."""
    task = phase.task
    counts = phase.card.get("counts", {}).get("test", {})
    if task.classes and set(counts) == set(task.classes):
        label = max(counts, key=counts.__getitem__)
        total = sum(counts.values())
        if isinstance(task, multi_label.MultiLabel):
            total = phase.card["images"]["test"]
        return ConstantGuess(counts[label] / total, f"always {label}, the most frequent class")
    if isinstance(task, next_token.NextToken):
        return ConstantGuess(math.log(task.words), "all words are equally likely")
    for model in phase.all_models:
        if model.outcome is not None and model.outcome.median_mae is not None:
            return ConstantGuess(model.outcome.median_mae, f"always the median {task.answers[0]}")
    return None


def beats_guess(cell: Cell, guess: ConstantGuess, better: str) -> bool:
    if cell.interval.limits is None:
        return False
    low, high = cell.interval.limits
    return high < guess.value if better == "lower" else low > guess.value
