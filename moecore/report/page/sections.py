"""Sections and sentences of the report's page; differences are stated only if a test shows them."""

from collections import Counter
from collections.abc import Collection, Sequence

from moecore.measure.pixel_baselines import Baselines
from moecore.measure.values import place_slug
from moecore.report import headline_quantities, results_and_displays
from moecore.report.claims import evaluation, significance
from moecore.report.claims.claims_table import ANSWERS
from moecore.report.column import Column, find_moe_baseline, score_slug
from moecore.report.figures.model_figures import draw_filter_sigma_schedule
from moecore.report.headline_quantities import PhaseQuantities, QuantityByMethod, cells_by_method
from moecore.report.page.page_objects import (
    DASH,
    PageBlock,
    PageCell,
    PageSection,
    PageTable,
    Picture,
    TableRow,
    format_paper_number,
    method_rows_table,
    metric_rows_table,
)
from moecore.report.pictures.robustness import transfer_blocks
from moecore.report.result_types import PhaseResults, StudyResults
from moecore.report.tables.cells import (
    NOTES,
    REPORTED_MODELS,
    SHORT_TITLES,
    TITLES,
    Cells,
    NumberFormat,
    PaperModelNumbers,
    join_names,
    keep_percent_on_line,
    pluralize,
)
from moecore.report.tables.metrics_by_method import ComparisonTable, used_tests
from moecore.report.tables.terminal_summary import beats_guess, best_guess, describe_best_method
from moecore.statistics.comparisons import OVER_ITEMS_AND_SEEDS
from moecore.statistics.intervals import Interval
from moecore.study.stages import STAGES

VERDICT_PHRASES = {
    "holds": ("holds", "hold"),
    "differs": ("differs here", "differ here"),
    "open": ("is open: not significant", "are open: not significant"),
}
MAX_NAMED_CLAIMS = 3  # claims per verdict, at most, that are named


def describe_phase_findings(
    phase: PhaseResults, title: str, quantities: PhaseQuantities, controls: Collection[str]
) -> str:
    """Return a sentence on a phase's routing, and on its methods under attack."""
    # The score on clean data is in the report's first sentence.
    parts = [_describe_steadiness(phase, quantities)]
    if attacked := quantities.attacked:
        cells = {name: cell for name, cell in attacked.cells.items() if name not in controls}
        best = describe_best_method(phase, attacked.column, cells or attacked.cells)
        parts.append(f"{attacked.phrase.capitalize()} {best}")
    return keep_percent_on_line(f"{title}: {'. '.join(parts)}.")


def describe_verdict_counts(evaluated: Sequence[evaluation.EvaluatedClaim]) -> str:
    claims, questions = evaluation.split_claims_and_questions(evaluated)
    sentences = []
    if claims:
        sentences = _describe_claims_by_verdict(claims)
    answers = Counter(ANSWERS.get(question.verdict, question.verdict) for question in questions)
    if len(questions) == 1:
        sentences.append(f"One question that no paper answers: {next(iter(answers))}.")
    elif questions:
        counts = ", ".join(f"{count} {word}" for word, count in answers.items())
        sentences.append(f"Of {len(questions)} questions that no paper answers: {counts}.")
    return keep_percent_on_line(" ".join(sentences))


def _describe_claims_by_verdict(claims: Sequence[evaluation.EvaluatedClaim]) -> list[str]:
    """Return sentences that count the claims by verdict, before and after Holm's correction."""
    parts = []
    for name, (singular, plural) in VERDICT_PHRASES.items():
        judged = [claim for claim in claims if claim.verdict == name]
        if not judged:
            continue
        part = f"{len(judged)} {singular if len(judged) == 1 else plural}"
        if len(judged) <= MAX_NAMED_CLAIMS:
            comparisons = dict.fromkeys(
                f"{answer.claim.method} against {answer.claim.against}: {answer.metric.label}"
                for answer in judged
            )
            part += f" ({'; '.join(comparisons)})"
        parts.append(part)
    sentences = [f"Of {len(claims)} claims tested here, {'; '.join(parts)}."]
    if len(claims) == 1:
        sentences = [f"The one claim tested here {parts[0].removeprefix('1 ')}."]
    decided = [claim for claim in claims if claim.verdict != "open"]
    remaining = [claim for claim in decided if claim.verdict_holm != "open"]
    if len(remaining) < len(decided):
        verb = "remains" if len(remaining) == 1 else "remain"
        sentences.append(
            "With Holm's correction for several tests, within each paper, "
            f"{len(remaining)} of {len(decided)} decided claims {verb} decided."
        )
    return sentences


