"""The page's sentences and sections. A difference is named only where a test shows it."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from moecore.measure.values import place_slug
from moecore.report.claims.claims_table import ANSWERS
from moecore.report.claims.evaluation import EvaluatedClaim, drop_questions, keep_questions
from moecore.report.claims.significance import WORDS
from moecore.report.column import Column, has_moe_method
from moecore.report.figures.training_figures import draw_filter_sigma_schedule
from moecore.report.headline_quantities import (
    PhaseQuantities,
    QuantityByMethod,
    cells_by_method,
    first_columns,
)
from moecore.report.page.view import Block, Picture, Section, method_rows_table, metric_rows_table
from moecore.report.pictures import transfer
from moecore.report.results import list_displays
from moecore.report.tables.cells import Cells, keep_percent_on_line
from moecore.report.tables.methods_by_paper import paper_tables_block
from moecore.report.tables.metrics_by_method import ComparisonTable, used_tests
from moecore.report.typed_results import Phase, Results, list_without_none
from moecore.statistics.comparisons import BOTH
from moecore.study.stages import STAGES

VERDICTS = {
    "holds": ("holds", "hold"),
    "differs": ("differs here", "differ here"),
    "open": ("is open: not significant", "are open: not significant"),
}
NAMED = 3  # claims per verdict, at most, that are named
SCORES = {"share": ("is significantly more accurate", "is most accurate", "is as accurate as")}
ERRORS = (
    "has a significantly smaller error",
    "has the smallest error",
    "has as small an error as",
)


def describe_phase_findings(
    phase: Phase, title: str, quantities: PhaseQuantities, dense: Collection[str]
) -> str:
    """Return the main results of a phase in a few sentences after its title."""
    several = len(quantities.score.cells if quantities.score else phase.models) > 1
    parts = [_routing(phase, quantities)]
    parts += _scores(quantities, dense, phase.seeds == 1) if several else _alone(quantities)
    return keep_percent_on_line(f"{title}: {'. '.join(parts)}.")


def describe_claims(evaluated: Sequence[EvaluatedClaim]) -> str:
    """Return how many claims hold, and which, and how many questions are answered."""
    claims = drop_questions(evaluated)
    questions = keep_questions(evaluated)
    told = []
    if claims:
        told.append(_judged(claims))
    if questions:
        told.append(_asked(questions))
    return keep_percent_on_line(" ".join(told))


def _asked(questions: Sequence[EvaluatedClaim]) -> str:
    """Return ``Of 3 questions that no paper answers: 1 yes, 2 open.``."""
    words = Counter(ANSWERS.get(question.verdict, question.verdict) for question in questions)
    if len(questions) == 1:
        return f"One question that no paper answers: {next(iter(words))}."
    counts = ", ".join(f"{count} {word}" for word, count in words.items())
    return f"Of {len(questions)} questions that no paper answers: {counts}."


def _judged(evaluated: Sequence[EvaluatedClaim]) -> str:
    parts = []
    for name, (singular, plural) in VERDICTS.items():
        if claims := [claim for claim in evaluated if claim.verdict == name]:
            verb = singular if len(claims) == 1 else plural
            parts.append(f"{len(claims)} {verb}{_which(claims)}")
    if len(evaluated) == 1:
        told = f"The one claim tested here {parts[0].removeprefix('1 ')}."
    else:
        told = f"Of {len(evaluated)} claims tested here, {'; '.join(parts)}."
    return told + _after_holm(evaluated)


def _after_holm(evaluated: Sequence[EvaluatedClaim]) -> str:
    """Return how many verdicts remain with Holm's correction; "" if all do."""
    decided = [claim for claim in evaluated if claim.verdict != "open"]
    remaining = [claim for claim in decided if claim.verdict_holm != "open"]
    if len(remaining) == len(decided):
        return ""
    verb = "remains" if len(remaining) == 1 else "remain"
    return (
        " With Holm's correction for several tests, within each paper, "
        f"{len(remaining)} of {len(decided)} decided claims {verb} decided."
    )


def _which(claims: Sequence[EvaluatedClaim]) -> str:
    """Return the methods and metrics of at most ``NAMED`` claims, in brackets."""
    if len(claims) > NAMED:
        return ""
    comparisons = [
        f"{evaluated.claim.method} against {evaluated.claim.against}: {evaluated.metric.label}"
        for evaluated in claims
    ]
    return f" ({'; '.join(dict.fromkeys(comparisons))})"


def _routing(phase: Phase, quantities: PhaseQuantities) -> str:
    """Return what decides on experts, and how steady its choices are."""
    steady = quantities.steady
    if steady is None:
        if not has_moe_method(phase.models):
            return (
                "no expert is chosen, as a dense model sends every token through the same weights"
            )
        return "the router decides; how steady its choices are was not measured"
    if len(steady.cells) == 1:
        return steady.told(format_method_value(steady, next(iter(steady.cells))))
    if leader := steady.leader:
        value = steady.told(format_method_value(steady, leader))
        return f"the router of {leader} is the steadiest: {value}"
    return steady.told(format_value_range(steady))


def _scores(quantities: PhaseQuantities, dense: Collection[str], one_seed: bool) -> list[str]:
    both = list_without_none((quantities.score, quantities.attacked))
    if len(both) == 2 and all(quantity.leader is None for quantity in both):
        better = SCORES.get(both[0].column.form, ERRORS)[0]
        tie = f"no method {better} than all others, on clean or on attacked data"
        return [f"With one seed {tie}" if one_seed else tie.capitalize()]
    return [_score(quantity, dense) for quantity in both]


