"""The files of a report, without its numbers as JSON."""

from collections.abc import Sequence

from moecore.measure.robustness import Result as Robustness
from moecore.report.claims import Evaluated
from moecore.report.curves import robustness_csv, table_s1_csv, training_csv
from moecore.report.explorer import FILE, explorable, explorer
from moecore.report.measured import Results
from moecore.report.page import page
from moecore.report.plots import plot_files
from moecore.report.runs import run_files
from moecore.report.verdicts import claims_markdown


def texts(results: Results, evaluated: Sequence[Evaluated]) -> dict[str, str]:
    """Path below reports/ → content."""
    phases = list(results.phases.values())
    found = {
        "index.html": page(results, evaluated, FILE if explorable(results) else None),
        FILE: explorer(results),
        "claims.md": claims_markdown(evaluated),
        "curves/training.csv": training_csv(results),
    }
    if any(phase.results(Robustness) for phase in phases):
        found["curves/robustness.csv"] = robustness_csv(results)
    if any(phase.task.kind == "regression" for phase in phases):
        found["curves/table_s1.csv"] = table_s1_csv(results)
    return found | run_files(results) | plot_files(results)