def _describe_steadiness(phase: PhaseResults, quantities: PhaseQuantities) -> str:
    """Return a phrase on how steady the router's choices are, or why this is unknown."""
    steady = quantities.steady
    if steady is None and not find_moe_baseline(phase.models):
        return "no expert is chosen, as a dense model sends every token through the same weights"
    if steady is None:
        return "the router decides; how steady its choices are was not measured"
    if len(steady.cells) == 1:
        return steady.phrase.format(format_method_value(steady, next(iter(steady.cells))))
    if leader := steady.leader:
        value = steady.phrase.format(format_method_value(steady, leader))
        return f"the router of {leader} is the steadiest: {value}"
    low, high = (steady.format.value(steady.interval(method).value) for method in steady.extremes())
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return steady.phrase.format(f"{span} {steady.unit}".rstrip())


def format_method_value(quantity: QuantityByMethod, method: str) -> str:
    """Return a method's value as text: ``79.1 % (76.0 – 82.2)``, with the unit of the score."""
    text = quantity.format.value_with_limits(quantity.interval(method), "()")
    return f"{text} {quantity.unit}".rstrip()


INTERVAL_KIND_TEXTS = {
    OVER_ITEMS_AND_SEEDS: "over test items and seeds together if items are stored "
    "(docs/intervals.md)",
    "t": "Student's t over seeds",
    "jackknife": "the jackknife over seeds for means over pairs of them",
    "wilson": "Wilson for shares",
    "bootstrap": "bootstrap over test images for means",
    "draws": "Student's t over draws of few-shot images",
}
CONTROL_DESCRIPTION = "trained on shuffled labels, or with routing that is not learned"


def phase_section(
    results: StudyResults,
    phase: PhaseResults,
    compared: ComparisonTable,
    papers: Collection[str] = (),
) -> PageSection:
    # papers: names of the papers whose claims the study tests.
    columns = {metric.name: metric for metric in compared.metrics}
    controls = [method for method in compared.cells if method in results.controls]
    first = [columns[name] for name in headline_quantities.first_table_mlflow_names(phase, columns)]
    how = PageBlock("How to read this table", below=[describe_intervals(compared)], folded=True)
    blocks = [
        PageBlock("", grids=[build_table_with_baselines(phase, first, compared.cells, controls)]),
        how._replace(marks=describe_best_marks(results, phase, compared, controls)),
        paper_tables_block(list(columns.values()), compared.cells, controls, papers),
    ]
    folded = [
        block
        for display in results_and_displays.list_displays()
        if display.applies(phase.task) and phase.results(display.kind)
        for block in display.blocks(phase)
    ]
    if phase.name == next(iter(results.phases)):
        folded.append(sigma_schedule_block(results))
    sizes = f"{pluralize(len(columns), 'metric')} of {pluralize(len(compared.cells), 'method')}"
    grids = [metric_rows_table(compared.metrics, compared.cells)]
    folded += transfer_blocks(phase)
    folded.append(PageBlock("All measurements", grids=grids, finding=sizes))
    folded.append(skipped_measurements_block(phase))
    blocks += [block._replace(folded=True) for block in folded]
    shown = []
    for block in blocks:
        if block.empty:
            continue
        finding = block.finding
        if not finding and block.about in columns:
            finding = describe_leader_or_range(columns[block.about], compared.cells, controls)
        place = block.title and f"{phase.name}-{place_slug(block.title).lower()}"
        shown.append(block._replace(finding=keep_percent_on_line(finding), id=place))
    title = phase_title(phase)
    return PageSection(phase.name, title, title, shown)


def calculation_section(
    display: results_and_displays.MeasurementDisplay, phase: PhaseResults, compared: ComparisonTable
) -> PageSection:
    shown = [column for column in compared.metrics if not column.detail]
    values = PageBlock("", grids=[metric_rows_table(shown, compared.cells)] if shown else [])
    blocks = [block for block in (values, *display.blocks(phase)) if not block.empty]
    title = display.title[0].upper() + display.title[1:]
    return PageSection(place_slug(display.stage), title, title, blocks)


