"""Models of the papers' sizes: moecore's numbers and the printed ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moecore.measure.values import Found
from moecore.report.figures.drawing import GUIDE, PALETTE, Figure, create_figure, styled_drawing
from moecore.report.page.page_objects import DASH, EMPTY, PageBlock, PageCell, PageTable, TableRow
from moecore.report.result_types import PhaseResults
from moecore.report.results_and_displays import Figures, Pictures
from moecore.report.tables.cells import REPORTED_COSTS, PaperModelNumbers
from paper_models.sizes import METRICS, Sizes

LIMIT = 0.01  # larger relative differences are explained

# Metric → (factor for display, decimals).
UNITS = {
    "parameters": (1e-6, 2),
    "active_parameters": (1e-6, 2),
    "gflops": (1, 1),
    "routing_gflops": (1, 3),
    "training_memory_mb": (1e-3, 2),
}
Model = Mapping[str, str]  # texts of a model in the settings
TICKS = (-100, -10, -1, 0, 1, 10, 100)  # %


def figures(result: Found) -> Figures:
    yield "difference_from_the_papers", draw_paper_deviations(result)


def paper_size_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    for result in phase.results(Sizes):
        finding = describe_reproduction(result)
        yield PageBlock("Our numbers and the papers'", grids=[size_table(result)], finding=finding)


def describe_reproduction(result: Found) -> str:
    deviations = [
        numbers["difference"]
        for by_metric in size_differences(result).values()
        for numbers in by_metric.values()
    ]
    near = sum(abs(difference) <= LIMIT for difference in deviations)
    unbuilt = sum(bool(model["needs"]) for model in result.facts["models"])
    words = f"{near} of {len(deviations)} printed numbers are reproduced to within 1 %; the others"
    missing = f" Not built here: {unbuilt}." if unbuilt else ""
    return f"{words} have a reason next to them.{missing} Built without memory, nothing is trained."


def size_differences(result: Found) -> dict[str, dict[str, dict[str, float]]]:
    """Return model → metric → "ours", "paper" and "difference" (relative), where both are known."""
    comparisons: dict[str, dict[str, dict[str, float]]] = {}
    for model in result.facts["models"]:
        comparisons[model["name"]] = {}
        for metric in METRICS:
            value = find_size(result, model, metric)
            paper = find_paper_numbers(model).values.get(metric)
            if value is not None and paper is not None:
                both = {"ours": value, "paper": paper, "difference": value / paper - 1}
                comparisons[model["name"]][metric] = both
    return comparisons


def find_paper_numbers(model: Model) -> PaperModelNumbers:
    """Return the paper's numbers of a model, empty if none; KeyError for an unknown reference."""
    name = model["reported"]
    if name:
        return REPORTED_COSTS[name]
    return PaperModelNumbers("cost", model["name"], "", {})


def find_size(result: Found, model: Model, metric: str) -> float | None:
    """Return a model's value of a metric, in its unit; None if the model was not built."""
    value = result.find(metric, model=model["name"])
    if value is None:
        return None
    if METRICS[metric].form == "count":
        return int(value.value)
    return value.value


def size_table(result: Found) -> PageTable:
    """Return a table with a row per model: each size, below it the paper's and the difference."""
    lines = [
        TableRow(
            PageCell(model["name"], note=find_paper_numbers(model).source.partition(":")[0]),
            [count_beside_paper(result, model, metric) for metric in METRICS]
            + [model_deviation_cell(model)],
        )
        for model in result.facts["models"]
    ]
    heads = ["", *(metric.label for metric in METRICS.values()), "Where they differ"]
    return PageTable(heads, lines)


def count_beside_paper(result: Found, model: Model, metric: str) -> PageCell:
    """Return a cell with our size, and below it the paper's and the relative difference."""
    value = find_size(result, model, metric)
    paper = find_paper_numbers(model).values.get(metric)
    note = "" if paper is None else f"paper {format_size(paper, metric)}"
    if value is None:
        return PageCell("–", small=note) if note else DASH
    if paper is not None:
        apart = f"{100 * (value / paper - 1):+.1f}\u00a0%".replace("-", "−")
        note += f", {apart}"
    return PageCell(format_size(value, metric), small=note, value=value)


def model_deviation_cell(model: Model) -> PageCell:
    if model["needs"]:
        return PageCell(f"Needs {model['needs']}. {model['why']}".strip(), look="reason")
    if model["why"]:
        return PageCell(model["why"], look="reason")
    return EMPTY


def format_size(value: float, metric: str) -> str:
    factor, decimals = UNITS[metric]
    return f"{value * factor:,.{decimals}f}"


@styled_drawing
def draw_paper_deviations(result: Found) -> Figure:
    """Draw the relative difference of our sizes from the papers', a row per model."""
    comparisons: Mapping[str, Mapping[str, Any]] = {
        name: numbers for name, numbers in size_differences(result).items() if numbers
    }
    names = list(comparisons)[::-1]
    figure = create_figure(8.2, 1.2 + 0.26 * len(names), "Ours over the paper's, less one.")
    axes = figure.subplots()
    for index, (key, metric) in enumerate(METRICS.items()):
        having = [name for name in names if key in comparisons[name]]
        values = [100 * comparisons[name][key]["difference"] for name in having]
        places = [names.index(name) for name in having]
        style = {"linestyle": "", "marker": "osD^v"[index], "color": PALETTE[index]}
        axes.plot(values, places, label=metric.label, **style)
    axes.axvline(0, color=GUIDE, linewidth=0.9)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-200, 200)
    axes.set_xticks(
        TICKS, [f"{tick:+d}".replace("-", "−").replace("+0", "0") for tick in TICKS], minor=False
    )
    axes.minorticks_off()
    axes.set(xlabel="Difference in %, linear from −1 to 1", yticks=range(len(names)))
    axes.set_yticklabels(names)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def readme_size_rows(result: Found) -> list[Sequence[str]]:
    """Return rows of texts, the head first, as in the README of this folder."""
    rows: list[Sequence[str]] = [("model", *(metric.label for metric in METRICS.values()))]
    for name, numbers in size_differences(result).items():
        texts = []
        for metric in METRICS:
            pair = numbers.get(metric)
            if pair is None:
                texts.append("–")
                continue
            ours, paper = (format_size(pair[name], metric) for name in ("ours", "paper"))
            texts.append(f"{ours} / {paper} ({100 * pair['difference']:+.1f} %)")
        rows.append((name, *texts))
    return rows


PICTURES = Pictures("paper_models.sizes", figures, above=paper_size_blocks)