def _score(quantity: QuantityByMethod, dense: Collection[str]) -> str:
    """Return which method is significantly better than all others, if one is."""
    better, best, as_good = SCORES.get(quantity.column.form, ERRORS)
    leader = quantity.leader
    condition = quantity.words
    if leader is None:
        values = format_value_range(quantity)
        return f"{condition.capitalize()} no method {better} than all others: {values}"
    measured = format_method_value(quantity, leader)
    if leader in dense:
        return f"{condition.capitalize()} no mixture of experts {as_good} {leader}, {measured}"
    return f"{leader} {best} {condition}, {measured}"


def _alone(quantities: PhaseQuantities) -> Iterable[str]:
    for quantity in list_without_none((quantities.score, quantities.attacked)):
        method = next(iter(quantity.cells))
        measured = format_method_value(quantity, method)
        told = {"share": "gets {} right"}.get(quantity.column.form, "has an error of {}")
        yield f"{method} {told.format(measured)} {quantity.words}"


def format_method_value(quantity: QuantityByMethod, method: str) -> str:
    """Return ``79.1 % (76.0 – 82.2)``; an error has its unit."""
    text = quantity.format.value_with_limits(quantity.interval(method), "()")
    return f"{text} {quantity.unit}".rstrip()


def format_value_range(quantity: QuantityByMethod) -> str:
    """Return ``55.0 to 79.1 %``, or ``55.0 %`` for equal texts; an error has its unit."""
    low, high = (
        quantity.format.value(quantity.interval(method).value) for method in quantity.ends()
    )
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{span} {quantity.unit}".rstrip()


KINDS = {
    BOTH: "over test items and seeds together if items are stored (docs/intervals.md)",
    "t": "Student's t over seeds",
    "jackknife": "the jackknife over seeds for means over pairs of them",
    "wilson": "Wilson for shares",
    "bootstrap": "bootstrap over test images for means",
    "draws": "Student's t over draws of few-shot images",
}
CONTROL = "trained on shuffled labels, or with routing that is not learned"


def phase_section(results: Results, phase: Phase, compared: ComparisonTable) -> Section:
    """Return the numbers of a phase, then a folded block per measurement."""
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
    displays = [
        display
        for display in list_displays()
        if display.applies(phase.task) and phase.results(display.kind)
    ]
    folded = [block for display in displays for block in display.blocks(phase)]
    if phase.name == next(iter(results.phases)):
        folded.append(sigma_schedule_block(results))
    folded += [*transfer.phase_blocks(phase), full_table_block(compared), inapplicable_block(phase)]
    blocks += [block._replace(folded=True) for block in folded]
    told = []
    for block in blocks:
        if block.empty:
            continue
        finding = block.finding
        if not finding and block.about in columns:
            finding = describe_leader_or_range(columns[block.about], compared.cells, controls)
        place = block.title and f"{phase.name}-{place_slug(block.title).lower()}"
        told.append(block._replace(finding=keep_percent_on_line(finding), id=place))
    title = phase_title(phase)
    return Section(phase.name, title, title, (), told)


def sigma_schedule_block(results: Results) -> Block:
    """Return pictures of σ of MoGE's filter in training; equal schedules share a picture."""
    different = {
        (schedule.sigma_start, schedule.sigma_end, schedule.exponent): method
        for method, schedule in reversed(results.schedules.items())
    }
    pictures = []
    for method in reversed(different.values()):
        figure = draw_filter_sigma_schedule(results.schedules[method], method)
        pictures.append(Picture(figure, f"σ of {method}", getattr(figure, "caption", "")))
    told = f"the schedule of {join_names(list(results.schedules))}" if pictures else ""
    return Block("How the neighbourhood narrows", pictures=pictures, finding=told)


def inapplicable_block(phase: Phase) -> Block:
    """Return the measurements that do not apply, and why, once per method."""
    methods_by_reason = {
        f"{method}, {reason}.": method
        for method, seeds in phase.models.items()
        for model in seeds.values()
        for reason in model.skipped
    }
    methods = ", ".join(dict.fromkeys(methods_by_reason.values()))
    title = "Measurements that do not apply to a method"
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
    """Return what a mark in the table means; "" where nothing can be marked."""
    used = used_tests(results, phase, compared.metrics)
    if not used:
        return ""
    tests = "; ".join(text for test, text in WORDS.items() if test in used)
    sentences = [f"better than every other method, significant at 5 %. Tests: {tests}."]
    sentences.append("Without a mark no method is significantly better than all others.")
    if dense := [method for method in compared.cells if method in results.without_experts]:
        sentences.append(
            f"Methods without experts ({join_names(dense)}) are compared, never marked."
        )
    if controls:
        names = ", ".join(controls)
        sentences.append(f"Not compared: {names} (control, {CONTROL}).")
    return " ".join(sentences)


def describe_intervals(compared: ComparisonTable) -> str:
    cells = [cell for row in compared.cells.values() for cell in row.values() if cell]
    kinds = {cell.kind for cell in cells}
    how = ", ".join(text for kind, text in KINDS.items() if kind in kinds)
    sentences = ["↑: higher is better, ↓: lower is better."]
    if how:
        sentences.append(f"Small numbers: 95 % intervals ({how}).")
    if "quartiles" in kinds:
        sentences.append("Timings have quartiles.")
    return " ".join(sentences)


def phase_title(phase: Phase) -> str:
    return f"{STAGES[phase.name].title} on {phase.card['name']}"


def pluralize(count: int, word: str) -> str:
    """Return ``1 seed`` or ``2 seeds``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def join_names(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def describe_leader_or_range(column: Column, cells: Cells, controls: Collection[str] = ()) -> str:
    """Return the line of a folded block: the method that leads by a test, else the range."""
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