def build_table_with_baselines(
    phase: PhaseResults, columns: Sequence[Column], cells: Cells, controls: Collection[str]
) -> PageTable:
    """Return the table of methods; below it, the best constant answer and classifiers on pixels."""
    grid = method_rows_table(columns, cells, controls)
    guess = best_guess(phase)
    score = f"test_{score_slug(phase.task.score)}"
    place = next((place for place, column in enumerate(columns) if column.name == score), None)
    if place is None:
        return grid
    having = cells_by_method(score, cells)
    lines = []
    for line, row in zip(grid.lines, cells.values(), strict=True):
        cells_of_line = list(line.items)
        cell = row[score]
        if guess and cell and not beats_guess(cell, guess, columns[place].better):
            note = "not shown to beat a guess"
            cells_of_line[place] = cells_of_line[place]._replace(note=note)
        lines.append(line._replace(items=cells_of_line))
    intervals = (cell.interval for cell in having.values())
    number_format = NumberFormat.of(columns[place].form, intervals)
    compared = []
    if guess:
        compared.append((PageCell("guess", note=guess.words), Interval(guess.value)))
    for name, value in phase.baselines.items():
        images = phase.together[Baselines].facts["images"]
        note = f"on the pixels of {images:,} training images"
        compared.append((PageCell(name, note=note), value.interval))
    foot = []
    for head, interval in compared:
        items = [DASH] * len(columns)
        items[place] = PageCell(number_format.value(interval.value), number_format.limits(interval))
        foot.append(TableRow(head, items))
    return grid._replace(lines=lines, foot=foot)


def sigma_schedule_block(results: StudyResults) -> PageBlock:
    different = {
        (schedule.sigma_start, schedule.sigma_end, schedule.exponent): method
        for method, schedule in reversed(results.sigma_schedules.items())
    }
    pictures = []
    for method in reversed(different.values()):
        figure = draw_filter_sigma_schedule(results.sigma_schedules[method], method)
        pictures.append(Picture(figure, f"σ of {method}", getattr(figure, "caption", "")))
    finding = f"the schedule of {join_names(list(results.sigma_schedules))}" if pictures else ""
    return PageBlock("How the neighbourhood narrows", pictures=pictures, finding=finding)


def skipped_measurements_block(phase: PhaseResults) -> PageBlock:
    methods_by_reason = {
        f"{method}, {reason}.": method
        for method, seeds in phase.models.items()
        for model in seeds.values()
        for reason in model.skipped
    }
    methods = ", ".join(dict.fromkeys(methods_by_reason.values()))
    finding = f"{pluralize(len(methods_by_reason), 'measurement')} of {methods}"
    title = "Measurements that do not apply to a method"
    return PageBlock(title, below=list(methods_by_reason), finding=finding)


def describe_best_marks(
    results: StudyResults, phase: PhaseResults, compared: ComparisonTable, controls: Collection[str]
) -> str:
    used = used_tests(results, phase, compared)
    if not used:
        return ""
    tests = "; ".join(text for test, text in significance.TEST_DESCRIPTIONS.items() if test in used)
    sentences = [
        f"better than every other method, significant at 5 %. Tests: {tests}.",
        "Without a mark no method is significantly better than all others.",
    ]
    if dense := [method for method in compared.cells if method in results.without_experts]:
        names = join_names(dense)
        sentences.append(f"Methods without experts ({names}) are compared, never marked.")
    if controls:
        names = ", ".join(controls)
        sentences.append(f"Not compared: {names} (control, {CONTROL_DESCRIPTION}).")
    return " ".join(sentences)


def describe_intervals(compared: ComparisonTable) -> str:
    kinds = {cell.kind for row in compared.cells.values() for cell in row.values() if cell}
    how = ", ".join(text for kind, text in INTERVAL_KIND_TEXTS.items() if kind in kinds)
    sentences = ["↑: higher is better, ↓: lower is better."]
    if how:
        sentences.append(f"Small numbers: 95 % intervals ({how}).")
    if "quartiles" in kinds:
        sentences.append("Timings have quartiles.")
    return " ".join(sentences)


def phase_title(phase: PhaseResults) -> str:
    return f"{STAGES[phase.name].title} on {phase.card['name']}"


