"""One section of the page for each phase: its numbers, then what each measurement has to say."""

from collections.abc import Collection, Sequence

from moecore.measure.values import place_slug
from moecore.report.claims.significance import WORDS
from moecore.report.column import Column
from moecore.report.figures.training_figures import draw_filter_sigma_schedule
from moecore.report.headline_quantities import QuantityByMethod, cells_by_method, first_columns
from moecore.report.measures.result_display import list_displays
from moecore.report.page.answer import format_method_value
from moecore.report.page.rows import method_rows_table, metric_rows_table
from moecore.report.page.view import Block, Picture, Section
from moecore.report.pictures import transfer
from moecore.report.tables.cells import Cells
from moecore.report.tables.methods_by_paper import paper_tables_block
from moecore.report.tables.metrics_by_method import ComparisonTable, used_tests
from moecore.report.tables.number_format import keep_percent_on_line
from moecore.report.typed_results import Phase, Results
from moecore.statistics.crossed import BOTH
from moecore.study.stages import STAGES

KINDS = {
    BOTH: "over test items and seeds at once where items are kept (docs/intervals.md)",
    "t": "Student's t over seeds",
    "jackknife": "the jackknife over seeds for means over pairs of them",
    "wilson": "Wilson for shares",
    "bootstrap": "bootstrap over test images for means",
    "draws": "Student's t over draws of few-shot images",
}
CONTROL = "they learned from labels dealt out anew, or their routing is not their own"


def phase_section(results: Results, phase: Phase, compared: ComparisonTable) -> Section:
    """The numbers of a phase, then a folded part for each measurement."""
    columns = {metric.name: metric for metric in compared.metrics}
    controls = [method for method in compared.cells if method in results.controls]
    first = [columns[name] for name in first_columns(phase, columns)]
    blocks = [
        Block(
            "",
            grids=[method_rows_table(first, compared.cells, controls)],
            marks=describe_marks(results, phase, compared, controls),
            below=[describe_intervals(compared)],
        ),
        paper_tables_block(list(columns.values()), compared.cells, controls),
    ]
    shown = [one for one in list_displays() if one.applies(phase.task) and phase.results(one.kind)]
    folded = [block for one in shown for block in one.blocks(phase)]
    if phase.name == next(iter(results.phases)):
        folded.append(sigma_schedule_block(results))
    folded += [*transfer.phase_blocks(phase), full_table_block(compared), inapplicable_block(phase)]
    blocks += [block._replace(folded=True) for block in folded]
    told = []
    for block in blocks:
        if block.empty:
            continue
        said = block.finding
        if not said and block.about in columns:
            said = describe_leader_or_range(columns[block.about], compared.cells, controls)
        place = block.title and f"{phase.name}-{place_slug(block.title).lower()}"
        told.append(block._replace(finding=keep_percent_on_line(said), id=place))
    title = phase_title(phase)
    return Section(phase.name, title, title, (), told)


def sigma_schedule_block(results: Results) -> Block:
    """How MoGE's σ falls in training; methods with the same schedule share a picture."""
    different = {
        (one.sigma_start, one.sigma_end, one.exponent): method
        for method, one in reversed(results.schedules.items())
    }
    drawn = []
    for method in reversed(different.values()):
        figure = draw_filter_sigma_schedule(results.schedules[method], method)
        drawn.append(Picture(figure, f"σ of {method}", getattr(figure, "caption", "")))
    told = f"the schedule of {join_names(list(results.schedules))}" if drawn else ""
    return Block("How the neighbourhood narrows", pictures=drawn, finding=told)


def inapplicable_block(phase: Phase) -> Block:
    """Measurements that do not apply, and why; a reason once for each method."""
    methods_by_reason = {
        f"{method}, {reason}.": method
        for method, seeds in phase.models.items()
        for model in seeds.values()
        for reason in model.skipped
    }
    methods = ", ".join(dict.fromkeys(methods_by_reason.values()))
    title = "What does not apply to a method"
    told = f"{pluralize(len(methods_by_reason), 'measurement')} of {methods}"
    return Block(title, below=list(methods_by_reason), finding=told)


def full_table_block(compared: ComparisonTable) -> Block:
    columns = compared.metrics
    told = f"{pluralize(len(columns), 'metric')} of {pluralize(len(compared.cells), 'method')}"
    grids = [metric_rows_table(columns, compared.cells)]
    return Block("All measurements", grids=grids, finding=told)


def describe_marks(
    results: Results, phase: Phase, compared: ComparisonTable, controls: Collection[str]
) -> str:
    """What a mark means; "" where nothing can be marked."""
    known = used_tests(results, phase, compared.metrics)
    if not known:
        return ""
    tests = "; ".join(text for test, text in WORDS.items() if test in known)
    words = [f"better than every other method beyond chance at 5 %: {tests}."]
    words.append("No mark means no difference was shown.")
    if dense := [method for method in compared.cells if method in results.without_experts]:
        words.append(f"Without experts ({join_names(dense)}): has to be beaten, is never marked.")
    if controls:
        names = ", ".join(controls)
        words.append(f"Marks leave out {names} (control): {CONTROL}.")
    return " ".join(words)


def describe_intervals(compared: ComparisonTable) -> str:
    cells = [cell for row in compared.cells.values() for cell in row.values() if cell]
    kinds = {cell.kind for cell in cells}
    how = ", ".join(text for kind, text in KINDS.items() if kind in kinds)
    words = ["↑ ↓: whether higher or lower is better."]
    if how:
        words.append(f"Small figures: 95 % intervals ({how}).")
    if "quartiles" in kinds:
        words.append("Of timings: quartiles.")
    return " ".join(words)


def phase_title(phase: Phase) -> str:
    return f"{STAGES[phase.name].title} on {phase.card['name']}"


def pluralize(count: int, word: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def join_names(names: Sequence[str]) -> str:
    """a, b and c."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def describe_leader_or_range(column: Column, cells: Cells, controls: Collection[str] = ()) -> str:
    """The one line that a folded part of the page says of itself.

    Who is ahead where that was shown, else from where to where the values reach.
    """
    having = cells_by_method(column.name, cells)
    quantity = QuantityByMethod(
        "", column, {name: cell for name, cell in having.items() if name not in controls}
    )
    if not quantity.cells:
        return ""
    if leader := quantity.leader:
        value = format_method_value(quantity, leader)
        return f"{column.label}: {value} of {leader} is {column.better} than all others"
    told = [
        f"{quantity.format.value(quantity.interval(method).value)} ({method})"
        for method in dict.fromkeys(quantity.ends())
    ]
    return f"{column.label}: {' to '.join(told)}"
