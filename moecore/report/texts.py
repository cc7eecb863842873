"""The files of a report, without its numbers as JSON.

The figures among them are for ``dvc plots show`` and ``diff``: they open without a network.
"""

from collections.abc import Iterator, Sequence

from moecore.measure.robustness import Result as Robustness
from moecore.measure.sizes import Result as Sizes
from moecore.report.claims import Evaluated
from moecore.report.curves import robustness_csv, table_s1_csv, training_csv
from moecore.report.explorer import FILE, explorable, explorer
from moecore.report.measured import Phase, Results
from moecore.report.measures import sizes
from moecore.report.measures.robustness import WORST, curve_of
from moecore.report.page import page
from moecore.report.pictures import svg
from moecore.report.quantities import names_of_attacks
from moecore.report.runs import run_files
from moecore.report.training_figures import training_curves
from moecore.report.verdicts import claims_markdown
from moecore.report.view import Picture
from moecore.training.outcome import Outcome

# Alone in a page of its own, a figure has no text colour to take over.
INK = "#333"


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


def plot_files(results: Results) -> dict[str, str]:
    """Path below reports/ → SVG: ``plots/pretrain_training.svg`` and the like."""
    found = {
        f"plots/{phase.name}_{name}.svg": alone(picture)
        for phase in results.phases.values()
        for name, picture in pictures_of(phase)
    }
    if counted := results.alone.get(Sizes):
        for name, figure in sizes.figures(counted):
            found[f"plots/sizes_{name}.svg"] = alone(Picture(figure, name.replace("_", " ")))
    return found


def pictures_of(phase: Phase) -> Iterator[tuple[str, Picture]]:
    """How the trainings went, and what attacks leave."""
    trained = {method: found for method, found in phase.of(Outcome).items() if found}
    if trained:
        yield "training", Picture(training_curves(trained), f"{phase.name}: training")
    if names := names_of_attacks(phase):
        worst = any(result.worst_case for result in phase.results(Robustness))
        yield "attacks", curve_of(phase, WORST if worst else names[-1])


def alone(picture: Picture) -> str:
    """The picture as a file of its own."""
    text = svg(picture.figure, picture.label)
    return text.replace("<svg", f'<svg color="{INK}"', 1)