def describe_leader_or_range(column: Column, cells: Cells, controls: Collection[str] = ()) -> str:
    """Return a line on a column: its significant leader, else the two extreme methods; "": none."""
    having = cells_by_method(column.name, cells)
    compared = {name: cell for name, cell in having.items() if name not in controls}
    quantity = QuantityByMethod("", column, compared)
    if not compared:
        return ""
    if leader := quantity.leader:
        value = format_method_value(quantity, leader)
        return f"{column.label}: {value} of {leader} is {column.better} than all others"
    values = [
        f"{quantity.format.value(quantity.interval(method).value)} ({method})"
        for method in dict.fromkeys(quantity.extremes())
    ]
    return f"{column.label}: {' to '.join(values)}"


# Columns before those of a paper: the score, and for the cost what it is of.
LEADING_COLUMNS_BY_PAPER = {
    "cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead"),
    "moge": ("test_accuracy", "test_accuracy_top5"),
    "tgr": ("test_accuracy", "steps_to_baseline_loss"),
}
LEADING_ERROR_COLUMNS = ("test_mae", "ppl")  # the score of ages, and of words
MAX_LISTED_PAPER_NUMBERS = 3  # in a head; with more, the smallest and the largest
PAPER_NUMBERS_NOTE = (
    "In italics below a column's name: the paper's own numbers. They come from other data and "
    "sizes: read them for their direction, not for their height."
)


def paper_tables_block(
    columns: Sequence[Column], cells: Cells, controls: Collection[str], papers: Collection[str]
) -> PageBlock:
    """Return a block with one table per paper, of all methods on that paper's metrics."""
    # papers: names of the papers whose claims the study tests: only their numbers are shown.
    grids = [
        build_paper_table(paper, columns, cells, controls, papers)
        for paper in TITLES
        if any(column.paper == paper and not column.detail for column in columns)
    ]
    texts = [PAPER_NUMBERS_NOTE] if any(grid.more for grid in grids) else []
    title = "Every method on the metrics of every paper"
    return PageBlock(title, texts, grids, choice=True, folded=True)


def build_paper_table(
    paper: str,
    columns: Sequence[Column],
    cells: Cells,
    controls: Collection[str],
    papers: Collection[str],
) -> PageTable:
    """Return our methods on ``paper``'s metrics and, below, the numbers printed in ``papers``."""
    of_paper = [column for column in columns if column.paper == paper and not column.detail]
    names = (*LEADING_COLUMNS_BY_PAPER.get(paper, ("test_accuracy",)), *LEADING_ERROR_COLUMNS)
    shown = [column for column in columns if column.name in names] + of_paper
    keys = [column.name for column in of_paper]
    having = {method: row for method, row in cells.items() if any(map(row.get, keys))}
    absent = ", ".join(method for method in cells if method not in having)
    metrics = {column.name for column in shown}
    models = [
        model
        for model in REPORTED_MODELS
        if model.paper == paper and model.printed_in in papers and model.values.keys() & metrics
    ]
    below = (f"Without these metrics: {absent}." if absent else "", NOTES[paper] if models else "")
    more = []
    for model in models:  # all its numbers, and their place in the paper
        values = [
            f"{column.label} {format_paper_number(model.values[column.name], column)}"
            for column in shown
            if column.name in model.values
        ]
        head = PageCell(model.model, note=model.source)
        more.append(TableRow(head, [PageCell("; ".join(values), look="words")]))
    grid = method_rows_table(
        shown, having, controls, lambda column: format_paper_values(column, models)
    )
    below = " ".join(filter(None, below))
    return grid._replace(title=TITLES[paper], short=SHORT_TITLES[paper], below=below, more=more)


def format_paper_values(column: Column, models: Sequence[PaperModelNumbers]) -> list[str]:
    """Return a paper's numbers for a column as texts: one per model, or their range if many."""
    name = column.name
    values = {model.model: model.values[name] for model in models if name in model.values}
    printed = {
        model: format_paper_number(value, column).replace(" ", "\u00a0")
        for model, value in sorted(values.items(), key=lambda pair: pair[1])
    }
    if len(values) <= MAX_LISTED_PAPER_NUMBERS:
        return [f"{model} {printed[model]}" for model in values]
    smallest, *_, largest = printed.values()
    return [f"{len(values)} models {smallest} to {largest}"]
