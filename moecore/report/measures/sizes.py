"""Models of the papers' sizes: ours beside what the papers print."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moecore.measure.sizes import Result, SizeRow
from moecore.report.figures.drawing import GUIDE, PALETTE, empty_figure, styled_drawing
from moecore.report.measures.result_display import Figures
from moecore.report.page.view import EMPTY, NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.tables.paper_numbers import COSTS, PaperModelNumbers

LIMIT = 0.01  # a difference beyond it is explained


class SizeColumn(NamedTuple):
    """One number of a model: where it stands in a row, and in what unit it is shown."""

    metric: str  # of paper_numbers and compare.json
    label: str
    field: str  # of Row
    unit: float  # of the field; times it is the paper's
    shown: float  # of the paper's; times it is what is shown
    places: int  # decimals that are shown


COUNTS = (
    SizeColumn("parameters", "Parameters, M", "parameters", 1, 1e-6, 2),
    SizeColumn("active_parameters", "Active, M", "active_parameters", 1, 1e-6, 2),
    SizeColumn("gflops", "GFLOPs", "flops_per_image", 1e-9, 1, 1),
    SizeColumn(
        "routing_gflops", "Routing of a layer, GFLOPs", "routing_flops_per_layer", 1e-9, 1, 3
    ),
    SizeColumn("training_memory_mb", "Training step, GB", "training_memory_bytes", 1e-6, 1e-3, 2),
)
TICKS = (-100, -10, -1, 0, 1, 10, 100)  # %


def figures(result: Result) -> Figures:
    yield "difference_from_the_papers", draw_paper_deviations(result)


def paper_size_blocks(result: Result) -> Iterator[Block]:
    yield Block("Ours beside the papers'", grids=[size_table(result)])
    drawn = [Picture(figure, name.replace("_", " ")) for name, figure in figures(result)]
    yield Block("Difference from the papers' numbers", pictures=drawn)


def describe_reproduction(result: Result) -> str:
    """How many of the papers' numbers come out."""
    deviations = [
        one["difference"] for row in size_differences(result).values() for one in row.values()
    ]
    near = sum(abs(difference) <= LIMIT for difference in deviations)
    unbuilt = sum(bool(row.needs) for row in result.rows)
    words = f"{near} of {len(deviations)} printed numbers come out to within 1 %; the others have"
    missing = f" Not built here: {unbuilt}." if unbuilt else ""
    return f"{words} a word beside them.{missing} Built without memory, nothing is trained."


def size_differences(result: Result) -> dict[str, dict[str, dict[str, float]]]:
    """Model → metric → ours, the paper's, and the difference as a share of the paper's."""
    comparisons: dict[str, dict[str, dict[str, float]]] = {}
    for row in result.rows:
        comparisons[row.name] = {}
        for count in COUNTS:
            value = ours(row, count)
            paper = find_paper_numbers(row).values.get(count.metric)
            if value is not None and paper is not None:
                both = {"ours": value, "paper": paper, "difference": value / paper - 1}
                comparisons[row.name][count.metric] = both
    return comparisons


def find_paper_numbers(row: SizeRow) -> PaperModelNumbers:
    """Return what the paper prints of the model; KeyError for a name that it does not have."""
    return COSTS[row.reported] if row.reported else PaperModelNumbers("cost", row.name, "", {})


def ours(row: SizeRow, count: SizeColumn) -> float | None:
    """The number of a row in the paper's unit; None where the model was not built."""
    value = getattr(row, count.field)
    return None if value is None else value * count.unit


def size_table(result: Result) -> PageTable:
    """A row per model: each number, the paper's below it, and how far apart they are."""
    lines = [
        TableRow(
            PageCell(row.name, note=find_paper_numbers(row).source.partition(":")[0]),
            [count_beside_paper(row, count) for count in COUNTS] + [deviation_reason(row)],
        )
        for row in result.rows
    ]
    return PageTable(["", *(count.label for count in COUNTS), "Where they differ"], lines)


def count_beside_paper(row: SizeRow, count: SizeColumn) -> PageCell:
    """Ours; below it the paper's and the difference."""
    value = ours(row, count)
    paper = find_paper_numbers(row).values.get(count.metric)
    if value is None:
        return NONE if paper is None else PageCell("–", small=f"paper {format_size(paper, count)}")
    if paper is None:
        return PageCell(format_size(value, count), value=value)
    apart = f"{100 * (value / paper - 1):+.1f}\u00a0%".replace("-", "−")
    return PageCell(
        format_size(value, count), small=f"paper {format_size(paper, count)}, {apart}", value=value
    )


def deviation_reason(row: SizeRow) -> PageCell:
    if row.needs:
        return PageCell(f"Needs {row.needs}. {row.why}".strip(), look="reason")
    return PageCell(row.why, look="reason") if row.why else EMPTY


def format_size(value: float, count: SizeColumn) -> str:
    return f"{value * count.shown:,.{count.places}f}"


@styled_drawing
def draw_paper_deviations(result: Result) -> Figure:
    """Ours over the paper's − 1 for every model and number, a row per model."""
    comparisons: Mapping[str, Mapping[str, Any]] = {
        name: numbers for name, numbers in size_differences(result).items() if numbers
    }
    names = list(comparisons)[::-1]
    figure = empty_figure(8.2, 1.2 + 0.26 * len(names), "Ours over the paper's, less one.")
    axes = figure.subplots()
    for index, count in enumerate(COUNTS):
        having = [name for name in names if count.metric in comparisons[name]]
        values = [100 * comparisons[name][count.metric]["difference"] for name in having]
        places = [names.index(name) for name in having]
        look = {"linestyle": "", "marker": "osD^v"[index], "color": PALETTE[index]}
        axes.plot(values, places, label=count.label, **look)
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


def terminal_size_rows(
    compared: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[Sequence[str]]:
    """The entry ``sizes`` of compare.json as rows of text, the head first."""
    rows: list[Sequence[str]] = [("model", *(count.label for count in COUNTS))]
    for name, numbers in compared.items():
        texts = []
        for count in COUNTS:
            one = numbers.get(count.metric)
            if one is None:
                texts.append("–")
                continue
            ends = (format_size(one["ours"], count), format_size(one["paper"], count))
            texts.append(f"{ends[0]} / {ends[1]} ({100 * one['difference']:+.1f} %)")
        rows.append((name, *texts))
    return rows
